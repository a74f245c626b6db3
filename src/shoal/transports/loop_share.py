"""Turns for large inputs: they have a share of the event loop, and not all of it.

What a peer sends is decoded and handled in one go, which takes milliseconds for each
megabyte, and a peer that sends on and on would leave nothing to others.  So large
inputs take turns: one in an iteration of the loop, first from the peer that has cost
least, and after a long one the loop is left to others for a while.  Meanwhile a
connection is not read, so that its peer has to wait.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from shoal.transports.clock import Clock, Timer

LARGE = 64 << 10  # bytes of an input that waits for its turn
LONG = 0.005  # seconds that a turn may take without a pause after it
PAUSE = 3.0  # times as long as a long turn took: a quarter of the loop is for them


class LoopShare:
    """The turns of all peers, on all ports of a program."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken = False
        self._timer: Timer | None = None  # until the next turn may begin
        # The peers that wait, by what wakes them, the first that came first.
        self._waiting: dict[asyncio.Future[None], Hashable] = {}
        self._spent: dict[Hashable, float] = {}  # seconds, while anyone waits
        self._least = 0.0  # seconds that a peer without any counts as having spent

    @asynccontextmanager
    async def turn(self, peer: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of a peer, which lasts for the block.

        The block handles one input, and waits for nothing but a thread that does.
        """
        if self._taken or self._timer is not None:
            await self._wait(peer)
        self._taken = True
        began = self._clock.now()
        try:
            yield
        finally:
            took = self._clock.now() - began
            self._spent[peer] = self._spent_by(peer) + took
            self._release(PAUSE * took if took > LONG else 0.0)

    async def _wait(self, peer: Hashable) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = peer
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self._release(0.0)  # it had its turn already
            raise

    def _release(self, pause: float) -> None:
        self._taken = False
        # Without a pause as well: in another iteration of the loop.
        when = self._clock.now() + pause
        self._timer = self._clock.call_at(when, self._give_turn)

    def _give_turn(self) -> None:
        self._timer = None
        waiting = [turn for turn in self._waiting if not turn.done()]
        if not waiting:
            self._spent.clear()
            self._least = 0.0
            return
        turn = min(waiting, key=lambda turn: self._spent_by(self._waiting[turn]))
        self._least = self._spent_by(self._waiting.pop(turn))
        self._taken = True
        turn.set_result(None)

    def _spent_by(self, peer: Hashable) -> float:
        return max(self._spent.get(peer, 0.0), self._least)
