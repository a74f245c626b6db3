"""How peers of ours prove their keys for signatures, and bind others to them.

Who dialled sends a challenge in ``hello``.  ``helloAck`` has the proof, and a challenge
of its own, which the first ``heartbeat`` of who dialled answers.
"""

import base64
import binascii
import re

from shoal.protocols.session import Identity

CHALLENGE_SIZE = 32  # bytes
KEY_SIZE = 32  # bytes

PROOF = b"shoal tealenet proof v1\n"
"""What a proof begins with, so that no other signature is taken for one."""

NOISE = b"shoal tealenet noise v1\n"
"""The same, of what binds a key for encryption to its owner's key for signatures."""

_HEX_KEY = re.compile("[0-9a-fA-F]{64}")


def proof_of(challenge: bytes, verifier: bytes, prover: bytes) -> bytes:
    """Return what a peer signs to prove its Ed25519 key, to this verifier and no other.

    All three have 32 bytes; the challenge is what the verifier drew.
    """
    return PROOF + challenge + verifier + prover


def noise_binding(exchange_key: bytes) -> bytes:
    """Return what a peer signs to make an X25519 key, of 32 bytes, known as its own."""
    return NOISE + exchange_key


def noise_fields(identity: Identity) -> tuple[str, str]:
    """Return ``noise`` and ``noise_proof`` of an introduction."""
    key = identity.exchange_key
    return key.hex(), base64_of(identity.sign(noise_binding(key)))


def key_of(text: str) -> bytes:
    """Return a public key from its 64 hexadecimal digits; of anything else, nothing."""
    return bytes.fromhex(text) if _HEX_KEY.fullmatch(text) else b""


def base64_of(data: bytes) -> str:
    """Return a challenge or a proof as it is written."""
    return base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """Return a challenge or a proof as it was read; of anything else, nothing."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return b""
