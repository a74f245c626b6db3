"""Ed25519 keys and signatures, verified strictly: a signature has one valid encoding.

Sources: RFC 8032; Chalkias, Garillot and Nikolaenko, *Taming the Many EdDSAs* (2020),
for what lax implementations accept.
"""

import hmac
import re

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)

KEY_SIZE = 32  # bytes

_P = 2**255 - 19
_SIGN_BIT = 1 << 255  # the bit of a key that holds the sign of x
_Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826

# Signatures of these eight low-order points (by their y) prove nothing: anyone can make
# one that is valid for any message, or for a share of all messages.
_SMALL_ORDER = frozenset({0, 1, _P - 1, _Y8, _P - _Y8})

_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


class Signer:
    """An Ed25519 private key, and the X25519 private key of the same seed.

    The X25519 key is the seed itself, as nodes of some wires use it; the Ed25519 key is
    a hash of the seed (RFC 8032, section 5.1.5), so the two are independent.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._exchange = X25519PrivateKey.from_private_bytes(key.private_bytes_raw())
        self.public_key = key.public_key().public_bytes_raw()
        self.exchange_key = self._exchange.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes) -> "Signer":
        """Return the key of a seed; ValueError unless the seed has 32 bytes."""
        if len(seed) != KEY_SIZE:
            raise ValueError(f"a seed of {len(seed)} bytes, expected {KEY_SIZE}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key.sign(message)

    def derive(self, purpose: bytes) -> bytes:
        """Return a secret for a purpose, 32 bytes: HMAC-SHA-256 with the seed."""
        return hmac.digest(self._key.private_bytes_raw(), purpose, "sha256")

    def exchange(self, public_key: bytes) -> bytes:
        """Return the secret shared with the owner of an X25519 key: 32 bytes, unhashed.

        Raises ValueError for a low-order key, which has the same secret with every key.
        """
        return self._exchange.exchange(X25519PublicKey.from_public_bytes(public_key))


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether the owner of the key signed the message.

    Malformed keys and signatures are invalid.
    """
    if not is_valid_key(public_key):
        return False
    try:
        # This rejects another size than 64 bytes and an S beyond the group's order, and
        # compares R byte for byte.
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_valid_key(public_key: bytes) -> bool:
    """Return whether a key is well-formed and not of low order."""
    if len(public_key) != KEY_SIZE:
        return False
    y = int.from_bytes(public_key, "little") & ~_SIGN_BIT
    return y < _P and y not in _SMALL_ORDER


def public_key_of(hex: str) -> bytes | None:
    """Decode a key of exactly 64 hexadecimal digits of either case; None if malformed.

    The key may be invalid; see ``is_valid_key``.
    """
    return bytes.fromhex(hex) if _HEX_KEY.fullmatch(hex) else None
