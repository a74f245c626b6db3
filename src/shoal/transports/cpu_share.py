"""A bounded share of CPU time for some work, in turns that are fair among networks.

A token bucket of CPU time: each turn is charged what it took, and further ones wait
until that is paid for.  Networks take turns, so that one with many connections does not
keep others from theirs.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from shoal.transports.clock import Clock, DeadlineTimer

RESERVED = 0.001  # seconds that a turn is charged until it is known how many it takes

_Waiting: TypeAlias = asyncio.Future[None]


class CpuShare:
    """The ``share`` of a core for some work, and ``burst`` seconds of it at once.

    ``cpu`` returns how much CPU time the loop's thread has used: time in which other
    programs had the processor is not charged.
    """

    def __init__(
        self,
        clock: Clock,
        share: float,
        burst: float,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._share = share
        self._burst = burst
        self._cpu = cpu
        self._level = burst  # seconds that may be used; below 0: overdrawn
        self._at = clock.now()  # time of the level
        self._waiting: dict[str, deque[_Waiting]] = {}  # by network, the next one first
        self._timer = DeadlineTimer(clock, self._due, self._grant)

    async def wait(self, network: str) -> None:
        """Wait until it is a network's turn; ``turn`` has to follow at once."""
        self._refill()
        if self._level > 0 and not self._waiting:
            self._level -= RESERVED
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(network, deque()).append(waiting)
        self._timer.update()
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self.charge(-RESERVED)  # granted, and not used
            raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Charge the CPU time of the block, which must not wait."""
        began = self._cpu()
        try:
            yield
        finally:
            self.charge(self._cpu() - began - RESERVED)

    def charge(self, seconds: float) -> None:
        """Charge CPU time that was, or will be, used for the work."""
        self._refill()
        self._level -= seconds

    # Private parts, in the order in which they are called.

    def _refill(self) -> None:
        now = self._clock.now()
        gained = (now - self._at) * self._share
        self._level = min(self._level + gained, self._burst)
        self._at = now

    def _due(self) -> float | None:
        if not self._waiting:
            return None
        # At least what a turn reserves, so that the timer does not fire for nothing.
        return self._at + max(0.0, RESERVED - self._level) / self._share

    def _grant(self) -> None:
        self._refill()
        while self._waiting and self._level > 0:
            network = next(iter(self._waiting))
            queue = self._waiting.pop(network)
            first = queue.popleft()
            if queue:
                self._waiting[network] = queue  # after all others
            if not first.done():
                self._level -= RESERVED
                first.set_result(None)
