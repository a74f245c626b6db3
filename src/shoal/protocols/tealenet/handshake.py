"""The exchange of ``hello`` and ``helloAck``, and the choice between two connections.

The peer that dialled sends ``hello`` and the other answers with ``helloAck``; then each
sends a heartbeat.  Source: what real peers do.  A Mac that dialled ignores messages for
a moment after its hello, and both ends do after the helloAck.  This side therefore
delays and repeats its helloAck, and sends nothing else before the first heartbeat; see
``docs/protocols/tealenet.md``.

If two devices dial each other, both ends keep the same one of the two connections:
``DeviceConnections`` decides which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Offer
from shoal.protocols.seam.session import Close, Notice
from shoal.protocols.tealenet.admission import PeerCredentials, PeerPermissions, admit
from shoal.protocols.tealenet.codec.messages import Hello, HelloAck
from shoal.protocols.tealenet.codec.scalars import well_formed
from shoal.protocols.tealenet.codec.signatures import CHALLENGE_SIZE, proof_text
from shoal.protocols.tealenet.greeting import (
    Greeting,
    hello,
    hello_ack,
    read_greeting,
    refusal_ack,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole
from shoal.protocols.tealenet.peer import TealeConnection

EVICTION_MIN = 64  # seats at which those that were left without a word are looked for


@dataclass(slots=True)
class DeviceConnection:
    """A connection to a device; ``heard`` is when it last said that it is there."""

    device_id: str
    outbound: bool
    last_heard: float


@dataclass(slots=True)
class DeviceConnections:
    """Who sits where, by device.

    ``silence_max`` is how long a device that says nothing keeps its seat, in seconds:
    a session is not told when its connection is cut.
    """

    own_id: str
    silence_max: float
    _connections: dict[str, DeviceConnection] = field(default_factory=dict)
    _evict_at: int = EVICTION_MIN

    def claim(
        self, device_id: str, *, outbound: bool, now: float
    ) -> DeviceConnection | None:
        """Give a new connection to a device its seat; None: the older one keeps it.

        Of two that were made from different sides, the one made by the device with the
        smaller id stays; both sides come to the same.  Of two made from one side the
        newer stays, for who dials again has lost the older one.
        """
        self._evict_silent(now)
        seated = (
            self._connections.get(device_id)
            if self.is_connected(device_id, now)
            else None
        )
        if seated is not None and seated.outbound is not outbound:
            ours_wins = self.own_id < device_id
            if ours_wins is not outbound:
                return None
        seat = DeviceConnection(device_id, outbound, now)
        self._connections[device_id] = seat
        return seat

    def is_connected(self, device_id: str, now: float) -> bool:
        """Say whether there is a connection to a device, and it has not gone silent."""
        seated = self._connections.get(device_id)
        return seated is not None and now - seated.last_heard <= self.silence_max

    def release(self, connection: DeviceConnection) -> None:
        """Free a seat, if nobody has taken it meanwhile."""
        if self._connections.get(connection.device_id) is connection:
            del self._connections[connection.device_id]

    def _evict_silent(self, now: float) -> None:
        # Only now and then: it looks at all of them, and nearly all are still there.
        if len(self._connections) < self._evict_at:
            return
        for seat in [*self._connections.values()]:
            if now - seat.last_heard > self.silence_max:
                del self._connections[seat.device_id]
        self._evict_at = 2 * max(len(self._connections), EVICTION_MIN // 2)


# All in seconds.
HELLO_TIMEOUT = 10.0  # for a hello to come, or a helloAck
HELLO_INTERVAL = 2.0  # until hello is said once more
ACK_DELAY = 0.15  # until helloAck is said to a peer that may be deaf before
ACK_REPEAT_DELAY = 6.0  # without a heartbeat, until helloAck is said once more
FIRST_HEARTBEAT_TIMEOUT = 30.0  # for the first heartbeat

HandshakeOutput: TypeAlias = Hello | HelloAck | Notice | Close

SELF_CONNECTION = "this is the same device: a connection to oneself"
DUPLICATE_CONNECTION = "there is another connection to this device, which is preferred"
KEY_NOT_PROVEN = "it has not proved the key that it names"


class HandshakeStage(Enum):
    """How far two peers have come."""

    WAITING = "apart"  # a hello or a helloAck is waited for
    ACK_DELAYED = "holding"  # our helloAck is held back
    GREETED = "greeted"  # both have said who they are
    CLOSED = "over"


class HelloHandshake:
    """One side's part in it.

    ``greeting`` is what the other said, and ``permissions`` what it may do, from
    ``GREETED`` on.  ``device_connections`` is None where a carrier sees to it that
    there is one connection to each peer.
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
        # Whoever cannot verify has no use for a proof.
        self._challenge = local.random_bytes(CHALLENGE_SIZE) if local.verify else b""
        self._timeout_at = 0.0
        self._send_at: float | None = None  # when to say something
        self._device_connection: DeviceConnection | None = None
        self.stage = HandshakeStage.WAITING
        self.greeting: Greeting | None = None
        self.permissions: PeerPermissions | None = None
        self.credentials: PeerCredentials | None = None

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        return (
            self._timeout_at
            if self._send_at is None
            else min(self._timeout_at, self._send_at)
        )

    def start(self, offers: Sequence[Offer], now: float) -> Sequence[HandshakeOutput]:
        """Begin, and say hello if it was us who dialled."""
        self._timeout_at = now + HELLO_TIMEOUT
        if not self._connection.dialled:
            return ()
        self._send_at = now + HELLO_INTERVAL
        return (self._hello(offers, now),)

    def tick(self, offers: Sequence[Offer], now: float) -> Sequence[HandshakeOutput]:
        """Repeat what may have been lost, and give up when it takes too long."""
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
        """Take the other's greeting; one that comes late or too often is ignored."""
        expected = HelloAck if self._connection.dialled else Hello
        if (
            not isinstance(message, expected)
            or self.stage is HandshakeStage.ACK_DELAYED
        ):
            return ()
        if self.stage is not HandshakeStage.WAITING:
            # Our answer was lost, or the other did not wait for it.
            return () if self._connection.dialled else (self._ack(offers, now),)
        greeting = read_greeting(message)
        if greeting.device_id == self._local.device_id:
            return (self._close(SELF_CONNECTION),)
        if (why := self._objection(greeting)) is not None:
            return (self._reject(why),)
        self.credentials = self._credentials(greeting)
        try:
            self.permissions = admit(self._local, self.credentials)
        except NotAdmitted as error:
            return self._refuse(greeting, str(error), now)
        self.greeting = greeting
        seated = self._claim_connection(greeting, now)
        if not self._connection.dialled:
            return self._respond(greeting, offers, now, claimed=seated)
        if not seated:
            return (self._close(DUPLICATE_CONNECTION),)
        self._set_greeted(now)
        return ()

    @property
    def proven_key(self) -> bytes:
        """The key that whom we dialled has proved; of others nothing is known yet."""
        greeting = self.greeting
        proved = self._connection.dialled and bool(self._challenge)
        return greeting.key if greeting is not None and proved else b""

    def verifies_proof(self, proof: bytes) -> bool:
        """Say whether this is the other's signature of our challenge."""
        own, greeting = self._local, self.greeting
        if own.verify is None or own.identity is None or greeting is None:
            return False
        signed = proof_text(self._challenge, own.identity.public_key, greeting.key)
        return own.verify(greeting.key, proof, signed)

    def note_heartbeat(self, now: float) -> None:
        """Note that the peer is still there."""
        if self._device_connection is not None:
            self._device_connection.last_heard = now

    def close(self) -> None:
        """Make room for another connection to the same device."""
        self.stage = HandshakeStage.CLOSED
        if self._device_connections is not None and self._device_connection is not None:
            self._device_connections.release(self._device_connection)

    # Private parts, in the order in which they are called.

    def _hello(self, offers: Sequence[Offer], now: float) -> Hello:
        return hello(self._local, offers, self._challenge, now)

    def _time_out(self) -> Close:
        if self.stage is HandshakeStage.GREETED:
            return self._close(
                f"no heartbeat within {FIRST_HEARTBEAT_TIMEOUT:g} s of helloAck"
            )
        waited_for = "helloAck" if self._connection.dialled else "hello"
        return self._close(f"no {waited_for} within {HELLO_TIMEOUT:g} s")

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
        assert self.greeting is not None, "there is somebody to answer"
        assert self.permissions is not None, "others are not answered"
        said = self.greeting.introduction
        works = said is not None and said.role == TealeRole.WORKER.value
        shown = offers if self.permissions.submits_jobs and not works else ()
        return hello_ack(self._local, shown, self._challenge, self.greeting, now)

    def _objection(self, greeting: Greeting) -> str | None:
        """Say why whom we dialled will not do, or None."""
        if greeting.introduction is not None and greeting.introduction.refusal:
            return ascii(greeting.introduction.refusal)[1:-1]
        if not self._connection.dialled or not greeting.key or not self._challenge:
            return None
        self.greeting = greeting
        return None if self.verifies_proof(greeting.proof) else KEY_NOT_PROVEN

    def _credentials(self, greeting: Greeting) -> PeerCredentials:
        caller, said = self._connection, greeting.introduction
        models = frozenset(greeting.models)
        if said is not None and said.offers is not None:
            models |= {name for offer in said.offers for name in offer.models}
        return PeerCredentials(
            name=peer_name(caller, greeting),
            models=models,
            token="" if said is None else said.token,
            passcode=greeting.passcode,
            address=caller.address,
            configured=caller.configured,
        )

    def _refuse(
        self, greeting: Greeting, why: str, now: float
    ) -> Sequence[HandshakeOutput]:
        reason = f"{greeting_name(greeting)!a} is not let in: {why}"
        close = self._reject(reason)
        if self._connection.dialled:
            return (close,)
        notice = Notice(reason)  # an operator may have to do something about it
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
    """Return what a peer is known by, whichever way it comes.

    A worker is known by the name that it chose, a peer of a relay by its node's, and
    others by their device's.
    """
    said = greeting.introduction
    chose = said is not None and said.role == TealeRole.WORKER.value
    return greeting_name(greeting) if chose or not connection.name else connection.name


def greeting_name(greeting: Greeting) -> str:
    """Return what a peer is known by: workers of ours by a name that they choose."""
    said = greeting.introduction
    if said is not None and said.role == TealeRole.WORKER.value and said.name:
        return well_formed(said.name)
    return greeting.device_id
