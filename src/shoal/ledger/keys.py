"""Ed25519 keys and signatures, checked strictly: one signature is valid in one form.

Sources: RFC 8032; Chalkias, Garillot and Nikolaenko, *Taming the Many EdDSAs* (2020),
for what lax implementations let through.
"""

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
SIGNATURE_SIZE = 64  # bytes

_P = 2**255 - 19
_SIGN_BIT = 1 << 255  # in which a key carries the sign of x
_Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826

# Signatures of these eight points (orders 1, 2, 4 and 8, by their y) prove nothing:
# whoever likes can make one that fits any message, or half of them.
_SMALL_ORDER = frozenset({0, 1, _P - 1, _Y8, _P - _Y8})

_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


class Signer:
    """An Ed25519 private key, and the X25519 private key of the same seed.

    The latter is the seed as it is, as some wires' nodes have it; the former is a hash
    of it (RFC 8032, section 5.1.5), so that the two have nothing in common.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._exchange = X25519PrivateKey.from_private_bytes(key.private_bytes_raw())
        self.public_key = key.public_key().public_bytes_raw()
        self.exchange_key = self._exchange.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes) -> "Signer":
        """Return the key of a seed of 32 bytes; ValueError if it has not as many."""
        if len(seed) != KEY_SIZE:
            raise ValueError(f"a seed of {len(seed)} bytes, expected {KEY_SIZE}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        """Return the signature, of 64 bytes."""
        return self._key.sign(message)

    def exchange(self, public_key: bytes) -> bytes:
        """Return what is shared with the owner of an X25519 key: 32 bytes, unhashed.

        Raises ValueError for a key that shares the same with everybody.
        """
        return self._exchange.exchange(X25519PublicKey.from_public_bytes(public_key))


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Say whether the owner of the key signed the message.

    Whatever is wrong, in form or otherwise, is simply no signature.
    """
    if len(signature) != SIGNATURE_SIZE or not is_valid_key(public_key):
        return False
    try:
        # This refuses an S beyond the group's order, and compares R byte for byte.
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_valid_key(public_key: bytes) -> bool:
    """Say whether a key has the right form, and is none that fits any message."""
    if len(public_key) != KEY_SIZE:
        return False
    y = int.from_bytes(public_key, "little") & ~_SIGN_BIT
    return y < _P and y not in _SMALL_ORDER


def public_key_of(hex: str) -> bytes | None:
    """Read a key of exactly 64 hexadecimal digits, of either case; None if it is none.

    It need not be sound.
    """
    return bytes.fromhex(hex) if _HEX_KEY.fullmatch(hex) else None
