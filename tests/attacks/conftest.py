"""A coordinator to attack, and limits that small attacks exceed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from attacks.siege import attacked, besieged, standing
from gateway.serving import Pool


@pytest.fixture
async def pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pool]:
    """A coordinator for one test."""
    async with besieged(tmp_path, caplog) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    """A coordinator that all tests of a module attack, in its `shared_pool`."""
    async with standing(tmp_path_factory.mktemp("coordinator")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def shared_pool(
    standing_pool: Pool, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pool]:
    """A coordinator for all tests of a module, which is checked after each of them.

    Their loop has the module's scope.  It is for attacks that leave nothing behind by
    design: bans, budgets and settings would be seen by the next one.
    """
    async with attacked(standing_pool, caplog) as running:
        yield running


@pytest.fixture
def small_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of unread data, so that a small flood exceeds it."""
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_MAX", 1 << 16)
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_FULL", 1 << 12)
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)
