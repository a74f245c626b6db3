"""Encryption of one session through a relay, and its negotiation by the two ends.

The first byte of the first message selects the channel: 0x11 starts Noise, which
Shoal's nodes use among themselves; 0x01 starts the channel of TealeNet's own peers; and
JSON is plain JSON.  The first byte of later data gives its type, except for the packets
of TealeNet's channel, which begin with their counter.

A node that announced a Noise key gets Noise or nothing, whatever a relay announces for
it later.  Other nodes are offered TealeNet's channel if they have a key for it, and get
plain JSON if they do not answer: so far no real peer answers.

Data that cannot be decrypted is dropped, because a relay may let other nodes inject
data into a session.  Only a genuine message can end a session, if it shows that
messages before it were lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.noise import (
    TAG_SIZE,
    NoiseInitiator,
    NoiseResponder,
    RandomBytes,
    TransportKeys,
)
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Notice
from shoal.protocols.tealenet.encryption.teale_channel import (
    TealeInitiator,
    TealePackets,
    TealeResponder,
    time_payload,
)

TEALE_FIRST: Final = 0x01
TEALE_SECOND: Final = 0x02
NOISE_FIRST: Final = 0x11
NOISE_SECOND: Final = 0x12
NOISE_MESSAGE: Final = 0x13
HANDSHAKE_TYPES = frozenset(
    {TEALE_FIRST, TEALE_SECOND, NOISE_FIRST, NOISE_SECOND, NOISE_MESSAGE}
)
"""The first bytes of handshake messages; JSON begins with none of them."""

NOISE_HEADER: Final = Struct(">BQ")
"""The header of a sealed Noise message: NOISE_MESSAGE and the message's number."""


class PlainChannel:
    """No encryption."""

    protection = Protection.PLAIN

    def seal(self, message: bytes) -> bytes:
        return message

    def open(self, data: bytes) -> bytes | None:
        # A late answer to the offer of encryption is not a message.
        return None if data and data[0] in HANDSHAKE_TYPES else data


class TealeChannel:
    """TealeNet's own channel."""

    protection = Protection.TEALE

    def __init__(self, packets: TealePackets) -> None:
        self.seal, self.open = packets.seal, packets.open


class NoiseChannel:
    """Noise messages, numbered from 0: none may be lost or reordered."""

    protection = Protection.NOISE

    def __init__(self, keys: TransportKeys) -> None:
        self._keys = keys
        self._next = 0

    def seal(self, message: bytes) -> bytes:
        number, sealed = self._keys.sealer.seal(message)
        return NOISE_HEADER.pack(NOISE_MESSAGE, number) + sealed

    def open(self, data: bytes) -> bytes | None:
        if len(data) < NOISE_HEADER.size + TAG_SIZE or data[0] != NOISE_MESSAGE:
            return None
        _, number = NOISE_HEADER.unpack_from(data)
        if number < self._next:
            return None  # a replay
        message = self._keys.opener.open(number, data[NOISE_HEADER.size :])
        if message is not None and number > self._next:
            lost = f"message {number} came after {self._next - 1}"
            raise PeerError(f"messages were lost: {lost}")
        self._next += message is not None
        return message


Channel: TypeAlias = PlainChannel | TealeChannel | NoiseChannel


NOISE_TIMEOUT = 10.0  # seconds for a Shoal peer to answer the handshake
TEALE_TIMEOUT = 2.0  # seconds for another peer to answer, before plain JSON is used
PENDING_MAX = 1024  # messages that wait for the handshake
PENDING_SIZE_MAX = 16 << 20  # bytes of them

ENCRYPTION_MISSING = "no encryption from a peer that announced it"
WRONG_KEY = "the initiator's key is not the one that the peer announced"


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A decrypted message of the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class DataToSend:
    """Data for the peer, to be sent through the relay."""

    data: bytes


SecureOutput: TypeAlias = MessageReceived | DataToSend | Notice


@dataclass(frozen=True, slots=True)
class SessionParties:
    """The two ends of a session, and their keys.

    ``epoch`` is as in ``WorkerProfile``.  ``noise_key`` is the X25519 key that the peer
    announced, signed with the key that is its id; ``teale_key`` is an announced key
    without a signature.  ``is_bound`` verifies the peer's signature (second) of an
    X25519 key (first).  ``signature`` is this end's, which a first message contains:
    the responder need not know the initiator beforehand.
    """

    identity: Identity
    local_id: str
    peer_id: str
    session_id: str
    random_bytes: RandomBytes
    is_bound: Callable[[bytes, bytes], bool]
    signature: bytes
    epoch: float = 0.0
    noise_key: bytes | None = None
    teale_key: bytes | None = None

    def prologue(self, *, initiates: bool) -> bytes:
        """Return the prologue of a Noise handshake: the nodes' ids and the session's.

        With it a relay cannot connect the ends of two sessions.
        """
        ids = (
            (self.local_id, self.peer_id)
            if initiates
            else (self.peer_id, self.local_id)
        )
        parts = ("shoal tealenet 1", *(each.lower() for each in ids))
        return "\n".join((*parts, self.session_id.upper())).encode(errors="replace")

    def handshake_payload(self, now: float) -> bytes:
        """Return the payload of each message of TealeNet's handshake."""
        return time_payload(self.epoch + now)


class SecureSession:
    """One end of a session: translates between messages and relayed data.

    ``initiates``: this end opened the session.  ``protection`` is None during the
    negotiation, and messages to send are kept until it ends.  ``noise_key`` is the
    peer's, announced or proven by the handshake.
    """

    def __init__(self, parties: SessionParties, *, initiates: bool) -> None:
        self.protection: Protection | None = None
        self.deadline: float | None = None
        self.binding = b""  # that of a Noise channel, which proofs cover
        self.noise_key = parties.noise_key
        self._parties = parties
        self._initiates = initiates
        self._noise_initiator: NoiseInitiator | None = None
        self._teale_initiator: TealeInitiator | None = None
        self._channel: Channel | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._noticed = False  # whether a notice was given: one is enough

    def start(self, now: float) -> Sequence[SecureOutput]:
        """Start the negotiation, once the peer is ready.

        Raises PeerError if the peer announced an invalid Noise key.
        """
        parties = self._parties
        if not self._initiates:
            return ()
        if parties.noise_key is not None:
            prologue = parties.prologue(initiates=True)
            self._noise_initiator = NoiseInitiator(
                parties.identity, parties.noise_key, prologue, parties.random_bytes
            )
            self.deadline = now + NOISE_TIMEOUT
            first = self._noise_initiator.write_first(parties.signature)
            return (DataToSend(bytes([NOISE_FIRST]) + first),)
        if parties.teale_key is None:
            return self._establish(PlainChannel())
        try:
            self._teale_initiator = TealeInitiator(
                parties.identity, parties.teale_key, parties.random_bytes
            )
            offer = self._teale_initiator.write_first(parties.handshake_payload(now))
        except PeerError as error:
            plain = self._establish(PlainChannel())
            return (Notice(f"the peer's key for encryption: {error}"), *plain)
        self.deadline = now + TEALE_TIMEOUT
        return (DataToSend(bytes([TEALE_FIRST]) + offer),)

    def send(self, message: bytes) -> Sequence[SecureOutput]:
        """Seal a message, or keep it during the negotiation.

        Raises PeerError if too many are kept, or at the limit of a key.
        """
        if self._channel is not None:
            return (DataToSend(self._channel.seal(message)),)
        self._pending.append(message)
        self._pending_size += len(message)
        if len(self._pending) > PENDING_MAX or self._pending_size > PENDING_SIZE_MAX:
            what = "messages before the end of the handshake"
            raise LimitExceeded(what, self._pending_size, PENDING_SIZE_MAX)
        return ()

    def receive(self, data: bytes, now: float) -> Sequence[SecureOutput]:
        """Process data from the relay.

        Raises PeerError if messages were lost: the session has to end.
        """
        if self._channel is None:
            return self._negotiate(data, now)
        message = self._channel.open(data)
        if message is not None:
            return (MessageReceived(message),)
        if self._answered_too_late(data):
            raise PeerError("the peer answered the offer of encryption too late")
        return self._drop("data in the session is not the peer's")

    def tick(self, now: float) -> Sequence[SecureOutput]:
        """Handle the deadline.  Raises PeerError if a Shoal peer does not answer."""
        if self.deadline is None or now < self.deadline:
            return ()
        if self._noise_initiator is not None:
            raise PeerError(
                f"no answer to the handshake within {NOISE_TIMEOUT:g} s; the peer "
                "requires encryption"
            )
        return self._establish(PlainChannel())

    def _negotiate(self, data: bytes, now: float) -> Sequence[SecureOutput]:
        kind = data[0] if data else None
        try:
            if self._noise_initiator is not None:
                return self._finish_noise(self._noise_initiator, kind, data)
            if self._teale_initiator is not None and kind == TEALE_SECOND:
                packets = TealePackets(self._teale_initiator.read_second(data[1:]))
                return self._establish(TealeChannel(packets))
            if not self._initiates and kind == NOISE_FIRST:
                return self._answer_noise(data[1:])
            if self._parties.noise_key is not None:
                return self._drop(ENCRYPTION_MISSING)
            if not self._initiates and kind == TEALE_FIRST:
                return self._answer_teale(data[1:], now)
        except PeerError as error:
            return self._drop(str(error))
        if kind in HANDSHAKE_TYPES:
            return self._drop("unexpected handshake message")
        return (*self._establish(PlainChannel()), MessageReceived(data))

    def _finish_noise(
        self, noise: NoiseInitiator, kind: int | None, data: bytes
    ) -> Sequence[SecureOutput]:
        if kind != NOISE_SECOND:
            return self._drop(ENCRYPTION_MISSING)
        _, secrets = noise.read_second(data[1:])
        self.binding = secrets.hash
        return self._establish(NoiseChannel(secrets))

    def _answer_noise(self, message: bytes) -> Sequence[SecureOutput]:
        parties = self._parties
        responder = NoiseResponder(
            parties.identity, parties.prologue(initiates=False), message
        )
        if not parties.is_bound(responder.peer_key, responder.payload):
            raise PeerError(WRONG_KEY)
        self.noise_key = responder.peer_key
        second, secrets = responder.write_second(parties.random_bytes)
        answer = DataToSend(bytes([NOISE_SECOND]) + second)
        self.binding = secrets.hash
        return (answer, *self._establish(NoiseChannel(secrets)))

    def _answer_teale(self, message: bytes, now: float) -> Sequence[SecureOutput]:
        parties = self._parties
        responder = TealeResponder(parties.identity, message)
        if parties.teale_key not in (None, responder.peer_key):
            raise PeerError(WRONG_KEY)
        second, secrets = responder.write_second(
            parties.random_bytes, parties.handshake_payload(now)
        )
        answer = DataToSend(bytes([TEALE_SECOND]) + second)
        return (answer, *self._establish(TealeChannel(TealePackets(secrets))))

    def _establish(self, channel: Channel) -> Sequence[SecureOutput]:
        self._channel = channel
        self.protection = channel.protection
        self.deadline = None
        pending, self._pending = self._pending, []
        return [DataToSend(channel.seal(message)) for message in pending]

    def _answered_too_late(self, data: bytes) -> bool:
        if self._teale_initiator is None or data[:1] != bytes([TEALE_SECOND]):
            return False
        if self.protection is not Protection.PLAIN:
            return False
        try:
            self._teale_initiator.read_second(data[1:])
        except PeerError:
            return False
        return True

    def _drop(self, reason: str) -> Sequence[SecureOutput]:
        if self._noticed:
            return ()
        self._noticed = True
        return (Notice(f"data dropped: {reason}"),)
