"""The start of a session: handshake, key proof and first heartbeat."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.vocabulary import Event
from shoal.protocols.seam.session import Close, Notice, Output, Send
from shoal.protocols.tealenet.admission import (
    PeerCredentials,
    PeerPermissions,
    admit,
    passcodes_match,
)
from shoal.protocols.tealenet.codec.envelope import encode
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
    greeting_name,
)
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole
from shoal.protocols.tealenet.peer import PeerSoftware, TealeConnection, TealePeer
from shoal.protocols.tealenet.peer_state import PeerOffers, TealePeerState


class SessionSetup:
    """The beginning of a conversation.

    ``peer`` is there once it has said who it is, or if it need not.  A first heartbeat
    tells that both can hear each other: then it is met.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        connection: TealeConnection,
        profile: LinkProfile,
        device_connections: DeviceConnections | None,
        heartbeats: HeartbeatSender,
    ) -> None:
        self._local = local
        self._connection = connection
        self._profile = profile
        self._heartbeats = heartbeats
        greets = profile.requires_hello or connection.software is PeerSoftware.SHOAL
        self._handshake = (
            HelloHandshake(local, connection, device_connections) if greets else None
        )
        self.peer: TealePeer | None = None

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        return None if self._handshake is None else self._handshake.deadline

    @property
    def admitted(self) -> bool:
        """Whether the peer has said who it is, and is let in."""
        handshake = self._handshake
        return handshake is not None and handshake.permissions is not None

    def start(self, now: float) -> Sequence[Output] | TealePeerState:
        """Say hello if it is us who dialled; return a peer that says none as met."""
        if self._handshake is not None:
            return self._outputs(
                self._handshake.start(self._heartbeats.offers, now), now
            )
        self.peer, leave = anonymous_peer(self._local, self._connection)
        stock = PeerOffers(self._local, None, leave)
        if not self.peer.refusal:
            self._heartbeats.due = now
        return TealePeerState(self.peer, stock, self._profile, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Act on time passing."""
        if self._handshake is None:
            return ()
        return self._outputs(self._handshake.tick(self._heartbeats.offers, now), now)

    def receive_greeting(
        self, message: Hello | HelloAck, now: float
    ) -> Sequence[Output]:
        """Take a greeting of the peer's."""
        if self._handshake is not None:
            replies = self._handshake.receive(message, self._heartbeats.offers, now)
            return self._outputs(replies, now)
        if isinstance(message, HelloAck) or self.peer is None:
            return ()
        # It need not have said hello, and is told in return who we are.
        shown = self._heartbeats.offers if self.peer.submits_jobs else ()
        answer = hello_ack(self._local, shown, b"", read_greeting(message), now)
        return (Send(encode(answer, self._local.flat)),)

    def receive_first_heartbeat(
        self, heartbeat: Heartbeat | HeartbeatAck, now: float
    ) -> tuple[TealePeerState, Sequence[Event]] | None:
        """Take the first heartbeat; None, if the peer has not greeted yet.

        Returns how we stand with it, and what it said when it greeted.

        Raises PeerError if it has not proved the key that it names.
        """
        handshake, peer = self._handshake, self.peer
        if handshake is None or handshake.greeting is None or peer is None:
            return None
        greeting = handshake.greeting
        if greeting.key and self._local.verify is not None and not peer.public_key:
            pulse = read_heartbeat(heartbeat.shoal)
            if pulse is None or not handshake.verifies_proof(
                decode_base64(pulse.proof)
            ):
                raise PeerError(KEY_NOT_PROVEN)
            peer = self.peer = replace(peer, public_key=greeting.key)
        assert handshake.permissions is not None, "it was let in"
        stock = PeerOffers(self._local, handshake.credentials, handshake.permissions)
        standing = TealePeerState(peer, stock, self._profile, now)
        return standing, standing.apply_introduction(
            greeting.introduction, greeting.models
        )

    def note_heartbeat(self, now: float) -> None:
        """Note that the peer is still there."""
        if self._handshake is not None:
            self._handshake.note_heartbeat(now)

    def close(self) -> None:
        """Make room for another connection to the same device."""
        if self._handshake is not None:
            self._handshake.close()

    def _outputs(
        self, replies: Sequence[HandshakeOutput], now: float
    ) -> Sequence[Output]:
        """Return what the handshake wants said, and then a first heartbeat."""
        handshake = self._handshake
        assert handshake is not None, "it has just replied"
        outputs: list[Output] = [
            each
            if isinstance(each, Close | Notice)
            else Send(encode(each, self._local.flat))
            for each in replies
        ]
        if handshake.stage is not HandshakeStage.GREETED or self.peer is not None:
            return outputs
        greeting, leave = handshake.greeting, handshake.permissions
        assert greeting is not None, "it has greeted"
        assert leave is not None, "it was let in"
        self.peer = introduced_peer(
            self._local, self._connection, greeting, leave, handshake.proven_key
        )
        if self._connection.dialled:
            self._heartbeats.key_proof = prove_key(self._local, greeting)
        return [*outputs, Send(self._heartbeats.heartbeat(self.peer, now))]


def introduced_peer(
    local: TealeLocalNode,
    connection: TealeConnection,
    greeting: Greeting,
    permissions: PeerPermissions,
    key: bytes,
) -> TealePeer:
    """Return a peer that has said who it is; ``key`` is what it has proved, if any.

    A worker is known by the name that it chose, a peer of a relay by its node's, and
    others by their device's.
    """
    said = greeting.introduction
    works = said is not None and said.role == TealeRole.WORKER.value
    name = greeting_name(greeting) if works or not connection.name else connection.name
    return TealePeer(
        name=name,
        software=connection.software if said is None else PeerSoftware.SHOAL,
        features=frozenset[ShoalFeature]() if said is None else said.shoal_features,
        submits_jobs=permissions.submits_jobs and not works,
        grant=permissions.grant,
        public_key=key,
        is_coordinator=said is not None and not works,
        knows_passcode=passcodes_match(local.passcode, greeting.passcode),
    )


def anonymous_peer(
    local: TealeLocalNode, connection: TealeConnection
) -> tuple[TealePeer, PeerPermissions]:
    """Return a peer of a relay that need not say who it is, let in or not."""
    presented = PeerCredentials(
        name=connection.name,
        models=frozenset(connection.description.models),
        address=connection.address,
        configured=connection.configured,
        sends_hello=False,
    )
    try:
        leave = admit(local, presented)
    except NotAdmitted as error:
        return TealePeer(
            connection.name, connection.software, refusal=str(error)
        ), PeerPermissions(submits_jobs=False)
    peer = TealePeer(
        connection.name,
        connection.software,
        submits_jobs=leave.submits_jobs,
        grant=leave.grant,
    )
    return peer, leave
