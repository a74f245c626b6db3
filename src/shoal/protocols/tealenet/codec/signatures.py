"""The signatures of peers: proofs of their keys, and receipts for answers.

The dialling peer sends a challenge in ``hello``.  ``helloAck`` has the proof and
another challenge, which the dialling peer's first ``heartbeat`` answers.
"""

import base64
import binascii
import re

from shoal.protocols.seam.context import Identity

CHALLENGE_SIZE = 32  # bytes
KEY_SIZE = 32  # bytes

PROOF_PREFIX = b"shoal tealenet proof v1\n"
"""The prefix of a proof, which distinguishes it from other signed texts."""

NOISE_PREFIX = b"shoal tealenet noise v1\n"
"""The prefix of the text that binds an X25519 key to an Ed25519 key."""

HEX_KEY = re.compile("[0-9a-f]{64}")
"""A public key as nodes write it; the Ed25519 key is the node's id."""

_ANY_HEX_KEY = re.compile("[0-9a-fA-F]{64}")


def proof_text(
    challenge: bytes, verifier: bytes, prover: bytes, binding: bytes
) -> bytes:
    """Return the text that a peer signs to prove its Ed25519 key to one verifier.

    The first three have 32 bytes; the verifier chose the challenge at random.
    ``binding`` is that of the encrypted channel, so that no third party can pass proofs
    on between two channels; empty without one.
    """
    return PROOF_PREFIX + challenge + verifier + prover + binding


def noise_binding(exchange_key: bytes) -> bytes:
    """Return the text that a peer signs to bind its X25519 key, of 32 bytes."""
    return NOISE_PREFIX + exchange_key


def noise_fields(identity: Identity) -> tuple[str, str]:
    """Return ``noise`` and ``noise_proof`` of an introduction."""
    key = identity.exchange_key
    return key.hex(), encode_base64(identity.sign(noise_binding(key)))


def parse_key(text: str) -> bytes:
    """Return a public key from its 64 hexadecimal digits; empty for invalid text."""
    return bytes.fromhex(text) if _ANY_HEX_KEY.fullmatch(text) else b""


def encode_base64(data: bytes) -> str:
    """Encode a challenge or a proof."""
    return base64.b64encode(data).decode()


def decode_base64(text: str) -> bytes:
    """Decode a challenge or a proof; empty for invalid text."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return b""
