"""Time as a parameter: the rest of the program never reads a clock."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What time it is, and how to be called later."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...

    def wall(self) -> float:
        """Return Unix seconds, for people and records."""
        ...

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Call when ``now`` reaches ``when``."""
        ...


class LoopClock:
    """The running event loop's time.

    Under the simulator's event loop this is virtual time, and ``wall`` is then the time
    since the simulation's own beginning.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.wall = wall

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        return self._loop.call_at(when, call)


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what creates the fastest event loop here; None: asyncio's default."""
    try:
        import uvloop
    except ImportError:  # it does not exist for Windows
        return None
    return uvloop.new_event_loop
