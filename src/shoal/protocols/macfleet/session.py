"""The session of a transport connection: a handshake, then the peer's messages.

Both ends are alike: either may submit jobs, whichever dialled.
"""

from collections.abc import Iterator, Sequence

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.vocabulary import (
    Dismiss,
    Draining,
    HealthReported,
    LoadChanged,
    OffersChanged,
)
from shoal.protocols.macfleet.codec.chunks import Allocate
from shoal.protocols.macfleet.codec.frames import (
    PAYLOAD_MAX,
    START_SIZE,
    Frame,
    FrameReader,
    FrameType,
)
from shoal.protocols.macfleet.codec.hardware import (
    WIRE_VERSION,
    HardwareProfile,
    reported_hardware,
)
from shoal.protocols.macfleet.connection import ACCEPTED_MESSAGES, FleetConnection
from shoal.protocols.macfleet.frame_handlers import ConnectionOutput
from shoal.protocols.macfleet.handshake import (
    Agreed,
    FleetHandshake,
    HandshakeRefused,
    HandshakeStrength,
)
from shoal.protocols.macfleet.handshake_client import ClientHandshake
from shoal.protocols.macfleet.handshake_server import ServerHandshake
from shoal.protocols.macfleet.liveness import SILENCE_MAX
from shoal.protocols.macfleet.local_node import (
    WORKER_FEATURE,
    FleetConnectionInfo,
    FleetLocalNode,
    FleetPeer,
    FleetRole,
    FleetSeat,
)
from shoal.protocols.macfleet.peer_state import LocalState
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import (
    Batch,
    Bulk,
    Close,
    CloseCode,
    Notice,
    Output,
    PeerProfile,
    Send,
    protocol_error,
)


def peer_of(local: FleetLocalNode, agreed: Agreed, *, encrypted: bool) -> FleetPeer:
    """Return the peer that a handshake has authenticated.

    A token makes it trusted only if the connection is ``encrypted``: otherwise an
    attacker in between could insert messages after the handshake.
    """
    strong = agreed.strong
    if strong is None:
        may_submit = True  # it has the fleet's token, or the fleet is open
        trusted = encrypted and agreed.strength is not HandshakeStrength.OPEN
        return FleetPeer(agreed.peer_id, trusted=trusted, may_submit=may_submit)
    is_worker = WORKER_FEATURE in strong.features
    has_token = strong.has_token or bool(strong.admitted.token_id)
    may_submit = strong.in_fleet or local.is_open or local.role is FleetRole.WORKER
    return FleetPeer(
        agreed.peer_id,
        is_shoal=True,
        trusted=encrypted and has_token,
        is_worker=is_worker,
        may_submit=may_submit and not is_worker,
        admitted=strong.admitted,
        public_key=strong.public_key,
    )


def joined(peer: FleetPeer, connection: FleetConnectionInfo) -> PeerJoined:
    """Return the event of a new peer; upstream peers cannot cancel jobs."""
    return PeerJoined(
        peer.name,
        cancels=peer.is_shoal,
        submits_jobs=peer.may_submit,
        grant=peer.admitted,
        protection=connection.protection,
        exclusive=peer.is_shoal and peer.is_worker,
        respects_offers=peer.is_shoal,
        public_key=peer.public_key.hex(),
    )


def seat_of(peer: FleetPeer, connection: FleetConnectionInfo, now: float) -> FleetSeat:
    """Return the seat of a peer; only Shoal nodes send heartbeats on the connection."""
    return FleetSeat(
        peer.name,
        peer.public_key,
        connection.host,
        outbound=connection.dialled,
        last_received=now,
        silence_max=SILENCE_MAX if peer.is_shoal else None,
    )


ANSWERED_IF_TOO_LARGE = frozenset({FrameType.TASK, FrameType.RESULT})
"""Frames of upstream peers that fail their task, and not the connection."""

BOTH_WORKERS = (
    "both nodes are workers, and workers submit no jobs: give the address of a "
    "coordinator, or --listen without an address"
)
REJECTION_WINDOW = 2.0  # seconds in which upstream disconnects a node it rejects


class FleetSession:
    """A connection to one peer; it can read a byte stream or whole frames."""

    head_size = FrameReader.head_size
    accepts = ACCEPTED_MESSAGES

    def __init__(
        self, local: FleetLocalNode, connection_info: FleetConnectionInfo
    ) -> None:
        self._local = local
        self._info = connection_info
        self._handshake = _begin_handshake(local, connection_info)
        self._reader = FrameReader(self._handshake.limit)
        self._connection: FleetConnection | None = None
        self._states: dict[type, LocalState] = {}  # the newest of each, to send later
        self._seat: FleetSeat | None = None
        self._connected_at = 0.0
        self._nothing_received = True  # since the handshake
        self._encrypted = False
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

    def on_open(self, certificate: bytes) -> None:
        self._encrypted = bool(certificate)
        self._handshake.on_open(certificate)

    def body_size(self, head: bytes) -> int:
        return self._reader.body_size(head)

    def buffer_for(self, head: bytes, allocate: Allocate) -> memoryview | None:
        if self._connection is None:
            return None
        if self._reader.is_truncated(head):
            return allocate(START_SIZE)
        return self._connection.buffer_for(head, allocate)

    def checksum(self, piece: memoryview, so_far: int) -> int:
        return self._reader.checksum(piece, so_far)

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[PeerMessage | Output]:
        """Handle frames that arrived together.

        A malformed one ends the connection, because those after it are unreliable.
        """
        outputs: list[PeerMessage | Output] = []
        try:
            for message in messages:
                if self._closed:
                    break
                outputs += self._receive_frame(self._reader.read(message), now)
        except PeerError as error:
            outputs += self._fail(error, now)
        return outputs

    # Every session.

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        outputs: list[PeerMessage | Output] = []
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

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        content = message.message
        if self._closed:
            return ()
        if self._connection is not None:
            outputs = self._connection.send(content, now)
            if any(isinstance(each, Close) for each in outputs):
                self._end()
            return outputs
        if isinstance(content, OffersChanged | LoadChanged | Draining | HealthReported):
            self._states[type(content)] = content  # sent after the handshake
        return ()

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        if self._closed:
            return ()
        if not self._started:
            self._started = True
            return [Send(each) for each in self._handshake.start(now)]
        if self._connection is not None:
            return self._tagged(self._connection.tick(now))
        try:
            self._handshake.tick(now)
        except HandshakeRefused as refusal:
            return self._on_refusal(refusal, now)
        return ()

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Handle a disconnect by the peer."""
        if self._closed:
            return ()
        if self._connection is None:
            self._report_failure(self._handshake.disconnected("hung up"), now)
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
        self, frame: Frame, now: float
    ) -> Sequence[PeerMessage | Output]:
        if self._connection is not None:
            self._nothing_received = False
            if self._seat is not None:
                self._seat.last_received = now
            return self._tagged(self._connection.receive(frame, now))
        try:
            step = self._handshake.receive(frame, now)
        except HandshakeRefused as refusal:
            return self._on_refusal(refusal, now)
        sends = [Send(each) for each in step.send]
        if isinstance(step, Agreed):
            return [*sends, *self._on_agreed(step, now)]
        self._reader.limit = self._handshake.limit
        return sends

    def _on_agreed(self, agreed: Agreed, now: float) -> Sequence[PeerMessage | Output]:
        """Add the peer, unless its name is taken."""
        local, info = self._local, self._info
        if not info.dialled:
            local.limiter.on_success(info.address, now)
        peer = peer_of(local, agreed, encrypted=self._encrypted)
        connection = FleetConnection(local, peer, now)
        if peer.is_shoal and local.registry is not None:
            local.registry.mark_shoal(peer.name, is_worker=peer.is_worker)
        try:
            self._seat = self._claim_seat(peer, now)
        except NotAdmitted as error:
            if info.dialled:
                local.on_refused(str(error))
            return self._tagged(connection.send(Dismiss(str(error)), now))
        self._connection, self._connected_at = connection, now
        self._reader.limit = PAYLOAD_MAX
        if not peer.is_shoal:  # Shoal nodes send neither
            self._reader.truncated = ANSWERED_IF_TOO_LARGE
        outputs: list[PeerMessage | Output] = [
            PeerMessage(ALL_PEERS, joined(peer, info))
        ]
        if agreed.profile is not None:
            outputs += self._describe(peer.name, agreed.profile)
        outputs += self._tagged(connection.start())
        for content in self._states.values():
            outputs += self._tagged(connection.send(content, now))
        self._states.clear()
        return outputs

    def _describe(
        self, name: str, profile: HardwareProfile
    ) -> Iterator[PeerMessage | Output]:
        """Report the hardware of a peer, and its version if that is another."""
        local, version = self._local, profile.wire_version
        if local.registry is not None:
            local.registry.on_handshake(name, profile)
        if text := local.mismatches.check_wire_version(name, version):
            yield Notice(text)
        other = f"wire version {version}, and this node has {WIRE_VERSION}"
        description = PeerProfile(
            name,
            reported_hardware(profile),
            protocol_version=version,
            remark="" if version == WIRE_VERSION else other,
        )
        yield PeerMessage(ALL_PEERS, PeerDescribed(description))

    def _claim_seat(self, peer: FleetPeer, now: float) -> FleetSeat:
        """Return the peer's seat.

        Raises NotAdmitted if its name is empty or taken, or both nodes are workers.
        """
        if not peer.name:
            raise NotAdmitted("a node without an id cannot be identified")
        if peer.is_worker and self._local.role is FleetRole.WORKER:
            raise NotAdmitted(BOTH_WORKERS)
        seat = seat_of(peer, self._info, now)
        self._local.seats.claim(seat, now)
        return seat

    # The end.

    def _fail(self, error: PeerError, now: float) -> Sequence[PeerMessage | Output]:
        """End the connection of a peer that violates the protocol."""
        if self._closed:
            return ()
        if self._connection is None:
            self._report_failure(self._handshake.disconnected(str(error)), now)
        self._end()
        return (protocol_error(error),)

    def _on_refusal(
        self, refusal: HandshakeRefused, now: float
    ) -> Sequence[PeerMessage | Output]:
        self._report_failure(refusal, now)
        self._end()
        sends = [Send(each) for each in refusal.send]
        if refusal.id_conflict and self._local.on_id_conflict():
            return [*sends, Close(str(refusal), CloseCode.MOVED)]
        return [*sends, Close(str(refusal))]

    def _report_failure(self, refusal: HandshakeRefused, now: float) -> None:
        """Report a failed handshake to the limiter or the dialer."""
        local, address = self._local, self._info.address
        if self._info.dialled:
            if refusal.final:
                local.on_refused(refusal.verdict or str(refusal))
        elif refusal.counts_as_failure:
            local.limiter.on_failure(address, now)
        else:
            local.limiter.on_abandoned(address, now)

    def _tagged(
        self, outputs: Sequence[ConnectionOutput]
    ) -> list[PeerMessage | Output]:
        """Tag a peer's messages with the peer; handle Close."""
        tagged: list[PeerMessage | Output] = []
        for each in outputs:
            if isinstance(each, Send | Bulk | Close | Notice):
                tagged.append(each)
                if isinstance(each, Close):
                    self._end()
            else:
                tagged.append(PeerMessage(ALL_PEERS, each))
        return tagged

    def _end(self) -> None:
        self._closed = True
        if self._seat is not None:
            self._local.seats.release(self._seat)


def _begin_handshake(
    local: FleetLocalNode, connection: FleetConnectionInfo
) -> FleetHandshake:
    """Return the client's end if this node dialled, else the server's."""
    settings = local.handshake_settings()
    if not connection.dialled:
        return ServerHandshake(settings, connection.address)
    return ClientHandshake(
        settings,
        connection.expected_id,
        require_strong=connection.must_be_shoal,
        server=connection.address or "the other end",
    )
