"""A worker's ping of whom it is to join, for what the node says about itself."""

from collections.abc import Callable, Sequence

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event
from shoal.protocols.macfleet.fleet.one_line import OneLine
from shoal.protocols.macfleet.fleet.pinging import OwnId, PingExchange, Pong
from shoal.protocols.session import GOING_ON, Batch, Close, Output, Send, Welcome

PONG_WITHIN = 10.0  # seconds for the answer to a ping
NAMESAKE = "who answers has the name of this worker"


class Finding:
    """A connection for one ping; ``found`` takes the pong.

    Nobody can call us, so that a pong of our name is of somebody who is called alike:
    ``namesake`` is asked whether to go on then, under another name.
    """

    accepts: frozenset[type] = frozenset()

    def __init__(
        self,
        exchange: PingExchange,
        found: Callable[[Pong], None],
        namesake: Callable[[], bool],
    ) -> None:
        self._exchange = exchange
        self._found = found
        self._namesake = namesake
        self._line = OneLine()
        self._closed = False
        self.deadline: float | None = None

    def tick(self, now: float) -> Sequence[Command | Welcome | Output]:
        if self._closed:
            return ()
        if self.deadline is None:
            self.deadline = now + PONG_WITHIN
            return (Send(self._exchange.line()),)
        if now < self.deadline:
            return ()
        return self._close(f"no pong within {PONG_WITHIN:g} s")

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Welcome | Output]:
        if self._closed:
            return ()
        line = self._line.take(batch)
        return () if line is None else self._answered(line)

    def issue(self, message: Event, now: float) -> Sequence[Output]:
        return ()

    def parted(self, now: float) -> Sequence[Output]:
        """Take what came for the whole line, as real nodes do."""
        if self._closed or not self._line.so_far:
            return ()
        return self._answered(self._line.so_far)

    def _answered(self, line: bytes) -> Sequence[Output]:
        try:
            self._found(self._exchange.hear(line))
        except OwnId:
            if self._namesake():
                return self._end(Close(NAMESAKE, GOING_ON))
            return self._close(NAMESAKE)
        except PeerError as error:
            return self._close(str(error))
        return self._end(Close("found", GOING_ON))

    def _close(self, reason: str) -> Sequence[Output]:
        return self._end(Close(reason))

    def _end(self, close: Close) -> Sequence[Output]:
        self._closed, self.deadline = True, None
        return (close,)
