"""A bounded share of the event loop for some work, in turns that are fair among peers.

One loop serves everybody, and what one peer sends could leave nothing to the others.
So work that a peer can cause at will has a *share*: a token bucket of seconds.  It is
done in turns, one at a time and one in an iteration of the loop.  Each is charged what
it took, and the next one begins when that is paid for: first that of the peer which has
cost least.  Meanwhile a peer is not read, so that it has to wait.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import TypeAlias

from shoal.transports.clock import Clock, DeadlineTimer

LARGE = 64 << 10  # bytes of an input that waits for its turn
INPUTS_SHARE = 0.25  # of the loop, for large inputs
INPUTS_BURST = 0.02  # seconds at once: cheap inputs, such as files, never wait
ROUNDING = 1e-9  # seconds of a debt that are none
KEPT_MIN = (
    1000  # peers whose costs are kept at least, before those paid for are dropped
)

_Turn: TypeAlias = asyncio.Future[None]


class LoopShare:
    """The ``share`` of a core for some work, and ``burst`` seconds of it at once.

    ``meter`` returns seconds: by default the clock's, for turns that wait for threads.
    With the CPU time of the loop's thread, time in which other programs had the
    processor is not charged.
    """

    def __init__(
        self,
        clock: Clock,
        share: float = INPUTS_SHARE,
        burst: float = INPUTS_BURST,
        meter: Callable[[], float] | None = None,
    ) -> None:
        self.meter = meter or clock.now
        self._clock = clock
        self._share = share
        self._burst = burst
        self._level = burst  # seconds that may be used; below 0: a debt
        self._at = clock.now()  # time of the level
        self._busy = False  # from the start of a turn until another may begin
        self._resting = False  # the last turn is over
        self._timer = DeadlineTimer(clock, self._due, self._give_turn)
        # Start-time fair queueing (Goyal, Vin, Cheng, 1996).  The peers that wait, by
        # what they have cost when they were entered; that is compared with what they
        # cost by now when they come first.
        self._order: list[tuple[float, int, Hashable]] = []
        self._entries = count()
        self._waiting: dict[
            Hashable, dict[_Turn, None]
        ] = {}  # by peer, first one first
        self._spent: dict[Hashable, float] = {}  # seconds, while anyone waits
        self._least = 0.0  # seconds that every peer counts as having cost
        self._kept = KEPT_MIN

    @property
    def is_spent(self) -> bool:
        """Whether a turn would have to wait."""
        return self._busy or self._debt() > 0

    @property
    def is_waited_for(self) -> bool:
        """Whether a peer waits for its turn."""
        return bool(self._waiting)

    @property
    def peers(self) -> int:
        """Number of peers whose costs are kept."""
        return len(self._spent)

    @asynccontextmanager
    async def turn(self, peer: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of a peer, which lasts for the block.

        The block waits for nothing but a thread that works for it.
        """
        if self.is_spent:
            await self._wait(peer)
        self._busy = True
        began = self.meter()
        try:
            yield
        finally:
            self.charge(peer, self.meter() - began)
            self._release()

    async def wait(self, peer: Hashable) -> None:
        """Wait for the turn of a peer; its processing time is charged afterwards."""
        async with self.turn(peer):
            pass

    def request(self, peer: Hashable, call: Callable[[], None]) -> asyncio.Future[None]:
        """Call when it is a peer's turn, unless the result is cancelled before."""

        def have_turn(turn: _Turn) -> None:
            if not turn.cancelled():
                try:
                    call()
                finally:
                    self._release()

        turn = self._enter(peer)
        turn.add_done_callback(have_turn)
        self._timer.update()
        return turn

    def charge(self, peer: Hashable, seconds: float) -> None:
        """Charge a peer what was, or will be, used outside a turn; or pay it back."""
        # Before the bucket is filled, so that what it gained in a turn is not lost.
        self._level -= seconds
        self._debt()
        self._spent[peer] = self._spent_by(peer) + seconds
        if len(self._spent) > 2 * self._kept:
            self._spent = {
                each: spent
                for each, spent in self._spent.items()
                if spent > self._least
            }
            self._kept = max(len(self._spent), KEPT_MIN)
        if seconds < 0:
            self._timer.update()

    # Private parts, in the order in which they are called.

    def _debt(self) -> float:
        """Fill the bucket; return the seconds of the work that are not paid for."""
        now = self._clock.now()
        gained = (now - self._at) * self._share
        self._level = min(self._level + gained, self._burst)
        self._at = now
        return max(0.0, -self._level - ROUNDING)

    async def _wait(self, peer: Hashable) -> None:
        turn = self._enter(peer)
        self._timer.update()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release()  # it was this one's turn already
            raise

    def _enter(self, peer: Hashable) -> _Turn:
        turn = asyncio.get_running_loop().create_future()
        turn.add_done_callback(partial(self._forget, peer))
        if peer not in self._waiting:
            self._waiting[peer] = {}
            entry = (self._spent_by(peer), next(self._entries), peer)
            heappush(self._order, entry)
        self._waiting[peer][turn] = None
        return turn

    def _forget(self, peer: Hashable, turn: _Turn) -> None:
        if turn.cancelled():
            self._waiting.get(peer, {}).pop(turn, None)

    def _release(self) -> None:
        # Even without a debt: the next one in another iteration of the loop.
        self._resting = True
        self._timer.update()

    def _due(self) -> float | None:
        if self._resting or (self._waiting and not self._busy):
            debt = self._debt()
            return self._at + debt / self._share
        return None

    def _give_turn(self) -> None:
        self._busy = self._resting = False
        while self._order:
            entered, _, peer = self._order[0]
            waiting = self._waiting[peer]
            spent = self._spent_by(peer)
            turn = next((each for each in waiting if not each.done()), None)
            if turn is None:
                heappop(self._order)
                del self._waiting[peer]
            elif spent > entered:
                heapreplace(self._order, (spent, next(self._entries), peer))
            else:
                del waiting[turn]
                heapreplace(self._order, (spent, next(self._entries), peer))
                self._least = spent
                self._busy = True
                turn.set_result(None)
                return
        self._spent.clear()
        self._least = 0.0

    def _spent_by(self, peer: Hashable) -> float:
        return max(self._spent.get(peer, 0.0), self._least)
