"""The start of a session: handshake, key proof and first heartbeat."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.vocabulary import Event
from shoal.protocols.seam.peer_session import PeerDescribed
from shoal.protocols.seam.session import Close, Notice, Output, Send
from shoal.protocols.tealenet.admission import (
    PeerCredentials,
    PeerPermissions,
    admit,
    passcodes_match,
)
from shoal.protocols.tealenet.codec.extension import ShoalFeature, read_heartbeat
from shoal.protocols.tealenet.codec.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloAck,
)
from shoal.protocols.tealenet.codec.signatures import decode_base64
from shoal.protocols.tealenet.greeting import (
    Greeting,
    describe_newer_version,
    hello_ack,
    prove_key,
    read_greeting,
)
from shoal.protocols.tealenet.handshake import (
    KEY_NOT_PROVEN,
    DeviceConnections,
    HandshakeOutput,
    HandshakeStage,
    HelloHandshake,
    peer_name,
)
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import PeerSoftware, TealeConnection, TealePeer
from shoal.protocols.tealenet.peer_state import PeerOffers, TealePeerState

RELAY_NODE_REFUSED = (
    "relay nodes do not authenticate: start the coordinator with --tealenet-open to "
    "admit them"
)


class SessionSetup:
    """The setup of a session, up to the first heartbeat, with which the peer joins.

    ``peer`` is set once the peer has introduced itself, or at once if it need not.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        connection: TealeConnection,
        profile: LinkProfile,
        device_connections: DeviceConnections | None,
        form: PayloadForm,
        heartbeats: HeartbeatSender,
    ) -> None:
        self._local = local
        self._connection = connection
        self._profile = profile
        self._form = form
        self._heartbeats = heartbeats
        self._greeted = False  # whether hello was sent
        self._handshake: HelloHandshake | None = None
        if profile.requires_hello or connection.software is PeerSoftware.SHOAL:
            self._handshake = HelloHandshake(local, connection, device_connections)
        self.peer: TealePeer | None = None

    def bind(self, connection: TealeConnection) -> None:
        """Set the encrypted connection, before the start."""
        self._connection = connection
        if self._handshake is not None:
            self._handshake.bind(connection)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        return None if self._handshake is None else self._handshake.deadline

    @property
    def admitted(self) -> bool:
        """Whether the peer has introduced itself and was admitted."""
        handshake = self._handshake
        return handshake is not None and handshake.permissions is not None

    def start(self, now: float) -> Sequence[Output] | TealePeerState:
        """Start the handshake, or return the state of a peer that needs none."""
        if self._handshake is not None:
            return self._outputs(
                self._handshake.start(self._heartbeats.offers, now), now
            )
        self.peer, permissions = anonymous_peer(self._local, self._connection)
        offers = PeerOffers(self._local, None, permissions)
        if not self.peer.refusal:
            self._heartbeats.due = now
        return self._state(self.peer, offers, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Handle deadlines."""
        if self._handshake is None:
            return ()
        return self._outputs(self._handshake.tick(self._heartbeats.offers, now), now)

    def receive_greeting(
        self, message: Hello | HelloAck, now: float
    ) -> Sequence[Output]:
        """Process a hello or helloAck of the peer."""
        if self._handshake is not None:
            replies = self._handshake.receive(message, self._heartbeats.offers, now)
            return self._outputs(replies, now)
        if isinstance(message, HelloAck) or self.peer is None:
            return ()
        # This peer need not send a hello, but gets an answer to one.
        visible = self._heartbeats.offers if self.peer.submits_jobs else ()
        greeting = read_greeting(message)
        answer = Send(
            self._form.encode(hello_ack(self._local, visible, b"", greeting, now))
        )
        newer = describe_newer_version(greeting)
        return (Notice(newer), answer) if newer else (answer,)

    def receive_first_heartbeat(
        self, heartbeat: Heartbeat | HeartbeatAck, now: float
    ) -> tuple[TealePeerState, Sequence[PeerDescribed | Event]] | None:
        """Return the peer's state and first events; None before its greeting.

        Raises PeerError if the peer has not proved the key that it announces.
        """
        handshake, peer = self._handshake, self.peer
        if handshake is None or handshake.greeting is None or peer is None:
            return None
        greeting = handshake.greeting
        if greeting.key and self._local.verify is not None and not peer.public_key:
            extension = read_heartbeat(heartbeat.shoal)
            proof = "" if extension is None else extension.proof
            if not handshake.verifies_proof(decode_base64(proof)):
                raise PeerError(KEY_NOT_PROVEN)
            peer = self.peer = replace(peer, public_key=greeting.key)
        assert handshake.permissions is not None, "the peer was admitted"
        offers = PeerOffers(self._local, handshake.credentials, handshake.permissions)
        state = self._state(peer, offers, now)
        events = state.apply_introduction(greeting.introduction, greeting.models)
        return state, [*state.describe(greeting.profile, heartbeat), *events]

    def _state(self, peer: TealePeer, offers: PeerOffers, now: float) -> TealePeerState:
        return TealePeerState(peer, offers, self._profile, now, self._local.passcode)

    def note_heartbeat(self, now: float) -> None:
        """Record a sign of life."""
        if self._handshake is not None:
            self._handshake.note_heartbeat(now)

    def close(self) -> None:
        """End the setup, and release the connection to the device."""
        if self._handshake is not None:
            self._handshake.close()

    def _outputs(
        self, replies: Sequence[HandshakeOutput], now: float
    ) -> Sequence[Output]:
        """Encode the handshake's outputs; add the first heartbeat after a greeting."""
        handshake = self._handshake
        assert handshake is not None, "the replies are its own"
        outputs: list[Output] = []
        for each in replies:
            outputs += self._encode(each)
        if handshake.stage is not HandshakeStage.GREETED or self.peer is not None:
            return outputs
        greeting, permissions = handshake.greeting, handshake.permissions
        assert greeting is not None, "the stage is GREETED"
        assert permissions is not None, "the peer was admitted"
        self.peer = introduced_peer(
            self._local, self._connection, greeting, permissions, handshake.proven_key
        )
        if self._connection.dialled:
            self._heartbeats.key_proof = prove_key(
                self._local, greeting, self._connection.binding
            )
        beats = self._heartbeats.heartbeat(self.peer, now)
        return [*outputs, *(Send(each) for each in beats)]

    def _encode(self, reply: HandshakeOutput) -> Sequence[Output]:
        match reply:
            case Close() | Notice():
                return (reply,)
            case HelloAck():
                return (Send(self._form.encode(reply)),)
            case Hello() if self._greeted:
                return [Send(each) for each in self._form.encode_again(reply)]
            case Hello():
                self._greeted = True
                return (Send(self._form.encode(reply)),)


def introduced_peer(
    local: TealeLocalNode,
    connection: TealeConnection,
    greeting: Greeting,
    permissions: PeerPermissions,
    key: bytes,
) -> TealePeer:
    """Return a peer after its greeting; ``key`` is proven, or empty."""
    introduction = greeting.introduction
    software, features = connection.software, frozenset[ShoalFeature]()
    if introduction is not None:
        software, features = PeerSoftware.SHOAL, introduction.shoal_features
    return TealePeer(
        name=peer_name(connection, greeting),
        software=software,
        features=features,
        submits_jobs=permissions.submits_jobs and not greeting.is_worker,
        grant=permissions.grant,
        public_key=key,
        is_coordinator=introduction is not None and not greeting.is_worker,
        knows_passcode=passcodes_match(local.passcode, greeting.passcode),
        anonymous=permissions.anonymous,
    )


def anonymous_peer(
    local: TealeLocalNode, connection: TealeConnection
) -> tuple[TealePeer, PeerPermissions]:
    """Return a peer of a relay that need not introduce itself, and its permissions."""
    credentials = PeerCredentials(
        name=connection.name,
        models=frozenset(connection.description.models),
        address=connection.address,
        configured=connection.configured,
        sends_hello=False,
    )
    try:
        permissions = admit(local, credentials)
    except NotAdmitted:
        refusal = RELAY_NODE_REFUSED
        peer = TealePeer(connection.name, connection.software, refusal=refusal)
        return peer, PeerPermissions(submits_jobs=False)
    peer = TealePeer(
        connection.name,
        connection.software,
        submits_jobs=permissions.submits_jobs,
        grant=permissions.grant,
        anonymous=permissions.anonymous,
    )
    return peer, permissions
