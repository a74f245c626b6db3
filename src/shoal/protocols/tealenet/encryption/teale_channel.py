"""The encrypted channel of TealeNet's own peers, which resembles Noise.

It has the form and the name of ``IK``, but every shared secret is hashed once more,
there is no prologue, and the second message proves the responder's static key where
Noise proves the initiator's.  Sources: TealeNet's own peers, and exchanges recorded
with them.

No peer checks the time in a message, so anyone can replay a first message: it must not
replace keys that are in use.
"""

from copy import copy
from hashlib import sha256
from hmac import digest
from typing import Final

from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.noise import (
    IK_NAME,
    KEY_SIZE,
    SECOND_SIZE_MIN,
    TAG_SIZE,
    EphemeralKey,
    KeyExchange,
    RandomBytes,
    SymmetricState,
    TransportKeys,
    message_too_short,
    shared_secret,
)

COUNTER_SIZE: Final = 8  # bytes
WINDOW: Final = 2048  # packets by which one may be late
# The payload of a first message may be absent as a whole.
FIRST_SIZE_MIN: Final = 2 * KEY_SIZE + TAG_SIZE  # bytes


def time_payload(at: float) -> bytes:
    """Return the payload of both messages: the Unix time in seconds, big-endian."""
    seconds = int(at)
    nanoseconds = int((at - seconds) * 1e9)
    return seconds.to_bytes(8, "big") + nanoseconds.to_bytes(4, "big")


class TealeInitiator:
    """Starts a handshake with the owner of ``peer_key``."""

    def __init__(
        self, identity: Identity, peer_key: bytes, random_bytes: RandomBytes
    ) -> None:
        self._identity, self._peer_key = identity, peer_key
        self._ephemeral = EphemeralKey(random_bytes)
        self._state = SymmetricState(IK_NAME)
        self._state.mix_hash(peer_key)

    def write_first(self, payload: bytes) -> bytes:
        """Return the first message."""
        state, ephemeral = self._state, self._ephemeral
        state.mix_hash(ephemeral.public)
        state.mix_key(_hashed_secret(ephemeral.exchange, self._peer_key))
        static = state.seal(self._identity.exchange_key)
        state.mix_key(_hashed_secret(self._identity.exchange, self._peer_key))
        return ephemeral.public + static + state.seal(payload)

    def read_second(self, message: bytes) -> TransportKeys:
        """Read the second message; an invalid one raises PeerError, changes nothing."""
        if len(message) < SECOND_SIZE_MIN:
            raise message_too_short(message, SECOND_SIZE_MIN)
        state, peer_ephemeral = copy(self._state), message[:KEY_SIZE]
        state.mix_hash(peer_ephemeral)
        state.mix_key(_hashed_secret(self._ephemeral.exchange, peer_ephemeral))
        state.mix_key(_hashed_secret(self._ephemeral.exchange, self._peer_key))
        state.open(message[KEY_SIZE:])
        return state.split(initiator=True)


class TealeResponder:
    """Reads a first message; ``peer_key`` is the sender's static key.

    Raises PeerError if it is not genuine, or not for the owner of ``identity``.
    """

    def __init__(self, identity: Identity, message: bytes) -> None:
        if len(message) < FIRST_SIZE_MIN:
            raise message_too_short(message, FIRST_SIZE_MIN)
        self._identity = identity
        self._state = state = SymmetricState(IK_NAME)
        state.mix_hash(identity.exchange_key)
        self._peer_ephemeral = message[:KEY_SIZE]
        state.mix_hash(self._peer_ephemeral)
        state.mix_key(_hashed_secret(identity.exchange, self._peer_ephemeral))
        self.peer_key = state.open(message[KEY_SIZE:FIRST_SIZE_MIN])
        state.mix_key(_hashed_secret(identity.exchange, self.peer_key))
        if len(message) > FIRST_SIZE_MIN:
            state.open(message[FIRST_SIZE_MIN:])

    def write_second(
        self, random_bytes: RandomBytes, payload: bytes
    ) -> tuple[bytes, TransportKeys]:
        """Return the second message and the keys.  Call it once."""
        state, ephemeral = self._state, EphemeralKey(random_bytes)
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

    def __init__(self, keys: TransportKeys) -> None:
        self._keys = keys
        self._window = ReplayWindow()

    def seal(self, message: bytes) -> bytes:
        """Return the packet of a message."""
        counter, sealed = self._keys.sealer.seal(message)
        return counter.to_bytes(COUNTER_SIZE, "little") + sealed

    def open(self, packet: bytes) -> bytes | None:
        """Return the message; None if it is not genuine, too late, or a duplicate."""
        if len(packet) < COUNTER_SIZE + TAG_SIZE:
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


def _hashed_secret(exchange: KeyExchange, public_key: bytes) -> bytes:
    """Return the hashed shared secret: HKDF-SHA256 without salt and info (RFC 5869).

    For an output of one block, each of HKDF's two steps is one HMAC.
    """
    extracted = digest(bytes(32), shared_secret(exchange, public_key), sha256)
    return digest(extracted, b"\1", sha256)
