"""The session of a transport connection: a handshake, then the peer's messages.

Both ends are alike: either may submit jobs, whichever dialled.
"""

from collections.abc import Callable, Iterator, Sequence

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.macfleet import connection, handshake, local_node
from shoal.protocols.macfleet.codec import frames, hardware
from shoal.protocols.macfleet.handshake_messages import HandshakeRefused
from shoal.protocols.seam import session
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    Protection,
    ToPeer,
)

ANSWERED_IF_TOO_LARGE = frozenset({frames.FrameType.TASK, frames.FrameType.RESULT})
"""Frames that fail their task, and not the connection."""

REJECTION_WINDOW = 2.0  # seconds in which upstream disconnects a node it rejects


class FleetSession:
    """A connection to one peer; it can read a byte stream or whole frames."""

    head_size = frames.FrameReader.head_size
    accepts = connection.ACCEPTED_MESSAGES

    def __init__(
        self,
        local: local_node.FleetLocalNode,
        connection_info: local_node.FleetConnectionInfo,
    ) -> None:
        self._local = local
        self._info = connection_info
        member, peer = local.member, connection_info
        self._handshake = (
            handshake.ClientHandshake(
                *(member, member.hardware(), peer.expected_id),
                server=peer.address or "the other end",
            )
            if peer.dialled
            else handshake.ServerHandshake(member, member.hardware())
        )
        self._reader = frames.FrameReader(self._handshake.limit)
        self._connection: connection.FleetConnection | None = None
        self._seat: local_node.FleetSeat | None = None
        self._connected_at = 0.0
        self._nothing_received = True  # since the handshake
        self._started = False
        self._closed = False

    @property
    def deadline(self) -> float | None:
        if self._closed or not self._started:
            return None
        if self._connection is None:
            return self._handshake.deadline
        return self._connection.deadline

    # For links that split the stream into frames.

    def body_size(self, head: bytes) -> int:
        return self._reader.body_size(head)

    def buffer_for(
        self, head: bytes, allocate: Callable[[int], memoryview]
    ) -> memoryview | None:
        if self._connection is not None and self._reader.is_truncated(head):
            return allocate(frames.START_SIZE)
        return None

    def checksum(self, piece: memoryview, so_far: int) -> int:
        return self._reader.checksum(piece, so_far)

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[PeerMessage | session.Output]:
        """Handle frames that arrived together.

        A malformed one ends the connection, because those after it are unreliable.
        """
        outputs: list[PeerMessage | session.Output] = []
        try:
            for message in messages:
                if self._closed:
                    break
                outputs += self._receive_frame(self._reader.read(message), now)
        except PeerError as error:
            outputs += self._fail(error, now)
        return outputs

    # Every session.

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        outputs: list[PeerMessage | session.Output] = []
        try:
            for data in batch:
                if isinstance(data, str):
                    raise PeerError("text message on a byte stream")
                if self._closed:
                    break
                for message in self._reader.split(data):
                    outputs += self.receive_messages((message,), now)
        except PeerError as error:
            outputs += self._fail(error, now)
        return outputs

    def send(self, message: ToPeer, now: float) -> Sequence[session.Output]:
        if self._closed or self._connection is None:
            return ()
        outputs = self._connection.send(message.message, now)
        if any(isinstance(each, session.Close) for each in outputs):
            self._end()
        return outputs

    def tick(self, now: float) -> Sequence[PeerMessage | session.Output]:
        if self._closed:
            return ()
        if not self._started:
            self._started = True
            return [session.Send(each) for each in self._handshake.start(now)]
        if self._connection is not None:
            return self._tagged(self._connection.tick(now))
        try:
            self._handshake.tick(now)
        except HandshakeRefused as refusal:
            return self._on_refusal(refusal, now)
        return ()

    def connection_lost(self, now: float) -> Sequence[session.Output]:
        """Handle a disconnect by the peer."""
        if self._closed:
            return ()
        if self._connection is None:
            self._report_failure(self._handshake.disconnected("disconnected"), now)
        elif (
            self._nothing_received
            and self._info.dialled
            and now - self._connected_at < REJECTION_WINDOW
        ):
            self._local.on_rejected(self._info.address or "the other end")
        self._end()
        return ()

    # The handshake.

    def _receive_frame(
        self, frame: frames.Frame, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        if self._connection is not None:
            self._nothing_received = False
            return self._tagged(self._connection.receive(frame, now))
        try:
            step = self._handshake.receive(frame, now)
        except HandshakeRefused as refusal:
            return self._on_refusal(refusal, now)
        sends = [session.Send(each) for each in step.send]
        if isinstance(step, handshake.Agreed):
            return [*sends, *self._on_agreed(step, now)]
        self._reader.limit = self._handshake.limit
        return sends

    def _on_agreed(
        self, agreed: handshake.Agreed, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        """Add the peer, unless its name is taken."""
        local, info = self._local, self._info
        if not info.dialled:
            local.limiter.on_success(info.address, now)
        name = agreed.peer_id
        try:
            if not name:
                raise NotAdmitted("a node without an id cannot be identified")
            self._seat = local_node.FleetSeat(name, info.host, outbound=info.dialled)
            local.seats.claim(self._seat)
        except NotAdmitted as error:
            if info.dialled:
                local.on_refused(str(error))
            self._end()
            return (session.Close(str(error)),)
        self._connection = connection.FleetConnection(local, name, now)
        self._connected_at = now
        self._reader.limit = frames.PAYLOAD_MAX
        self._reader.truncated = ANSWERED_IF_TOO_LARGE
        protection = Protection.TLS if local.member.uses_tls else Protection.PLAIN
        joined = PeerJoined(name, submits_jobs=True, protection=protection)
        outputs: list[PeerMessage | session.Output] = [PeerMessage(ALL_PEERS, joined)]
        if agreed.profile is not None:
            outputs += self._describe(name, agreed.profile)
        return [*outputs, *self._connection.start()]

    def _describe(
        self, name: str, profile: hardware.HardwareProfile
    ) -> Iterator[PeerMessage | session.Output]:
        """Report the hardware of a peer, and its version if that is another."""
        registry, version = self._local.registry, profile.wire_version
        registry.on_handshake(name, profile)
        if text := registry.version_note(
            name, "wire_version", version, hardware.WIRE_VERSION
        ):
            yield session.Notice(text)
        other = f"wire version {version}, and this node has {hardware.WIRE_VERSION}"
        description = session.PeerProfile(
            name,
            hardware.reported_hardware(profile),
            protocol_version=version,
            remark="" if version == hardware.WIRE_VERSION else other,
        )
        yield PeerMessage(ALL_PEERS, PeerDescribed(description))

    # The end.

    def _fail(
        self, error: PeerError, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        """End the connection of a peer that violates the protocol."""
        if self._closed:
            return ()
        if self._connection is None:
            self._report_failure(self._handshake.disconnected(str(error)), now)
        self._end()
        return (session.protocol_error(error),)

    def _on_refusal(
        self, refusal: HandshakeRefused, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        self._report_failure(refusal, now)
        self._end()
        if refusal.id_conflict and self._local.on_id_conflict():
            return (session.Close(str(refusal), session.CloseCode.MOVED),)
        return (session.Close(str(refusal)),)

    def _report_failure(self, refusal: HandshakeRefused, now: float) -> None:
        """Report a failed handshake to the limiter or the dialer."""
        local, address = self._local, self._info.address
        if self._info.dialled:
            if refusal.final:
                local.on_refused(str(refusal))
        elif refusal.counts_as_failure:
            local.limiter.on_failure(address, now)
        else:
            local.limiter.on_abandoned(address, now)

    def _tagged(
        self, outputs: Sequence[connection.ConnectionOutput]
    ) -> list[PeerMessage | session.Output]:
        """Tag a peer's messages with the peer; handle Close."""
        tagged: list[PeerMessage | session.Output] = []
        for each in outputs:
            if isinstance(
                each, session.Send | session.Bulk | session.Close | session.Notice
            ):
                tagged.append(each)
                if isinstance(each, session.Close):
                    self._end()
            else:
                tagged.append(PeerMessage(ALL_PEERS, each))
        return tagged

    def _end(self) -> None:
        self._closed = True
        if self._seat is not None:
            self._local.seats.release(self._seat)
