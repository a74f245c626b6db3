"""The other end of a heartbeat: whoever asks with the fleet's key is answered.

Sources: the MacFleet document, "Heartbeat", and what real nodes do.  Stricter than they
are: a line may be signed only once, and lines that are too long or no UTF-8 count as
wrong.  In an open fleet nothing is secret, so nothing counts.
"""

from collections.abc import Sequence

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.crowd import From, To
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.one_line import OneLine
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.wire.lines import read_ping, write_pong
from shoal.protocols.session import Batch, Close, Output, Send

LINE_WITHIN = 1.0  # seconds from when the connection is open


class PongSession:
    """A connection from ``address``: one line, at most one answer, and its end."""

    accepts: frozenset[type] = frozenset()

    def __init__(self, own: Member, limiter: Limiter, address: str) -> None:
        self.deadline: float | None = None
        self._own = own
        self._limiter = limiter
        self._address = address
        self._opened = False
        self._over = False
        self._line = OneLine()

    def tick(self, now: float) -> Sequence[From | Output]:
        if not self._opened:
            self._opened = True
            self.deadline = now + LINE_WITHIN
            return ()
        if self._over or self.deadline is None or now < self.deadline:
            return ()
        return self._wrong(f"no line within {LINE_WITHIN:g} s", now)

    def receive(self, batch: Batch, now: float) -> Sequence[From | Output]:
        if self._over:
            return ()
        try:
            line = self._line.take(batch)
        except LimitExceeded as error:
            return self._wrong(str(error), now)
        return () if line is None else self._asked(line, now)

    def parted(self, now: float) -> Sequence[Output]:
        """Take what came for the whole line, as real nodes do; nothing is no guess."""
        if self._over:
            return ()
        if line := self._line.so_far:
            return self._asked(line, now)
        self._limiter.left(self._address, now)
        return self._end("said nothing")

    def issue(self, message: To, now: float) -> Sequence[Output]:
        return ()

    def _asked(self, line: bytes, now: float) -> Sequence[Output]:
        # Others of this address may have failed since this one was let pass.
        if self._limiter.barred(self._address, now):
            self._limiter.left(self._address, now)
            return self._end("too many failures of this address")
        own = self._own
        try:
            ping = read_ping(own.key, line)
        except PeerError as error:
            return self._wrong(str(error), now)
        if own.key is not None and own.pings.before(own.key, ping):
            return self._wrong(f"the ping of {ping.node_id!r} was heard before", now)
        self._limiter.right(self._address, now)
        pong = own.word(hardware=ping.hardware is not None)
        return (Send(write_pong(own.key, pong)), *self._end("answered"))

    def _wrong(self, why: str, now: float) -> Sequence[Output]:
        if self._own.key is None:
            self._limiter.left(self._address, now)
        else:
            self._limiter.wrong(self._address, now)
        return self._end(why)

    def _end(self, why: str) -> Sequence[Output]:
        self._over, self.deadline = True, None
        return (Close(why),)
