"""Both ends of a heartbeat: a connection with one ping, one pong, and its end.

Sources: the MacFleet document, "Heartbeat", and recorded exchanges of MacFleet's own
programs.  Three things are stricter here.  A signed line is accepted once.  A pong is
rejected if it is this node's own ping, a replay, or from another node than the one
pinged, because only the fleet's key binds it to its ping.  Lines that are too long or
not UTF-8 count as failures; in an open fleet nothing is secret, so nothing counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec import heartbeat_lines
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, decode_profile
from shoal.protocols.macfleet.handshake_messages import ID_MAX
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.protocols.seam.session import Batch, Close, CloseCode, Output, Send


@dataclass(frozen=True, slots=True)
class Pong:
    """The node that answered; ``profile`` is None if the pong has no hardware."""

    node_id: str
    profile: HardwareProfile | None


class PingExchange:
    """One ping and its pong; the pong must have ``expected_id``, empty: any id.

    ``hardware``: the ping has this node's hardware.  ``accepts_own_id``: the node that
    answers may have this node's id, because this one does not listen.
    """

    def __init__(
        self,
        member: FleetMember,
        expected_id: str = "",
        *,
        hardware: bool = True,
        accepts_own_id: bool = False,
    ) -> None:
        self._member = member
        self._expected_id = expected_id
        self._accepts_own_id = accepts_own_id
        self._hardware = hardware
        self._nonce = b""

    def ping(self) -> bytes:
        """Return the ping's line."""
        ping = self._member.own_line(hardware=self._hardware)
        self._nonce = ping.nonce
        return heartbeat_lines.encode_ping(self._member.key, ping)

    def receive_pong(self, line: bytes) -> Pong:
        """Decode and verify the pong.

        Raises PeerError if it is malformed, not signed for the fleet, or a replay.
        """
        pong = heartbeat_lines.decode_pong(self._member.key, line)
        node_id = pong.node_id
        if not 0 < len(node_id.encode()) <= ID_MAX:
            raise PeerError(f"a node's id has 1 to {ID_MAX} bytes")
        if node_id == self._member.node_id and not self._accepts_own_id:
            raise PeerError("the pong has this node's own id: it pinged itself")
        if self._expected_id and node_id != self._expected_id:
            raise PeerError(f"{node_id!r} answered, expected {self._expected_id!r}")
        if (key := self._member.key) is not None:
            if pong.nonce == self._nonce:
                raise PeerError("the pong is this node's own ping, sent back")
            if self._member.pongs.is_replay(key, pong):
                raise PeerError(f"the pong of {node_id!r} is a replay")
        profile_json = pong.hardware
        return Pong(
            node_id, None if profile_json is None else decode_profile(profile_json)
        )


class PingSession:
    """A connection for one ping; ``on_pong`` receives the pong and the time.

    ``timeout`` is in seconds; None: the caller limits the duration.  ``code`` is that
    of the close once the pong is there.
    """

    accepts: frozenset[type] = frozenset()

    def __init__(
        self,
        exchange: PingExchange,
        on_pong: Callable[[Pong, float], None],
        *,
        timeout: float | None = None,
        code: CloseCode = CloseCode.NORMAL,
    ) -> None:
        self.deadline: float | None = None
        self._exchange = exchange
        self._on_pong = on_pong
        self._timeout = timeout
        self._code = code
        self._sent = False
        self._closed = False
        self._line = heartbeat_lines.LineBuffer()

    def tick(self, now: float) -> Sequence[Output]:
        if not self._sent:
            self._sent = True
            self.deadline = None if self._timeout is None else now + self._timeout
            return (Send(self._exchange.ping()),)
        if self.deadline is None or now < self.deadline:
            return ()
        self._closed, self.deadline = True, None
        return (Close(f"no pong within {self._timeout:g} s"),)

    def receive(self, batch: Batch, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        line = self._line.feed(batch)
        return () if line is None else self._receive_line(line, now)

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Accept a line without its end, as upstream does."""
        if self._closed or not self._line.partial:
            return ()
        return self._receive_line(self._line.partial, now)

    def send(self, message: object, now: float) -> Sequence[Output]:
        return ()

    def _receive_line(self, line: bytes, now: float) -> Sequence[Output]:
        self._closed, self.deadline = True, None
        pong = self._exchange.receive_pong(line)
        self._on_pong(pong, now)
        return (Close("answered", self._code),)


LINE_TIMEOUT = 1.0  # seconds after the connection opens

OnPing: TypeAlias = Callable[[heartbeat_lines.HeartbeatLine, str, float], None]
"""Receives a signed ping, its address and the time."""


def _ignore(ping: heartbeat_lines.HeartbeatLine, address: str, now: float) -> None:
    pass


class PongSession:
    """A connection from ``address``: one ping, at most one pong, and its end.

    ``on_ping`` receives the ping if it is signed; in an open fleet none is.
    """

    accepts: frozenset[type] = frozenset()

    def __init__(
        self,
        member: FleetMember,
        limiter: FleetRateLimiter,
        address: str,
        on_ping: OnPing = _ignore,
    ) -> None:
        self.deadline: float | None = None
        self._member = member
        self._limiter = limiter
        self._address = address
        self._on_signed_ping = on_ping
        self._opened = False
        self._closed = False
        self._line = heartbeat_lines.LineBuffer()

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        if not self._opened:
            self._opened = True
            self.deadline = now + LINE_TIMEOUT
            return ()
        if self._closed or self.deadline is None or now < self.deadline:
            return ()
        return self._reject(f"no line within {LINE_TIMEOUT:g} s", now)

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        if self._closed:
            return ()
        try:
            line = self._line.feed(batch)
        except LimitExceeded as error:
            return self._reject(str(error), now)
        return () if line is None else self._on_ping(line, now)

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Accept a line without its end, as upstream does; none is not a failure."""
        if self._closed:
            return ()
        if line := self._line.partial:
            return self._on_ping(line, now)
        self._limiter.on_abandoned(self._address, now)
        return self._end("sent nothing")

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        return ()

    def _on_ping(self, line: bytes, now: float) -> Sequence[Output]:
        # The address may have been banned since this connection was accepted.
        if self._limiter.is_banned(self._address, now):
            self._limiter.on_abandoned(self._address, now)
            return self._end("this address is banned")
        member = self._member
        try:
            ping = heartbeat_lines.decode_ping(member.key, line)
        except PeerError as error:
            return self._reject(str(error), now)
        if member.key is not None and member.pings.is_replay(member.key, ping):
            return self._reject(f"the ping of {ping.node_id!r} is a replay", now)
        self._limiter.on_success(self._address, now)
        if member.key is not None:
            self._on_signed_ping(ping, self._address, now)
        pong = member.own_line(hardware=ping.hardware is not None)
        return (
            Send(heartbeat_lines.encode_pong(member.key, pong)),
            *self._end("answered"),
        )

    def _reject(self, reason: str, now: float) -> Sequence[Output]:
        if self._member.key is None:
            self._limiter.on_abandoned(self._address, now)
        else:
            self._limiter.on_failure(self._address, now)
        return self._end(reason)

    def _end(self, reason: str) -> Sequence[Output]:
        self._closed, self.deadline = True, None
        return (Close(reason),)
