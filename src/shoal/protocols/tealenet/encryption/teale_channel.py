"""The encrypted channel of TealeNet's own peers, which looks like Noise and is not.

It has the form of ``IK`` and goes by its name, but every shared secret is hashed once
more, there is no prologue, and the second message proves the responder's static key
where Noise proves the initiator's.  Sources: TealeNet's own peers, and exchanges
recorded with them; ``docs/protocols/tealenet.md`` has the differences.

The time that each message carries is checked by nobody, so that a first message can be
sent again by whoever saw it: it must not replace secrets that are in use.
"""

from copy import copy
from hashlib import sha256
from hmac import digest
from typing import Final

from shoal.protocols.seam.context import Identity
from shoal.protocols.tealenet.encryption.noise import (
    KEY_SIZE,
    SECOND_SIZE_MIN,
    TAG_SIZE,
    EphemeralKey,
    KeyExchange,
    Opener,
    RandomBytes,
    Sealer,
    SymmetricState,
    TransportKeys,
    message_too_short,
    shared_secret,
)

COUNTER_SIZE: Final = 8  # bytes
WINDOW: Final = 2048  # packets that one may be late by
# A first message may come without a payload, though not with a part of one.
FIRST_SIZE_MIN: Final = 2 * KEY_SIZE + TAG_SIZE  # bytes


def time_payload(at: float) -> bytes:
    """Return the payload of both messages: the Unix time in seconds, big-endian."""
    seconds = int(at)
    nanoseconds = int((at - seconds) * 1e9)
    return seconds.to_bytes(8, "big") + nanoseconds.to_bytes(4, "big")


class TealeInitiator:
    """Begins a handshake with the owner of ``peer_key``."""

    def __init__(
        self, identity: Identity, peer_key: bytes, random_bytes: RandomBytes
    ) -> None:
        self._identity, self._peer_key = identity, peer_key
        self._ephemeral = EphemeralKey(random_bytes)
        self._state = SymmetricState()
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
        """Read the second message; PeerError, and nothing has changed, if it is bad."""
        if len(message) < SECOND_SIZE_MIN:
            raise message_too_short(message, SECOND_SIZE_MIN)
        state, peer_ephemeral = copy(self._state), message[:KEY_SIZE]
        state.mix_hash(peer_ephemeral)
        state.mix_key(_hashed_secret(self._ephemeral.exchange, peer_ephemeral))
        state.mix_key(_hashed_secret(self._ephemeral.exchange, self._peer_key))
        state.open(message[KEY_SIZE:])
        said, heard = state.split()
        return TransportKeys(Sealer(said), Opener(heard), state.hash)


class TealeResponder:
    """Reads a first message; ``peer_key`` is whose it is.

    Raises PeerError if it is not genuine, or not for the owner of ``own``.
    """

    def __init__(self, identity: Identity, message: bytes) -> None:
        if len(message) < FIRST_SIZE_MIN:
            raise message_too_short(message, FIRST_SIZE_MIN)
        self._identity = identity
        self._state = state = SymmetricState()
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
        """Return the second message, and the secrets.  Once only."""
        state, ephemeral = self._state, EphemeralKey(random_bytes)
        state.mix_hash(ephemeral.public)
        state.mix_key(_hashed_secret(ephemeral.exchange, self._peer_ephemeral))
        # Noise would take our ephemeral and the peer's static key here.
        state.mix_key(_hashed_secret(self._identity.exchange, self._peer_ephemeral))
        message = ephemeral.public + state.seal(payload)
        heard, said = state.split()
        return message, TransportKeys(Sealer(said), Opener(heard), state.hash)


class TealePackets:
    """Messages as packets: a counter of 8 bytes, little-endian, and what it encrypts.

    They may be lost and change places, but none is taken twice.
    """

    def __init__(self, keys: TransportKeys) -> None:
        self._keys = keys
        self._window = ReplayWindow()

    def seal(self, message: bytes) -> bytes:
        """Return the packet of a message."""
        counter, sealed = self._keys.sealer.seal(message)
        return counter.to_bytes(COUNTER_SIZE, "little") + sealed

    def open(self, packet: bytes) -> bytes | None:
        """Return the message; None if it is not genuine, too late, or came before."""
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
    """Which counters have come: new ones less than ``WINDOW`` late are acceptable."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: the counter that is n below the highest

    def accepts(self, counter: int) -> bool:
        """Say whether a packet with this counter may be looked at."""
        late = self._highest - counter
        return late < 0 or (late < WINDOW and not self._seen >> late & 1)

    def mark(self, counter: int) -> None:
        """Note a counter whose packet was genuine: only then is it spent."""
        ahead = counter - self._highest
        if ahead > 0:
            # A shift by 2**64 would need as many bits.
            self._seen = self._seen << min(ahead, WINDOW) | 1
            self._seen &= (1 << WINDOW) - 1
            self._highest = counter
        else:
            self._seen |= 1 << -ahead


def _hashed_secret(exchange: KeyExchange, public_key: bytes) -> bytes:
    """Return the shared secret, hashed: HKDF-SHA256 without salt and info (RFC 5869).

    With an output of one block the two steps of HKDF are one HMAC each.
    """
    extracted = digest(bytes(32), shared_secret(exchange, public_key), sha256)
    return digest(extracted, b"\1", sha256)
