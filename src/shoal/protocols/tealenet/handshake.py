"""The start of a session: ``hello``, ``helloAck`` and the first message after them.

The dialling peer sends ``hello`` and the other one answers with ``helloAck``; then each
sends a heartbeat.  Source: what real peers do.  A Mac that dialled ignores messages for
a moment after its hello, and both ends do after the helloAck.  This end therefore
delays and repeats its helloAck, and sends nothing else before the first heartbeat; see
``docs/protocols/tealenet.md``.

If two devices dial each other, both ends keep the same one of the two connections:
``DeviceConnections`` decides which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from shoal.domain.errors import NotAdmitted
from shoal.domain.vocabulary import Event
from shoal.domain.worker import Offer
from shoal.protocols.seam.peer_session import PeerDescribed
from shoal.protocols.seam.session import Close, Notice, Output, PeerProfile, Send
from shoal.protocols.tealenet.admission import PeerCredentials, admit, passcodes_match
from shoal.protocols.tealenet.codec import hardware, messages, scalars
from shoal.protocols.tealenet.codec.envelope import VERSION, PayloadForm
from shoal.protocols.tealenet.heartbeat import HeartbeatSender, model_names
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import LinkProfile, TealeConnection, TealePeer
from shoal.protocols.tealenet.peer_state import TealePeerState

EVICTION_MIN = 64  # connections before silent ones are evicted


@dataclass(slots=True)
class DeviceConnection:
    """A connection to a device, with the time of its last sign of life."""

    device_id: str
    outbound: bool
    last_heard: float


@dataclass(slots=True)
class DeviceConnections:
    """The one connection to each device.

    ``silence_max``: seconds after which a silent connection counts as lost, because a
    session does not learn when its connection is cut.
    """

    own_id: str
    silence_max: float
    _connections: dict[str, DeviceConnection] = field(default_factory=dict)
    _evict_at: int = EVICTION_MIN

    def claim(
        self, device_id: str, *, outbound: bool, now: float
    ) -> DeviceConnection | None:
        """Make a new connection to a device the current one; None: the older one stays.

        Of two connections from different ends, the one that the device with the smaller
        id made stays; both ends agree.  Of two from the same end the newer stays,
        because a device dials again only after losing the older one.
        """
        self._evict_silent(now)
        older = self._connections.get(device_id)
        if (
            older is not None
            and self.is_connected(device_id, now)
            and older.outbound is not outbound
            and (self.own_id < device_id) is not outbound
        ):
            return None
        claimed = DeviceConnection(device_id, outbound, now)
        self._connections[device_id] = claimed
        return claimed

    def is_connected(self, device_id: str, now: float) -> bool:
        """Return whether a device has a connection that is not silent."""
        current = self._connections.get(device_id)
        return current is not None and now - current.last_heard <= self.silence_max

    def release(self, connection: DeviceConnection) -> None:
        """Remove a connection, unless a newer one has replaced it."""
        if self._connections.get(connection.device_id) is connection:
            del self._connections[connection.device_id]

    def _evict_silent(self, now: float) -> None:
        # Rarely, because it visits all connections and removes few of them.
        if len(self._connections) < self._evict_at:
            return
        for each in [*self._connections.values()]:
            if now - each.last_heard > self.silence_max:
                del self._connections[each.device_id]
        self._evict_at = 2 * max(len(self._connections), EVICTION_MIN // 2)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The contents of a ``hello`` or ``helloAck``; ``device_id`` is in upper case."""

    device_id: str
    models: tuple[str, ...]
    passcode: str | None
    profile: PeerProfile

    @property
    def label(self) -> str:
        """The name for people, with the device's id unless it is the same."""
        if self.profile.name in ("", self.device_id):
            return ascii(self.device_id)
        return f"{self.profile.name!a} ({self.device_id})"

    @property
    def newer_version(self) -> Sequence[Notice]:
        """A warning if the peer's protocol is newer than this end's."""
        remark = self.profile.remark
        return (Notice(f"{self.label} {remark}"),) if remark else ()


def read_greeting(message: messages.Hello | messages.HelloAck) -> Greeting:
    """Read a peer's introduction."""
    device, version = message.device_info, message.protocol_version
    newer = f"speaks version {version} of the protocol; this end speaks {VERSION}"
    profile = PeerProfile(
        hardware.shown_name(device.name),
        hardware.read_hardware(device.hardware),
        owner=scalars.well_formed(message.owner_user_id or ""),
        protocol_version=version,
        registered_at=scalars.from_date(device.registered_at),
        remark=newer if version > VERSION else "",
    )
    device_id = scalars.normalized_id(device.id)
    passcode = message.cluster_passcode_hash
    return Greeting(device_id, message.loaded_models, passcode, profile)


def hello(local: TealeLocalNode, offers: Sequence[Offer], now: float) -> messages.Hello:
    """Return the hello for a dialled peer."""
    models = model_names(offers)
    device = _device(local, models, now)
    return messages.Hello(device, VERSION, models, local.passcode, local.owner)


def hello_ack(
    local: TealeLocalNode, offers: Sequence[Offer], peer: Greeting, now: float
) -> messages.HelloAck:
    """Return the helloAck for a peer that dialled.

    It has the passcode's hash, which is all that admission needs, only if the peer
    presented the same hash.
    """
    models = model_names(offers)
    shown = passcodes_match(local.passcode, peer.passcode)
    device = _device(local, models, now)
    return messages.HelloAck(
        device, VERSION, models, local.passcode if shown else None, local.owner
    )


def _device(
    local: TealeLocalNode, models: Sequence[str], now: float
) -> hardware.DeviceInfo:
    at = scalars.to_date(now + local.epoch)
    registered_at = local.registered_at
    return hardware.device_info(
        local.device_id,
        local.name,
        local.hardware,
        registered_at=at if registered_at is None else scalars.to_date(registered_at),
        seen_at=at,
        models=models,
    )


# All in seconds.
HELLO_TIMEOUT = 10.0  # to wait for hello or helloAck
HELLO_INTERVAL = 2.0  # before hello is repeated
ACK_DELAY = 0.15  # before helloAck: a Mac that dialled cannot receive at first
ACK_REPEAT_DELAY = 6.0  # without a heartbeat, before helloAck is repeated
FIRST_HEARTBEAT_TIMEOUT = 30.0  # to wait for the first heartbeat

SELF_CONNECTION = "the peer is this device itself"
DUPLICATE_CONNECTION = "there is another connection to this device, which is preferred"
RELAY_NODE_REFUSED = (
    "relay nodes do not authenticate: start the coordinator with --tealenet-open to "
    "admit them"
)


class HandshakeStage(Enum):
    """The stage of a handshake."""

    WAITING = "waiting"  # for hello or helloAck
    ACK_DELAYED = "ack delayed"  # hello was received
    GREETED = "greeted"  # both peers have introduced themselves
    CLOSED = "closed"


class PeerHandshake:
    """The start of one session, up to the message with which the peer joins.

    ``peer`` is set once the peer has introduced itself, or at once if it need not.
    ``admitted``: the peer has introduced itself and was admitted.
    ``device_connections`` is None where the transport allows one connection to each
    peer.
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
        self._device_connections = device_connections
        self._form = form
        self._heartbeats = heartbeats
        self._stage = HandshakeStage.WAITING
        self._timeout_at = 0.0
        self._send_at: float | None = None
        self._device_connection: DeviceConnection | None = None
        self._greeting: Greeting | None = None
        self._submits_jobs = False
        self.peer: TealePeer | None = None
        self.admitted = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        if not self._profile.requires_hello:
            return None
        send_at = self._timeout_at if self._send_at is None else self._send_at
        return min(self._timeout_at, send_at)

    def start(self, now: float) -> Sequence[Output] | TealePeerState:
        """Send hello if this end dialled; or return the state of a peer without one."""
        if not self._profile.requires_hello:
            self.peer = peer = _unintroduced_peer(self._local, self._connection)
            if not peer.refusal:
                self._heartbeats.due = now
            return self._state(peer, now)
        self._timeout_at = now + HELLO_TIMEOUT
        if not self._connection.dialled:
            return ()
        self._send_at = now + HELLO_INTERVAL
        return (Send(self._form.encode(self._hello(now))),)

    def tick(self, now: float) -> Sequence[Output]:
        """Send what is due, repeat what may be lost, and close after a timeout."""
        if not self._profile.requires_hello:
            return ()
        if now >= self._timeout_at:
            return (self._close(self._timeout_reason),)
        if self._send_at is None or now < self._send_at:
            return ()
        match self._stage:
            case HandshakeStage.WAITING:
                self._send_at = now + HELLO_INTERVAL
                return [
                    Send(each) for each in self._form.encode_again(self._hello(now))
                ]
            case HandshakeStage.ACK_DELAYED:
                return self._greet(now)
            case HandshakeStage.GREETED | HandshakeStage.CLOSED:
                self._send_at = None
                return (self._ack(now),)

    def receive_greeting(
        self, message: messages.Hello | messages.HelloAck, now: float
    ) -> Sequence[Output]:
        """Process the peer's hello or helloAck; ignore an unexpected one."""
        if not self._profile.requires_hello:
            return self._answer_unneeded(message, now)
        dialled = self._connection.dialled
        if not isinstance(message, messages.HelloAck if dialled else messages.Hello):
            return ()
        if self._stage is HandshakeStage.ACK_DELAYED:
            return ()
        if self._stage is not HandshakeStage.WAITING:
            # The helloAck was lost or is still on its way.
            return () if dialled else (self._ack(now),)
        greeting = read_greeting(message)
        if greeting.device_id == self._local.device_id:
            return (self._close(SELF_CONNECTION),)
        try:
            self._submits_jobs = admit(self._local, self._credentials(greeting))
        except NotAdmitted as error:
            return self._refuse(greeting, str(error))
        self._greeting = greeting
        self.admitted = True
        newer = greeting.newer_version
        if not self._claims_device(greeting, now):
            duplicate = self._close(DUPLICATE_CONNECTION)
            return (duplicate,) if dialled else (*newer, self._ack(now), duplicate)
        if dialled:
            return (*newer, *self._greet(now))
        self._stage = HandshakeStage.ACK_DELAYED
        self._send_at = now + ACK_DELAY
        return newer

    def join(
        self, now: float
    ) -> tuple[TealePeerState, Sequence[PeerDescribed | Event | Output]] | None:
        """Return the peer's state and first events; None before its greeting.

        A peer that does not wait for the helloAck is no Mac, and gets it at once.
        """
        greeted = self._greet(now) if self._stage is HandshakeStage.ACK_DELAYED else ()
        greeting, peer = self._greeting, self.peer
        if greeting is None or peer is None:
            return None
        state = self._state(peer, now)
        events = state.update_models(greeting.models)
        return state, [*greeted, *state.describe(greeting.profile), *events]

    def note_heartbeat(self, now: float) -> None:
        """Record a sign of life."""
        if self._device_connection is not None:
            self._device_connection.last_heard = now

    def close(self) -> None:
        """End the handshake, and release the connection to the device."""
        self._stage = HandshakeStage.CLOSED
        if self._device_connections is not None and self._device_connection is not None:
            self._device_connections.release(self._device_connection)

    # Private parts, in the order in which they are called.

    def _state(self, peer: TealePeer, now: float) -> TealePeerState:
        return TealePeerState(peer, self._profile, now, self._local.passcode)

    def _hello(self, now: float) -> messages.Hello:
        return hello(self._local, self._heartbeats.offers, now)

    @property
    def _timeout_reason(self) -> str:
        if self._stage is HandshakeStage.GREETED:
            return f"no heartbeat within {FIRST_HEARTBEAT_TIMEOUT:g} s of helloAck"
        expected = "helloAck" if self._connection.dialled else "hello"
        return f"no {expected} within {HELLO_TIMEOUT:g} s"

    def _answer_unneeded(
        self, message: messages.Hello | messages.HelloAck, now: float
    ) -> Sequence[Output]:
        """Answer the hello of a peer that need not send one."""
        if isinstance(message, messages.HelloAck) or self.peer is None:
            return ()
        greeting = read_greeting(message)
        visible = self._heartbeats.offers if self.peer.submits_jobs else ()
        answer = self._form.encode(hello_ack(self._local, visible, greeting, now))
        return (*greeting.newer_version, Send(answer))

    def _credentials(self, greeting: Greeting) -> PeerCredentials:
        connection = self._connection
        return PeerCredentials(
            name=connection.name or greeting.device_id,
            models=frozenset(greeting.models),
            passcode=greeting.passcode,
            address=connection.address,
            configured=connection.configured,
        )

    def _refuse(self, greeting: Greeting, why: str) -> Sequence[Output]:
        """Close the session without a message, as real peers do."""
        reason = f"{greeting.label} is not admitted: {why}"
        if self._connection.dialled:
            self._local.on_rejected(reason)
            return (self._close(reason),)
        return (Notice(reason), self._close(reason))  # the first is for the operator

    def _claims_device(self, greeting: Greeting, now: float) -> bool:
        if self._device_connections is None:
            return True
        self._device_connection = self._device_connections.claim(
            greeting.device_id, outbound=self._connection.dialled, now=now
        )
        return self._device_connection is not None

    def _greet(self, now: float) -> Sequence[Output]:
        """Complete the greeting of both ends, and send the first heartbeat."""
        greeting, connection = self._greeting, self._connection
        assert greeting is not None, "the peer has introduced itself"
        self._stage = HandshakeStage.GREETED
        self._timeout_at = now + FIRST_HEARTBEAT_TIMEOUT
        self._send_at = None if connection.dialled else now + ACK_REPEAT_DELAY
        ack = () if connection.dialled else (self._ack(now),)
        self.peer = TealePeer(
            name=connection.name or greeting.device_id,
            software=connection.software,
            submits_jobs=self._submits_jobs,
            knows_passcode=passcodes_match(self._local.passcode, greeting.passcode),
        )
        beats = self._heartbeats.heartbeat(self.peer, now)
        return [*ack, *(Send(each) for each in beats)]

    def _ack(self, now: float) -> Send:
        assert self._greeting is not None, "it answers a greeting"
        visible = self._heartbeats.offers if self._submits_jobs else ()
        message = hello_ack(self._local, visible, self._greeting, now)
        return Send(self._form.encode(message))

    def _close(self, reason: str) -> Close:
        self.close()
        return Close(reason)


def _unintroduced_peer(local: TealeLocalNode, connection: TealeConnection) -> TealePeer:
    """Return a peer of a relay that need not introduce itself."""
    credentials = PeerCredentials(
        name=connection.name,
        models=frozenset(connection.description.models),
        address=connection.address,
        configured=connection.configured,
        sends_hello=False,
    )
    try:
        submits_jobs = admit(local, credentials)
    except NotAdmitted:
        refusal = RELAY_NODE_REFUSED
        return TealePeer(connection.name, connection.software, refusal=refusal)
    return TealePeer(connection.name, connection.software, submits_jobs)
