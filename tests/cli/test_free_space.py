"""A start waits for space: ``live/test_full_disk.py`` has a disk that is full."""

import asyncio
from pathlib import Path

import pytest

from shoal.cli.pool.serve import wait_for_space

PLENTY = 1 << 62  # bytes that no disk has


async def test_start_waits_for_nothing_if_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await wait_for_space(tmp_path / "made" / "later", asyncio.Event(), 1)

    assert not caplog.records


async def test_waiting_start_says_where_space_is_missing_and_can_be_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(wait_for_space(tmp_path, stop, PLENTY))
    await asyncio.wait([waiting], timeout=0.0)
    assert not waiting.done()

    stop.set()
    await waiting

    (record,) = caplog.records
    assert f"--data-dir {tmp_path} has " in record.getMessage()
    assert f"a start needs {PLENTY / 1e6:.1f} MB: free some" in record.getMessage()
