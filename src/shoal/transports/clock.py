"""Time as a parameter: the rest of the program never reads a clock."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What time it is, and how to be called later."""

    def now(self) -> float:
        """Return monotonic seconds."""

    def wall(self) -> float:
        """Return Unix seconds, for people and records."""

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Call when ``now`` reaches ``when``."""


@dataclass(slots=True, eq=False)
class DeadlineTimer:
    """Calls ``tick`` when the deadline of a state machine has come.

    ``deadline`` returns the current one; None: there is none.  ``update`` is called
    after anything that may have changed it.
    """

    _clock: Clock
    _deadline: Callable[[], float | None]
    _tick: Callable[[], None]
    _timer: Timer | None = None
    _due: float = 0.0

    def update(self) -> None:
        """Set the timer to the deadline."""
        deadline = self._deadline()
        if deadline is None:
            return
        if self._timer is not None:
            # The deadline usually moves later: the timer checks it when it fires.
            if self._due <= deadline:
                return
            self._timer.cancel()
        self._due = deadline
        self._timer = self._clock.call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Stop the timer; ``update`` sets it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline is not None and deadline <= self._clock.now():
            self._tick()
        self.update()


class LoopClock:
    """The running event loop's time.

    Under the simulator's event loop this is virtual time, and ``wall`` is then the time
    since the simulation's own beginning.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,  # noqa: TID251  # this is the clock
    ) -> None:
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
