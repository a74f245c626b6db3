"""The exchange of ``hello`` and ``helloAck``, and the choice between two connections.

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
from typing import TypeAlias

from shoal.domain.addresses import is_loopback
from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Offer
from shoal.protocols.seam.admission import TokenProof
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Close, Notice
from shoal.protocols.seam.token_proof import (
    NOT_PROVEN,
    PresentedProof,
    ProofRole,
    prove_token,
)
from shoal.protocols.tealenet.admission import (
    PeerCredentials,
    PeerPermissions,
    admit,
)
from shoal.protocols.tealenet.codec.messages import Hello, HelloAck
from shoal.protocols.tealenet.codec.signatures import CHALLENGE_SIZE, proof_text
from shoal.protocols.tealenet.greeting import (
    Greeting,
    describe_newer_version,
    hello,
    hello_ack,
    read_greeting,
    refusal_ack,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import TealeConnection

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


# All in seconds.
HELLO_TIMEOUT = 10.0  # to wait for hello or helloAck
HELLO_INTERVAL = 2.0  # before hello is repeated
ACK_DELAY = 0.15  # before helloAck: a Mac that dialled cannot receive at first
ACK_REPEAT_DELAY = 6.0  # without a heartbeat, before helloAck is repeated
FIRST_HEARTBEAT_TIMEOUT = 30.0  # to wait for the first heartbeat

HandshakeOutput: TypeAlias = Hello | HelloAck | Notice | Close

SELF_CONNECTION = "the peer is this device itself"
DUPLICATE_CONNECTION = "there is another connection to this device, which is preferred"
KEY_NOT_PROVEN = "the peer has not proved the key that it announces"
NOT_ENCRYPTED = (
    "the connection is not encrypted, and the join token is not sent in the clear: "
    "to do that anyway, join with --plain"
)
PLAIN_WORKER = (
    "this coordinator accepts Shoal's workers on encrypted connections only: join "
    "without --plain, or start it with --plain"
)


class HandshakeStage(Enum):
    """The stage of a handshake."""

    WAITING = "waiting"  # for hello or helloAck
    ACK_DELAYED = "ack delayed"  # hello was received
    GREETED = "greeted"  # both peers have introduced themselves
    CLOSED = "closed"


class HelloHandshake:
    """One end of the handshake.

    From ``GREETED`` on, ``greeting`` is the peer's introduction and ``permissions`` has
    the result of its admission.  ``device_connections`` is None where the transport
    allows one connection to each peer.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        connection: TealeConnection,
        device_connections: DeviceConnections | None,
    ) -> None:
        self._local = local
        self._connection = connection
        self._device_connections = device_connections
        # Without a verifier a proof is useless.
        self._challenge = local.random_bytes(CHALLENGE_SIZE) if local.verify else b""
        self._timeout_at = 0.0
        self._send_at: float | None = None
        self._device_connection: DeviceConnection | None = None
        self.stage = HandshakeStage.WAITING
        self.greeting: Greeting | None = None
        self.permissions: PeerPermissions | None = None
        self.credentials: PeerCredentials | None = None
        self._presented: PresentedProof | None = None  # the peer's proof of a token

    def bind(self, connection: TealeConnection) -> None:
        """Set the encrypted connection, before the start."""
        self._connection = connection

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        send_at = self._timeout_at if self._send_at is None else self._send_at
        return min(self._timeout_at, send_at)

    def start(self, offers: Sequence[Offer], now: float) -> Sequence[HandshakeOutput]:
        """Start the handshake; the dialling end sends hello."""
        self._timeout_at = now + HELLO_TIMEOUT
        if not self._connection.dialled:
            return ()
        local = self._local
        if local.token and not (self._connection.binding or local.plain):
            return (self._close(NOT_ENCRYPTED),)
        self._send_at = now + HELLO_INTERVAL
        return (self._hello(offers, now),)

    def tick(self, offers: Sequence[Offer], now: float) -> Sequence[HandshakeOutput]:
        """Send what is due, repeat what may be lost, and close after a timeout."""
        if now >= self._timeout_at:
            return (self._time_out(),)
        if self._send_at is None or now < self._send_at:
            return ()
        if self.stage is HandshakeStage.WAITING:
            self._send_at = now + HELLO_INTERVAL
            return (self._hello(offers, now),)
        if self.stage is HandshakeStage.ACK_DELAYED:
            return self._complete(offers, now)
        self._send_at = None
        return (self._ack(offers, now),)

    def receive(
        self, message: Hello | HelloAck, offers: Sequence[Offer], now: float
    ) -> Sequence[HandshakeOutput]:
        """Process the peer's hello or helloAck; ignore an unexpected one."""
        expected = HelloAck if self._connection.dialled else Hello
        if (
            not isinstance(message, expected)
            or self.stage is HandshakeStage.ACK_DELAYED
        ):
            return ()
        if self.stage is not HandshakeStage.WAITING:
            # The helloAck was lost or is still on its way.
            return () if self._connection.dialled else (self._ack(offers, now),)
        greeting = read_greeting(message)
        if greeting.device_id == self._local.device_id:
            return (self._close(SELF_CONNECTION),)
        if (reason := self._rejection_reason(greeting)) is not None:
            return (self._reject(reason),)
        if not self._proves_token(greeting):
            # It may pretend to be the coordinator: the worker goes on looking for it.
            return (self._close(NOT_PROVEN),)
        if self._is_plain_worker(greeting):
            return self._refuse(greeting, PLAIN_WORKER, now)
        self.credentials = self._credentials(greeting)
        try:
            self.permissions = admit(self._local, self.credentials)
        except NotAdmitted as error:
            return self._refuse(greeting, str(error), now)
        self.greeting = greeting
        claimed = self._claim_connection(greeting, now)
        if not self._connection.dialled:
            replies = self._respond(greeting, offers, now, claimed=claimed)
        elif not claimed:
            return (self._close(DUPLICATE_CONNECTION),)
        else:
            self._set_greeted(now)
            replies = ()
        newer = describe_newer_version(greeting)
        return (Notice(newer), *replies) if newer else replies

    @property
    def proven_key(self) -> bytes:
        """The key that a dialled peer has proved; others prove theirs later."""
        greeting = self.greeting
        proven = self._connection.dialled and bool(self._challenge)
        return greeting.key if greeting is not None and proven else b""

    def verifies_proof(self, proof: bytes) -> bool:
        """Return whether this is the peer's signature of the challenge."""
        local, greeting = self._local, self.greeting
        if local.verify is None or local.identity is None or greeting is None:
            return False
        own_key, binding = local.identity.public_key, self._connection.binding
        signed = proof_text(self._challenge, own_key, greeting.key, binding)
        return local.verify(greeting.key, proof, signed)

    def note_heartbeat(self, now: float) -> None:
        """Record a sign of life."""
        if self._device_connection is not None:
            self._device_connection.last_heard = now

    def close(self) -> None:
        """End the handshake, and release the connection to the device."""
        self.stage = HandshakeStage.CLOSED
        if self._device_connections is not None and self._device_connection is not None:
            self._device_connections.release(self._device_connection)

    # Private parts, in the order in which they are called.

    def _hello(self, offers: Sequence[Offer], now: float) -> Hello:
        binding = self._connection.binding
        return hello(self._local, offers, self._challenge, binding, now)

    def _time_out(self) -> Close:
        if self.stage is HandshakeStage.GREETED:
            return self._close(
                f"no heartbeat within {FIRST_HEARTBEAT_TIMEOUT:g} s of helloAck"
            )
        expected = "helloAck" if self._connection.dialled else "hello"
        return self._close(f"no {expected} within {HELLO_TIMEOUT:g} s")

    def _complete(
        self, offers: Sequence[Offer], now: float
    ) -> Sequence[HandshakeOutput]:
        self._set_greeted(now)
        self._send_at = now + ACK_REPEAT_DELAY
        return (self._ack(offers, now),)

    def _set_greeted(self, now: float) -> None:
        self.stage = HandshakeStage.GREETED
        self._timeout_at = now + FIRST_HEARTBEAT_TIMEOUT
        self._send_at = None

    def _ack(self, offers: Sequence[Offer], now: float) -> HelloAck:
        assert self.greeting is not None, "it answers a greeting"
        assert self.permissions is not None, "only admitted peers get an answer"
        submits = self.permissions.submits_jobs and not self.greeting.is_worker
        visible = offers if submits else ()
        binding, token_proof = self._connection.binding, b""
        if self._presented is not None and (digest := self._presented.digest):
            token_proof = prove_token(digest, ProofRole.COORDINATOR, binding)
        return hello_ack(
            self._local,
            visible,
            self._challenge,
            self.greeting,
            now,
            binding,
            token_proof,
        )

    def _rejection_reason(self, greeting: Greeting) -> str | None:
        """Return why the peer refuses this end or has no valid proof, or None."""
        if greeting.introduction is not None and greeting.introduction.refusal:
            return ascii(greeting.introduction.refusal)[1:-1]
        if not self._connection.dialled or not greeting.key or not self._challenge:
            return None
        self.greeting = greeting
        return None if self.verifies_proof(greeting.proof) else KEY_NOT_PROVEN

    def _proves_token(self, greeting: Greeting) -> bool:
        """Return whether a dialled peer proves the token that this end has proved."""
        token, binding = self._local.token, self._connection.binding
        if not (self._connection.dialled and token and binding):
            return True
        proof = PresentedProof(greeting.token_proof, ProofRole.COORDINATOR, binding)
        return proof.matches(digest_of(token))

    def _is_plain_worker(self, greeting: Greeting) -> bool:
        """Return whether the peer is a worker of Shoal's that must encrypt.

        One on this machine need not.
        """
        connection = self._connection
        return (
            greeting.is_worker
            and connection.protection is Protection.PLAIN
            and not self._local.plain
            and bool(connection.address)
            and not is_loopback(connection.address)
        )

    def _token(self, greeting: Greeting) -> str | TokenProof:
        """Return the token that a peer presents: on a bound channel, its proof."""
        binding, introduction = self._connection.binding, greeting.introduction
        if introduction is None:
            return ""
        if not binding:
            return introduction.token
        if not greeting.token_proof:
            return ""
        self._presented = PresentedProof(
            greeting.token_proof, ProofRole.WORKER, binding
        )
        return TokenProof(b"", self._presented.matches)

    def _credentials(self, greeting: Greeting) -> PeerCredentials:
        connection, introduction = self._connection, greeting.introduction
        # Of a dialled peer, ``receive`` has verified it.
        proves_token = connection.dialled and bool(connection.binding)
        models = frozenset(greeting.models)
        if introduction is not None and introduction.offers is not None:
            models |= {name for offer in introduction.offers for name in offer.models}
        return PeerCredentials(
            name=peer_name(connection, greeting),
            models=models,
            token=self._token(greeting),
            passcode=greeting.passcode,
            proves_token=proves_token,
            address=connection.address,
            configured=connection.configured,
            is_worker=greeting.is_worker,
        )

    def _refuse(
        self, greeting: Greeting, why: str, now: float
    ) -> Sequence[HandshakeOutput]:
        reason = f"{greeting.label} is not admitted: {why}"
        close = self._reject(reason)
        if self._connection.dialled:
            return (close,)
        notice = Notice(reason)  # for the operator
        if greeting.introduction is None:
            return (notice, close)
        return (notice, refusal_ack(self._local, why, now), close)

    def _claim_connection(self, greeting: Greeting, now: float) -> bool:
        if self._device_connections is None:
            return True
        outbound = self._connection.dialled
        self._device_connection = self._device_connections.claim(
            greeting.device_id, outbound=outbound, now=now
        )
        return self._device_connection is not None

    def _respond(
        self, greeting: Greeting, offers: Sequence[Offer], now: float, *, claimed: bool
    ) -> Sequence[HandshakeOutput]:
        if not claimed:
            return (self._ack(offers, now), self._close(DUPLICATE_CONNECTION))
        if greeting.introduction is not None:
            return self._complete(offers, now)
        self.stage = HandshakeStage.ACK_DELAYED
        self._send_at = now + ACK_DELAY
        return ()

    def _reject(self, reason: str) -> Close:
        if self._connection.dialled:
            self._local.on_rejected(reason)
        return self._close(reason)

    def _close(self, reason: str) -> Close:
        self.close()
        return Close(reason)


def peer_name(connection: TealeConnection, greeting: Greeting) -> str:
    """Return a peer's name: a Shoal worker's own, a node's id, or the device's id."""
    if greeting.is_worker or not connection.name:
        return greeting.name
    return connection.name
