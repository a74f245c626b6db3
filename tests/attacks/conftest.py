"""A coordinator to attack, for each test, and limits that small attacks exceed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attacks.siege import besieged
from gateway.serving import Pool


@pytest.fixture
async def pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pool]:
    async with besieged(tmp_path, caplog) as running:
        yield running


@pytest.fixture
def small_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of unread data, so that a small flood exceeds it."""
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_MAX", 1 << 16)
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_FULL", 1 << 12)
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)
