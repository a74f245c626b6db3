"""An event loop whose time passes only when nothing is left to do at the moment."""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STEP = 0.01  # seconds


class _Jump(selectors.SelectSelector):
    """Instead of waiting for the next timer, goes to its time at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        # In steps, so that a turn of the loop has more than one thing to do.
        self.now += math.ceil(max(timeout, 0.0) / STEP) * STEP
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time: no sockets, no threads, no waiting."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
