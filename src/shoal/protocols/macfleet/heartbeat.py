"""Both ends of a heartbeat: one line that pings, one line that answers, then the end.

Sources: the MacFleet document, "Heartbeat", and recorded exchanges of MacFleet's own
programs.  Three things are stricter here.  A signed line is accepted once.  A pong is
refused if it is our own ping mirrored, a replay, or from another node than the one
pinged, since nothing but the fleet's key binds it to its ping.  Lines that are too long
or not UTF-8 count as failures; in an open fleet nothing is secret, so nothing counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import (
    HardwareProfile,
    decode_profile,
    encode_profile,
)
from shoal.protocols.macfleet.codec.heartbeat_lines import (
    NONCE_SIZE,
    HeartbeatLine,
    LineBuffer,
    decode_ping,
    decode_pong,
    encode_ping,
    encode_pong,
)
from shoal.protocols.macfleet.codec.keys import sign
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.multi_peer import PeerMessage, ToPeer
from shoal.protocols.seam.session import Batch, Close, Output, Send

REPLAYS_MAX = 65_536  # signed lines that are remembered; the oldest is forgotten first


class ReplayFilter:
    """The signed lines that were heard: each is good for one time.

    What was heard before the last start, or before so many others, is not known.
    """

    def __init__(self) -> None:
        self._proofs: OrderedDict[bytes, None] = OrderedDict()  # as they came

    def is_replay(self, key: bytes, line: HeartbeatLine) -> bool:
        """Say whether a line was heard before, and remember it."""
        node_id, nonce, hardware = line
        proof = sign(key, node_id.encode(), b" ", nonce, b" ", hardware or b"")
        if proof in self._proofs:
            return True
        self._proofs[proof] = None
        if len(self._proofs) > REPLAYS_MAX:
            self._proofs.popitem(last=False)
        return False


@dataclass(frozen=True, slots=True)
class FleetMember:
    """How we take part in a fleet.

    ``key`` is None in an open one.  ``profile`` is what we are made of: a call, for the
    port in it is known only when it is listened on.  ``draw`` returns that many random
    bytes.  ``pings`` and ``pongs`` are those that were heard.
    """

    node_id: str
    key: bytes | None
    profile: Callable[[], HardwareProfile]
    draw: Callable[[int], bytes]
    pings: ReplayFilter = field(default_factory=ReplayFilter)
    pongs: ReplayFilter = field(default_factory=ReplayFilter)

    def own_line(self, *, hardware: bool) -> HeartbeatLine:
        """Return what we say of ourselves, with a nonce that was never used."""
        if self.key is None:
            return HeartbeatLine(self.node_id)
        told = encode_profile(self.profile()) if hardware else None
        return HeartbeatLine(self.node_id, self.draw(NONCE_SIZE), told)


ID_MAX = 256  # bytes, as on the transport port


class OwnIdError(PeerError):
    """A pong bears the id of whoever asked."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Which node answered; ``profile`` is None where it does not say."""

    node_id: str
    profile: HardwareProfile | None


class PingExchange:
    """One ping and its pong; ``expected_id`` is the id that has to answer; empty:
    any."""

    def __init__(self, member: FleetMember, expected_id: str = "") -> None:
        self._member = member
        self._expected_id = expected_id
        self._nonce = b""

    def ping(self) -> bytes:
        """Return the ping."""
        word = self._member.own_line(hardware=True)
        self._nonce = word.nonce
        return encode_ping(self._member.key, word)

    def receive_pong(self, line: bytes) -> Pong:
        """Read what came in answer.

        Raises PeerError if it is no pong of a node of the fleet, or of no use.
        """
        heard = decode_pong(self._member.key, line)
        node_id = heard.node_id
        if not 0 < len(node_id.encode()) <= ID_MAX:
            raise PeerError(f"a node's id has 1 to {ID_MAX} bytes")
        if node_id == self._member.node_id:
            raise OwnIdError("the pong bears our own id: we were called ourselves")
        if self._expected_id and node_id != self._expected_id:
            raise PeerError(f"{node_id!r} answers where {self._expected_id!r} should")
        if (key := self._member.key) is not None:
            if heard.nonce == self._nonce:
                raise PeerError("the pong is our own ping, handed back")
            if self._member.pongs.is_replay(key, heard):
                raise PeerError(f"the pong of {node_id!r} was heard before")
        told = heard.hardware
        return Pong(node_id, None if told is None else decode_profile(told))


class PingSession:
    """A connection for one exchange; ``on_pong`` takes the pong, and the time.

    How long it may take is for whoever makes the connection to say.
    """

    accepts: frozenset[type] = frozenset()
    deadline = None

    def __init__(
        self, exchange: PingExchange, on_pong: Callable[[Pong, float], None]
    ) -> None:
        self._exchange = exchange
        self._on_pong = on_pong
        self._sent = False
        self._closed = False
        self._line = LineBuffer()

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        if self._sent:
            return ()
        self._sent = True
        return (Send(self._exchange.ping()),)

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        if self._closed:
            return ()
        line = self._line.feed(batch)
        return () if line is None else self._receive_line(line, now)

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Take what came for the whole line, as real peers do."""
        if self._closed or not self._line.partial:
            return ()
        return self._receive_line(self._line.partial, now)

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        return ()

    def _receive_line(self, line: bytes, now: float) -> Sequence[Output]:
        self._closed = True
        pong = self._exchange.receive_pong(line)
        self._on_pong(pong, now)
        return (Close("answered"),)


LINE_WITHIN = 1.0  # seconds from when the connection is open


class PongSession:
    """A connection from ``address``: one line, at most one answer, and its end."""

    accepts: frozenset[type] = frozenset()

    def __init__(
        self, member: FleetMember, limiter: FleetRateLimiter, address: str
    ) -> None:
        self.deadline: float | None = None
        self._member = member
        self._limiter = limiter
        self._address = address
        self._opened = False
        self._closed = False
        self._line = LineBuffer()

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        if not self._opened:
            self._opened = True
            self.deadline = now + LINE_WITHIN
            return ()
        if self._closed or self.deadline is None or now < self.deadline:
            return ()
        return self._reject(f"no line within {LINE_WITHIN:g} s", now)

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        if self._closed:
            return ()
        try:
            line = self._line.feed(batch)
        except LimitExceeded as error:
            return self._reject(str(error), now)
        return () if line is None else self._on_ping(line, now)

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Take what came for the whole line, as real nodes do; nothing is no guess."""
        if self._closed:
            return ()
        if line := self._line.partial:
            return self._on_ping(line, now)
        self._limiter.on_abandoned(self._address, now)
        return self._end("said nothing")

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        return ()

    def _on_ping(self, line: bytes, now: float) -> Sequence[Output]:
        # Others of this address may have failed since this one was let pass.
        if self._limiter.is_banned(self._address, now):
            self._limiter.on_abandoned(self._address, now)
            return self._end("too many failures of this address")
        own = self._member
        try:
            ping = decode_ping(own.key, line)
        except PeerError as error:
            return self._reject(str(error), now)
        if own.key is not None and own.pings.is_replay(own.key, ping):
            return self._reject(f"the ping of {ping.node_id!r} was heard before", now)
        self._limiter.on_success(self._address, now)
        pong = own.own_line(hardware=ping.hardware is not None)
        return (Send(encode_pong(own.key, pong)), *self._end("answered"))

    def _reject(self, why: str, now: float) -> Sequence[Output]:
        if self._member.key is None:
            self._limiter.on_abandoned(self._address, now)
        else:
            self._limiter.on_failure(self._address, now)
        return self._end(why)

    def _end(self, why: str) -> Sequence[Output]:
        self._closed, self.deadline = True, None
        return (Close(why),)
