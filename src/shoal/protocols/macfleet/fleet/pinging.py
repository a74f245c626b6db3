"""The caller's end of a heartbeat: one line that asks, and one that answers.

A pong is bound to its ping by nothing but who signed it.  So one that is our own ping
handed back, that was heard before, or that is of another node than the one that was
asked says nothing about that node, and is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.domain.errors import PeerError
from shoal.protocols.crowd import From, To
from shoal.protocols.macfleet.fleet.one_line import OneLine
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.wire.hardware import Profile, read_profile
from shoal.protocols.macfleet.wire.lines import read_pong, write_ping
from shoal.protocols.session import Batch, Close, Output, Send

ID_MAX = 256  # bytes, as on the transport port


class OwnId(PeerError):
    """A pong bears the id of whoever asked."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Which node answered; ``profile`` is None where it does not say."""

    node_id: str
    profile: Profile | None


class PingExchange:
    """One ping and its pong; ``expected`` is the id that has to answer; empty: any."""

    def __init__(self, own: Member, expected: str = "") -> None:
        self._own = own
        self._expected = expected
        self._nonce = b""

    def line(self) -> bytes:
        """Return the ping."""
        word = self._own.word(hardware=True)
        self._nonce = word.nonce
        return write_ping(self._own.key, word)

    def hear(self, line: bytes) -> Pong:
        """Read what came in answer.

        Raises PeerError if it is no pong of a node of the fleet, or of no use.
        """
        heard = read_pong(self._own.key, line)
        node_id = heard.node_id
        if not 0 < len(node_id.encode()) <= ID_MAX:
            raise PeerError(f"a node's id has 1 to {ID_MAX} bytes")
        if node_id == self._own.node_id:
            raise OwnId("the pong bears our own id: we were called ourselves")
        if self._expected and node_id != self._expected:
            raise PeerError(f"{node_id!r} answers where {self._expected!r} should")
        if (key := self._own.key) is not None:
            if heard.nonce == self._nonce:
                raise PeerError("the pong is our own ping, handed back")
            if self._own.pongs.before(key, heard):
                raise PeerError(f"the pong of {node_id!r} was heard before")
        told = heard.hardware
        return Pong(node_id, None if told is None else read_profile(told))


class PingSession:
    """A connection for one exchange; ``heard`` takes the pong, and the time.

    How long it may take is for whoever makes the connection to say.
    """

    accepts: frozenset[type] = frozenset()
    deadline = None

    def __init__(
        self, exchange: PingExchange, heard: Callable[[Pong, float], None]
    ) -> None:
        self._exchange = exchange
        self._heard = heard
        self._asked = False
        self._over = False
        self._line = OneLine()

    def tick(self, now: float) -> Sequence[From | Output]:
        if self._asked:
            return ()
        self._asked = True
        return (Send(self._exchange.line()),)

    def receive(self, batch: Batch, now: float) -> Sequence[From | Output]:
        if self._over:
            return ()
        line = self._line.take(batch)
        return () if line is None else self._answered(line, now)

    def parted(self, now: float) -> Sequence[Output]:
        """Take what came for the whole line, as real peers do."""
        if self._over or not self._line.so_far:
            return ()
        return self._answered(self._line.so_far, now)

    def issue(self, message: To, now: float) -> Sequence[Output]:
        return ()

    def _answered(self, line: bytes, now: float) -> Sequence[Output]:
        self._over = True
        pong = self._exchange.hear(line)
        self._heard(pong, now)
        return (Close("answered"),)
