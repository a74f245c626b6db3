"""A coordinator to attack, for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attacks.siege import besieged
from gateway.serving import Pool


@pytest.fixture
async def pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pool]:
    async with besieged(tmp_path, caplog) as running:
        yield running
