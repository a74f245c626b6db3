"""The worker's end of one task process."""

import asyncio
import sys
from contextlib import suppress

import psutil
import pytest

from shoal.tasks.process import ChildProcess

TURNS = 12  # of the event loop: by then the process has been told what to import


@pytest.mark.skipif(sys.platform == "win32", reason="Windows counts no descriptors")
async def test_cancelled_start_leaks_neither_process_nor_pipe() -> None:
    await _start_and_cancel(after=TURNS, times=1)  # what is opened once and kept
    before = _open()

    for times in (1, 2):
        for turns in range(1, TURNS):
            await _start_and_cancel(after=turns, times=times)

            assert _open() == before, f"cancelled {times} times after {turns} turns"


async def _start_and_cancel(*, after: int, times: int) -> None:
    starting = asyncio.create_task(
        ChildProcess.start([], trust=False, threads=1, on_end=lambda _: None)
    )
    await _turns(after)
    for _ in range(times):
        starting.cancel()
        await _turns(1)
    with suppress(asyncio.CancelledError):
        await starting


def _open() -> tuple[int, list[psutil.Process]]:
    here = psutil.Process()
    return here.num_fds(), here.children()


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
