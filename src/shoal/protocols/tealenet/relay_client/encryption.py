"""Encryption of a session through a relay, so that the relay cannot read it.

The channel of TealeNet's own peers resembles Noise: it has the form and the name of
``IK``, but every shared secret is hashed once more, there is no prologue, and the
second message proves the responder's static key where Noise proves the initiator's.
Sources: TealeNet's own peers, and exchanges recorded with them.

The first byte of the first message is 0x01 if it starts this channel; JSON is plain
JSON.  Nodes are offered the channel if they have a key for it, and get plain JSON if
they do not answer: so far no real peer answers.  Data that cannot be decrypted is
dropped, because a relay may let other nodes inject data into a session.

No peer checks the time in a message, so anyone can replay a first message: it must not
replace keys that are in use.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from hmac import digest
from typing import Final, TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam import noise
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Notice, Send

IK_NAME: Final = b"Noise_IK_25519_ChaChaPoly_BLAKE2s"
COUNTER_SIZE: Final = 8  # bytes
WINDOW: Final = 2048  # packets by which one may be late
# The payload of a first message may be absent as a whole.
FIRST_SIZE_MIN: Final = 2 * noise.KEY_SIZE + noise.TAG_SIZE  # bytes


def time_payload(at: float) -> bytes:
    """Return the payload of both messages: the Unix time in seconds, big-endian."""
    seconds = int(at)
    nanoseconds = int((at - seconds) * 1e9)
    return seconds.to_bytes(8, "big") + nanoseconds.to_bytes(4, "big")


class TealeInitiator:
    """Starts a handshake with the owner of ``peer_key``."""

    def __init__(
        self, identity: Identity, peer_key: bytes, random_bytes: noise.RandomBytes
    ) -> None:
        self._identity, self._peer_key = identity, peer_key
        self._ephemeral = noise.EphemeralKey(random_bytes)
        self._state = noise.SymmetricState(IK_NAME)
        self._state.mix_hash(peer_key)

    def write_first(self, payload: bytes) -> bytes:
        """Return the first message."""
        state, ephemeral = self._state, self._ephemeral
        state.mix_hash(ephemeral.public)
        state.mix_key(_hashed_secret(ephemeral.exchange, self._peer_key))
        static = state.seal(self._identity.exchange_key)
        state.mix_key(_hashed_secret(self._identity.exchange, self._peer_key))
        return ephemeral.public + static + state.seal(payload)

    def read_second(self, message: bytes) -> noise.TransportKeys:
        """Read the second message; an invalid one raises PeerError, changes nothing."""
        if len(message) < noise.SECOND_SIZE_MIN:
            raise noise.message_too_short(message, noise.SECOND_SIZE_MIN)
        state, peer_ephemeral = copy(self._state), message[: noise.KEY_SIZE]
        state.mix_hash(peer_ephemeral)
        state.mix_key(_hashed_secret(self._ephemeral.exchange, peer_ephemeral))
        state.mix_key(_hashed_secret(self._ephemeral.exchange, self._peer_key))
        state.open(message[noise.KEY_SIZE :])
        return state.split(initiator=True)


class TealeResponder:
    """Reads a first message; ``peer_key`` is the sender's static key.

    Raises PeerError if it is not genuine, or not for the owner of ``identity``.
    """

    def __init__(self, identity: Identity, message: bytes) -> None:
        if len(message) < FIRST_SIZE_MIN:
            raise noise.message_too_short(message, FIRST_SIZE_MIN)
        self._identity = identity
        self._state = state = noise.SymmetricState(IK_NAME)
        state.mix_hash(identity.exchange_key)
        self._peer_ephemeral = message[: noise.KEY_SIZE]
        state.mix_hash(self._peer_ephemeral)
        state.mix_key(_hashed_secret(identity.exchange, self._peer_ephemeral))
        self.peer_key = state.open(message[noise.KEY_SIZE : FIRST_SIZE_MIN])
        state.mix_key(_hashed_secret(identity.exchange, self.peer_key))
        if len(message) > FIRST_SIZE_MIN:
            state.open(message[FIRST_SIZE_MIN:])

    def write_second(
        self, random_bytes: noise.RandomBytes, payload: bytes
    ) -> tuple[bytes, noise.TransportKeys]:
        """Return the second message and the keys.  Call it once."""
        state, ephemeral = self._state, noise.EphemeralKey(random_bytes)
        state.mix_hash(ephemeral.public)
        state.mix_key(_hashed_secret(ephemeral.exchange, self._peer_ephemeral))
        # Noise uses the responder's ephemeral and the initiator's static key here.
        state.mix_key(_hashed_secret(self._identity.exchange, self._peer_ephemeral))
        message = ephemeral.public + state.seal(payload)
        return message, state.split(initiator=False)


class TealePackets:
    """Messages as packets: a counter of 8 bytes, little-endian, and the ciphertext.

    Packets may be lost and reordered; a duplicate is dropped.
    """

    def __init__(self, keys: noise.TransportKeys) -> None:
        self._keys = keys
        self._window = ReplayWindow()

    def seal(self, message: bytes) -> bytes:
        """Return the packet of a message."""
        counter, sealed = self._keys.sealer.seal(message)
        return counter.to_bytes(COUNTER_SIZE, "little") + sealed

    def open(self, packet: bytes) -> bytes | None:
        """Return the message; None if it is not genuine, too late, or a duplicate."""
        if len(packet) < COUNTER_SIZE + noise.TAG_SIZE:
            return None
        counter = int.from_bytes(packet[:COUNTER_SIZE], "little")
        if not self._window.accepts(counter):
            return None
        message = self._keys.opener.open(counter, packet[COUNTER_SIZE:])
        if message is not None:
            self._window.mark(counter)
        return message


class ReplayWindow:
    """The counters received so far; accepts new ones less than ``WINDOW`` late."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: the counter that is n below the highest

    def accepts(self, counter: int) -> bool:
        """Return whether a counter is new and not too late."""
        late = self._highest - counter
        return late < 0 or (late < WINDOW and not self._seen >> late & 1)

    def mark(self, counter: int) -> None:
        """Mark the counter of a genuine packet as received."""
        ahead = counter - self._highest
        if ahead > 0:
            # A shift by 2**64 would need as many bits.
            self._seen = self._seen << min(ahead, WINDOW) | 1
            self._seen &= (1 << WINDOW) - 1
            self._highest = counter
        else:
            self._seen |= 1 << -ahead


def _hashed_secret(exchange: noise.KeyExchange, public_key: bytes) -> bytes:
    """Return the hashed shared secret: HKDF-SHA256 without salt and info (RFC 5869).

    For an output of one block, each of HKDF's two steps is one HMAC.
    """
    extracted = digest(bytes(32), noise.shared_secret(exchange, public_key), sha256)
    return digest(extracted, b"\1", sha256)


FIRST_TYPE: Final = b"\x01"  # before the first message of a handshake
SECOND_TYPE: Final = b"\x02"
HANDSHAKE_TYPES = (FIRST_TYPE, SECOND_TYPE)
"""What handshake messages begin with; JSON begins with neither."""

ANSWER_TIMEOUT = 2.0  # seconds for a peer to answer, before plain JSON is used
PENDING_MAX = 1024  # messages that wait for the handshake
PENDING_SIZE_MAX = 16 << 20  # bytes of them

WRONG_KEY = "the initiator's key is not the one that the peer announced"


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A decrypted message of the peer."""

    data: bytes


SecureOutput: TypeAlias = MessageReceived | Send | Notice
"""A Send has data for the peer, to be sent through the relay."""


@dataclass(frozen=True, slots=True)
class SessionParties:
    """The two ends of a session, and their keys.

    ``epoch`` is as in ``WorkerProfile``.  ``peer_key`` is the X25519 key that the relay
    announced for the peer; no peer signs it.
    """

    identity: Identity
    peer_id: str
    session_id: str
    random_bytes: noise.RandomBytes
    epoch: float = 0.0
    peer_key: bytes | None = None

    def handshake_payload(self, now: float) -> bytes:
        """Return the payload of each message of the handshake."""
        return time_payload(self.epoch + now)


class SecureSession:
    """One end of a session: translates between messages and relayed data.

    ``initiates``: this end opened the session.  ``protection`` is None during the
    negotiation, and messages to send are kept until it ends.
    """

    def __init__(self, parties: SessionParties, *, initiates: bool) -> None:
        self.protection: Protection | None = None
        self.deadline: float | None = None
        self._parties = parties
        self._initiates = initiates
        self._initiator: TealeInitiator | None = None
        self._packets: TealePackets | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._noticed = False  # whether a notice was given: one is enough

    def start(self, now: float) -> Sequence[SecureOutput]:
        """Start the negotiation, once the peer is ready."""
        parties = self._parties
        if not self._initiates:
            return ()
        if parties.peer_key is None:
            return self._establish(None)
        try:
            self._initiator = TealeInitiator(
                parties.identity, parties.peer_key, parties.random_bytes
            )
            offer = self._initiator.write_first(parties.handshake_payload(now))
        except PeerError as error:
            notice = Notice(f"the peer's key for encryption: {error}")
            return (notice, *self._establish(None))
        self.deadline = now + ANSWER_TIMEOUT
        return (Send(FIRST_TYPE + offer),)

    def send(self, message: bytes) -> Sequence[Send]:
        """Seal a message, or keep it during the negotiation.

        Raises PeerError if too many are kept, or at the limit of a key.
        """
        if self.protection is not None:
            return (self._sealed(message),)
        self._pending.append(message)
        self._pending_size += len(message)
        if len(self._pending) > PENDING_MAX or self._pending_size > PENDING_SIZE_MAX:
            what = "messages before the end of the handshake"
            raise LimitExceeded(what, self._pending_size, PENDING_SIZE_MAX)
        return ()

    def receive(self, data: bytes, now: float) -> Sequence[SecureOutput]:
        """Process data from the relay.

        Raises PeerError if the peer has answered too late: the session has to end.
        """
        if self.protection is None:
            return self._negotiate(data, now)
        if self._packets is not None:
            message = self._packets.open(data)
        else:
            # A late answer to the offer of encryption is not a message.
            message = None if data.startswith(HANDSHAKE_TYPES) else data
        if message is not None:
            return (MessageReceived(message),)
        if self._answered_too_late(data):
            raise PeerError("the peer answered the offer of encryption too late")
        return self._drop("data in the session is not the peer's")

    def tick(self, now: float) -> Sequence[SecureOutput]:
        """Use plain JSON if the peer has not answered in time."""
        due = self.deadline is not None and now >= self.deadline
        return self._establish(None) if due else ()

    def _negotiate(self, data: bytes, now: float) -> Sequence[SecureOutput]:
        kind = data[:1]
        try:
            if self._initiator is not None and kind == SECOND_TYPE:
                keys = self._initiator.read_second(data[1:])
                return self._establish(TealePackets(keys))
            if not self._initiates and kind == FIRST_TYPE:
                return self._answer(data[1:], now)
        except PeerError as error:
            return self._drop(str(error))
        if kind in HANDSHAKE_TYPES:
            return self._drop("unexpected handshake message")
        return (*self._establish(None), MessageReceived(data))

    def _answer(self, message: bytes, now: float) -> Sequence[SecureOutput]:
        parties = self._parties
        responder = TealeResponder(parties.identity, message)
        if parties.peer_key not in (None, responder.peer_key):
            raise PeerError(WRONG_KEY)
        payload = parties.handshake_payload(now)
        second, keys = responder.write_second(parties.random_bytes, payload)
        answer = Send(SECOND_TYPE + second)
        return (answer, *self._establish(TealePackets(keys)))

    def _establish(self, packets: TealePackets | None) -> Sequence[Send]:
        """End the negotiation; without ``packets``, messages are plain JSON."""
        self._packets = packets
        self.protection = Protection.PLAIN if packets is None else Protection.TEALE
        self.deadline = None
        pending, self._pending = self._pending, []
        return [self._sealed(message) for message in pending]

    def _sealed(self, message: bytes) -> Send:
        return Send(message if self._packets is None else self._packets.seal(message))

    def _answered_too_late(self, data: bytes) -> bool:
        if self._initiator is None or self._packets is not None:
            return False
        if not data.startswith(SECOND_TYPE):
            return False
        try:
            self._initiator.read_second(data[1:])
        except PeerError:
            return False
        return True

    def _drop(self, reason: str) -> Sequence[SecureOutput]:
        if self._noticed:
            return ()
        self._noticed = True
        return (Notice(f"data dropped: {reason}"),)
