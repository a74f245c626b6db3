"""A handshake of the Noise framework, of two messages, then transport keys.

``Noise_NN_25519_ChaChaPoly_BLAKE2s``: neither end has a static key, so the user of the
keys has to authenticate the other end, bound to ``TransportKeys.hash``.

Source: Perrin, *The Noise Protocol Framework*, revision 34 (2018): section 5 for the
states, 7.4 for the pattern ``NN``, 11.4 for messages with explicit nonces.

Messages after a handshake may exceed Noise's 65535 bytes: that limit comes from a
length field of two bytes, which not every transport uses.
"""

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2s
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from shoal.domain.errors import PeerError

NN_NAME: Final = b"Noise_NN_25519_ChaChaPoly_BLAKE2s"
KEY_SIZE: Final = 32  # bytes
TAG_SIZE: Final = 16  # bytes
SECOND_SIZE_MIN: Final = KEY_SIZE + TAG_SIZE  # bytes: e and an empty payload
NONCE_MAX: Final = 2**64 - 2  # the last one is reserved (section 5.1)

RandomBytes = Callable[[int], bytes]
"""Returns that many random bytes."""

KeyExchange = Callable[[bytes], bytes]
"""Returns the secret shared with the owner of a public key: ``Identity.exchange``."""


nonce_of = struct.Struct("<4xQ").pack
"""Return the 12 bytes that ChaChaPoly takes for a number (section 12.3)."""


class Sealer:
    """Encrypts the messages of one direction; their numbers count from 0."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._next = 0

    def seal(self, plain: bytes | memoryview) -> tuple[int, bytes]:
        """Return the number of a message, and the message encrypted.

        Raises PeerError after ``NONCE_MAX``: a new session is needed.
        """
        number = self._next
        if number > NONCE_MAX:
            raise PeerError(f"the session has sent {NONCE_MAX + 1} messages, its limit")
        self._next = number + 1
        return number, self._cipher.encrypt(nonce_of(number), plain, None)


class Opener:
    """Decrypts the messages of one direction, by their numbers.

    The caller decides which numbers are acceptable.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)

    def open(self, number: int, sealed: bytes | memoryview) -> bytes | None:
        """Return the message, or None if the other end did not seal it."""
        if not 0 <= number <= NONCE_MAX:
            return None
        try:
            return self._cipher.decrypt(nonce_of(number), sealed, None)
        except InvalidTag:
            return None


@dataclass(frozen=True, slots=True)
class TransportKeys:
    """The result of a handshake: the ciphers of both directions.

    ``hash`` is the same at both ends and unique to the handshake.
    """

    sealer: Sealer
    opener: Opener
    hash: bytes


class SymmetricState:
    """The hash, the chaining key and the cipher of a handshake."""

    def __init__(self, protocol_name: bytes) -> None:
        # The names are longer than a hash, and are therefore hashed (section 5.2).
        self.hash = self._chaining_key = blake2s(protocol_name).digest()
        self._key = b""
        self._nonce = 0

    def mix_hash(self, data: bytes) -> None:
        """Mix ``data`` into the hash."""
        self.hash = blake2s(self.hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        """Mix ``secret`` into the chaining key, and derive the cipher's next key."""
        self._chaining_key, self._key = hkdf(self._chaining_key, secret)
        self._nonce = 0

    def seal(self, plain: bytes) -> bytes:
        """Encrypt ``plain``, bound to all previous messages of the handshake."""
        sealed = ChaCha20Poly1305(self._key).encrypt(
            self._next_nonce(), plain, self.hash
        )
        self.mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """Decrypt.  Raises PeerError if the other end did not seal it."""
        try:
            cipher = ChaCha20Poly1305(self._key)
            plain = cipher.decrypt(self._next_nonce(), sealed, self.hash)
        except InvalidTag as error:
            raise PeerError("a handshake message is not genuine") from error
        self.mix_hash(sealed)
        return plain

    def split(self, *, initiator: bool) -> TransportKeys:
        """Return the transport keys of one end; the handshake is complete."""
        keys = hkdf(self._chaining_key, b"")
        sending, receiving = keys if initiator else reversed(keys)
        return TransportKeys(Sealer(sending), Opener(receiving), self.hash)

    def _next_nonce(self) -> bytes:
        nonce, self._nonce = self._nonce, self._nonce + 1
        return nonce_of(nonce)


def hkdf(chaining_key: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Return the first two outputs of Noise's HKDF, of 32 bytes each (section 4.3)."""
    base = hmac.digest(chaining_key, secret, blake2s)
    first = hmac.digest(base, b"\1", blake2s)
    return first, hmac.digest(base, first + b"\2", blake2s)


class EphemeralKey:
    """A key pair for one handshake."""

    def __init__(self, random_bytes: RandomBytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(random_bytes(KEY_SIZE))
        self.public = self._key.public_key().public_bytes_raw()

    def exchange(self, public_key: bytes) -> bytes:
        """Return the secret shared with a key's owner, as ``Identity.exchange``."""
        return self._key.exchange(X25519PublicKey.from_public_bytes(public_key))


def shared_secret(exchange: KeyExchange, public_key: bytes) -> bytes:
    """Return the secret shared with the owner of a key that came from a peer.

    Raises PeerError for a key of low order, whose secret anyone can predict.
    """
    try:
        return exchange(public_key)
    except ValueError as error:
        raise PeerError("a key in the handshake gives no secret") from error


class EphemeralInitiator:
    """Starts a handshake of the pattern ``NN``, with anyone.

    The handshake fails unless both ends have the same ``prologue``.
    """

    def __init__(self, prologue: bytes, random_bytes: RandomBytes) -> None:
        self._ephemeral = EphemeralKey(random_bytes)
        self._state = SymmetricState(NN_NAME)
        self._state.mix_hash(prologue)

    def write_first(self) -> bytes:
        """Return the first message: ``e``, of ``KEY_SIZE`` bytes."""
        self._state.mix_hash(self._ephemeral.public)
        self._state.mix_hash(b"")  # the payload, which is not encrypted yet
        return self._ephemeral.public

    def read_second(self, message: bytes) -> TransportKeys:
        """Read the second message: ``e, ee``, of ``SECOND_SIZE_MIN`` bytes.

        Raises PeerError if it is not the answer to the first.
        """
        if len(message) != SECOND_SIZE_MIN:
            raise message_too_short(message, SECOND_SIZE_MIN)
        peer_ephemeral = message[:KEY_SIZE]
        self._state.mix_hash(peer_ephemeral)
        self._state.mix_key(shared_secret(self._ephemeral.exchange, peer_ephemeral))
        self._state.open(message[KEY_SIZE:])
        return self._state.split(initiator=True)


def answer_ephemeral(
    prologue: bytes, first: bytes, random_bytes: RandomBytes
) -> tuple[bytes, TransportKeys]:
    """Return the answer to an ``EphemeralInitiator``'s first message, and the keys.

    Raises PeerError for an invalid message.
    """
    if len(first) != KEY_SIZE:
        raise message_too_short(first, KEY_SIZE)
    state, ephemeral = SymmetricState(NN_NAME), EphemeralKey(random_bytes)
    state.mix_hash(prologue)
    state.mix_hash(first)
    state.mix_hash(b"")
    state.mix_hash(ephemeral.public)
    state.mix_key(shared_secret(ephemeral.exchange, first))
    return ephemeral.public + state.seal(b""), state.split(initiator=False)


def message_too_short(message: bytes, size: int) -> PeerError:
    """Return the error for a handshake message below its minimum size."""
    return PeerError(
        f"a handshake message of {len(message)} bytes, expected {size} or more"
    )
