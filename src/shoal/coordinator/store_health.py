"""Whether the store can be written, and when a write that failed is repeated.

Decision 28 says which errors a store recovers from.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from shoal.domain.errors import Fenced, StoreBroken, StoreError
from shoal.transports.clock import Clock

T = TypeVar("T")

RETRY_MIN = 1.0  # seconds until a write that failed is repeated
RETRY_MAX = 2.0  # seconds until it is repeated again: a database may come back soon
SLOW = 1.0  # seconds of a write from which on it is slow
SLOW_SHOWN = 60.0  # seconds for which that is shown after its end

log = logging.getLogger("shoal.coordinator")


class StoreHealthListener(Protocol):
    """Callbacks for the store's health.  They must neither wait nor raise."""

    def on_store_failing(self, error: StoreError) -> None:
        """A write failed and will be repeated."""

    def on_store_retried(self, error: StoreError) -> None:
        """A repeated write has failed again."""

    def on_store_healed(self) -> None:
        """A write has succeeded again."""

    def on_store_broken(self, error: StoreError) -> None:
        """A write failed, and no repetition can succeed."""


class StoreHealth:
    """Repeats writes until they succeed, or until the store is broken.

    All writers share the pauses: whichever write succeeds first ends the failure.
    """

    def __init__(self, clock: Clock) -> None:
        self._failure: StoreError | None = None
        self.is_broken = False
        self._clock = clock
        self._listeners: list[StoreHealthListener] = []
        self._pause = RETRY_MIN
        self._since = 0.0  # when the failure began
        self._retried_at = 0.0  # when the next attempt is made
        self._pausing = False
        self._waiting: list[asyncio.Future[None]] = []
        self._slowest = 0.0  # seconds of the slowest write that is shown
        self._slow_until = -math.inf
        self._writes: dict[int, float] = {}  # under way, with their beginnings
        self._numbers = itertools.count()
        self._broken = asyncio.Event()

    @property
    def failure(self) -> StoreError | None:
        """The last error; None: the store can be written.

        Its ``retry_after`` is when it may be healed, from now.
        """
        if self._failure is not None:
            self._tell_pause()
        return self._failure

    def subscribe(self, listener: StoreHealthListener) -> None:
        """Call ``listener`` on each change from now on."""
        self._listeners.append(listener)

    def write(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Make ``attempt`` until it succeeds, and return its result.

        An attempt that fails may have succeeded, if its answer was lost: made again,
        it must not count twice.  Raises StoreError if the store is broken, Fenced if
        another coordinator has taken it over.
        """

        async def timed() -> T:
            number, begun = next(self._numbers), self._clock.now()
            self._writes[number] = begun
            timer = self._clock.call_at(begun + SLOW, self._notice_slow)
            try:
                return await attempt()
            finally:
                timer.cancel()
                del self._writes[number]
                if (seconds := self._clock.now() - begun) >= SLOW:
                    self._notice_slow()
                    self._slowest = max(self._slowest, seconds)

        return self._repeat(timed, heals=True)

    def read(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """As ``write``, for operations that do not write: their success proves little.

        It ends a failure only if it had failed before.
        """
        return self._repeat(attempt, heals=False)

    def report_broken(self, error: StoreBroken | Fenced) -> None:
        """Treat the store as broken, or fenced, although no write has failed."""
        self._on_failed(error)

    async def wait_writable(self) -> None:
        """Wait until the store can be written, as far as is known."""
        while self.failure is not None:
            await self._next_change()

    async def wait_broken(self) -> StoreError:
        """Wait until the store is broken; return why."""
        await self._broken.wait()
        assert self.failure is not None, "it is broken for a reason"
        return self.failure

    @property
    def failing_for(self) -> float:
        """For how many seconds the store has been failing; 0: it is not."""
        return 0.0 if self.failure is None else self._clock.now() - self._since

    @property
    def slow_for(self) -> float:
        """How many seconds the slowest write took, or has taken until now.

        Of the last minute; 0: none took longer than a second.
        """
        now = self._clock.now()
        under_way = now - min(self._writes.values(), default=now)
        ended = self._slowest if now < self._slow_until else 0.0
        slowest = max(under_way, ended)
        return slowest if slowest >= SLOW else 0.0

    def _notice_slow(self) -> None:
        if self._clock.now() >= self._slow_until:
            log.warning(
                "slow store: a commit takes more than %.0f s: its disk is busy or "
                "failing",
                SLOW,
            )
            self._slowest = 0.0
        self._slow_until = self._clock.now() + SLOW_SHOWN

    async def _repeat(self, attempt: Callable[[], Awaitable[T]], *, heals: bool) -> T:
        while True:
            if self.is_broken and self.failure is not None:
                raise self.failure
            try:
                result = await attempt()
            except StoreError as error:
                self._on_failed(error)
                if not error.temporary:
                    raise
                heals = True
                await self._next_change()
            else:
                if self.is_broken and self.failure is not None:
                    # Found damaged meanwhile: its clients have been notified.
                    raise self.failure
                if heals and self._failure is not None:
                    self._heal()
                return result

    def _on_failed(self, error: StoreError) -> None:
        if self.is_broken:
            return
        first, self._failure = self._failure is None, error
        if not error.temporary:
            self._break(error)
        elif first:
            self._pause, self._since = RETRY_MIN, self._clock.now()
            log.error("store failing, new work is refused: %s", error.located)
            self._set_timer()
            for each in self._listeners:
                each.on_store_failing(error)
        elif not self._pausing:
            self._pause = min(2 * self._pause, RETRY_MAX)
            self._set_timer()
            for each in self._listeners:
                each.on_store_retried(error)

    def _break(self, error: StoreError) -> None:
        self.is_broken = True
        what = "fenced" if isinstance(error, Fenced) else "store broken"
        log.critical("%s, the coordinator ends: %s", what, error.located)
        for each in self._listeners:
            each.on_store_broken(error)
        self._broken.set()
        self._wake()

    def _heal(self) -> None:
        log.warning("store healed after_s=%.1f", self.failing_for)
        self._failure = None
        for each in self._listeners:
            each.on_store_healed()
        self._wake()

    def _set_timer(self) -> None:
        self._pausing = True
        self._retried_at = self._clock.now() + self._pause
        self._clock.call_at(self._retried_at, self._end_pause)
        self._tell_pause()

    def _end_pause(self) -> None:
        self._pausing = False
        self._wake()

    def _tell_pause(self) -> None:
        if self._failure is not None:
            left = max(0.0, self._retried_at - self._clock.now())
            self._failure.retry_after = math.ceil(left) + 1  # the attempt takes time

    async def _next_change(self) -> None:
        """Wait until the end of a pause, or of the failure."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():  # cancelled otherwise
                each.set_result(None)
