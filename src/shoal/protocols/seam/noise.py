"""Two handshakes of the Noise framework, of two messages each, then transport keys.

``Noise_IK_25519_ChaChaPoly_BLAKE2s``: the initiator knows the responder's static key;
the responder learns and verifies the initiator's.
``Noise_NN_25519_ChaChaPoly_BLAKE2s``: neither end has a static key, so whoever uses the
keys has to authenticate the other end, bound to ``TransportKeys.hash``.

Source: Perrin, *The Noise Protocol Framework*, revision 34 (2018): section 5 for the
states, 7.4 for the pattern ``NN``, 7.5 for ``IK``, 11.4 for messages with explicit
nonces.

Messages after a handshake may exceed Noise's 65535 bytes: that limit comes from a
length field of two bytes, which not every transport uses.
"""

import hmac
from collections.abc import Callable
from copy import copy
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
from shoal.protocols.seam.context import Identity

IK_NAME: Final = b"Noise_IK_25519_ChaChaPoly_BLAKE2s"
NN_NAME: Final = b"Noise_NN_25519_ChaChaPoly_BLAKE2s"
KEY_SIZE: Final = 32  # bytes
TAG_SIZE: Final = 16  # bytes
FIRST_SIZE_MIN: Final = 2 * KEY_SIZE + 2 * TAG_SIZE  # bytes: e, s and an empty payload
SECOND_SIZE_MIN: Final = KEY_SIZE + TAG_SIZE  # bytes: e and an empty payload
NONCE_MAX: Final = 2**64 - 2  # the last one is reserved (section 5.1)

RandomBytes = Callable[[int], bytes]
"""Returns that many random bytes."""

KeyExchange = Callable[[bytes], bytes]
"""Returns the secret shared with the owner of a public key: ``Identity.exchange``."""


def nonce_of(number: int) -> bytes:
    """Return the 12 bytes that ChaChaPoly takes for a number (section 12.3)."""
    return bytes(4) + number.to_bytes(8, "little")


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


class NoiseInitiator:
    """Starts a handshake with the owner of ``peer_key``.

    The handshake fails unless both ends have the same ``prologue``.
    """

    def __init__(
        self,
        identity: Identity,
        peer_key: bytes,
        prologue: bytes,
        random_bytes: RandomBytes,
    ) -> None:
        self._identity, self._peer_key = identity, peer_key
        self._ephemeral = EphemeralKey(random_bytes)
        self._state = SymmetricState(IK_NAME)
        self._state.mix_hash(prologue)
        self._state.mix_hash(peer_key)

    def write_first(self, payload: bytes = b"") -> bytes:
        """Return the first message: ``e, es, s, ss``.

        Others cannot read ``payload``, but can replay the message.
        """
        state, ephemeral = self._state, self._ephemeral
        state.mix_hash(ephemeral.public)
        state.mix_key(shared_secret(ephemeral.exchange, self._peer_key))
        static = state.seal(self._identity.exchange_key)
        state.mix_key(shared_secret(self._identity.exchange, self._peer_key))
        return ephemeral.public + static + state.seal(payload)

    def read_second(self, message: bytes) -> tuple[bytes, TransportKeys]:
        """Read the second message: ``e, ee, se``; return its payload and the keys.

        Raises PeerError if it is not the peer's answer, and keeps its state then, so
        that a forged message does no harm.
        """
        if len(message) < SECOND_SIZE_MIN:
            raise message_too_short(message, SECOND_SIZE_MIN)
        state, peer_ephemeral = copy(self._state), message[:KEY_SIZE]
        state.mix_hash(peer_ephemeral)
        state.mix_key(shared_secret(self._ephemeral.exchange, peer_ephemeral))
        state.mix_key(shared_secret(self._identity.exchange, peer_ephemeral))
        payload = state.open(message[KEY_SIZE:])
        return payload, state.split(initiator=True)


class NoiseResponder:
    """Reads a first message: ``peer_key`` is the sender's static key.

    Raises PeerError if it is not genuine, or not for the owner of ``identity``.
    """

    def __init__(self, identity: Identity, prologue: bytes, message: bytes) -> None:
        if len(message) < FIRST_SIZE_MIN:
            raise message_too_short(message, FIRST_SIZE_MIN)
        self._state = state = SymmetricState(IK_NAME)
        state.mix_hash(prologue)
        state.mix_hash(identity.exchange_key)
        self._peer_ephemeral = message[:KEY_SIZE]
        state.mix_hash(self._peer_ephemeral)
        state.mix_key(shared_secret(identity.exchange, self._peer_ephemeral))
        end = 2 * KEY_SIZE + TAG_SIZE
        self.peer_key = state.open(message[KEY_SIZE:end])
        state.mix_key(shared_secret(identity.exchange, self.peer_key))
        self.payload = state.open(message[end:])

    def write_second(
        self, random_bytes: RandomBytes, payload: bytes = b""
    ) -> tuple[bytes, TransportKeys]:
        """Return the second message and the keys.  Call it once."""
        state, ephemeral = self._state, EphemeralKey(random_bytes)
        state.mix_hash(ephemeral.public)
        state.mix_key(shared_secret(ephemeral.exchange, self._peer_ephemeral))
        state.mix_key(shared_secret(ephemeral.exchange, self.peer_key))
        message = ephemeral.public + state.seal(payload)
        return message, state.split(initiator=False)


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
