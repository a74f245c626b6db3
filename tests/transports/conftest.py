"""The event loops that Shoal runs on."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.speed import PATIENCE

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
if sys.platform != "win32":
    import uvloop

    LOOPS.append(uvloop.new_event_loop)


@pytest.fixture(params=LOOPS, ids=lambda made: made.__module__.split(".")[0])
def run(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine on one of the loops."""

    def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(PATIENCE):
                await test()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(in_time())

    return run
