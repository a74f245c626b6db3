"""Proofs of a token, bound to an encrypted channel; the token is never sent.

Each end proves the token by an HMAC under a key derived from it, over the channel's
binding and the end's role.  Who dialled proves first, and names no token: the other
tries all of its own.  It proves only the token that the first has just proved, so a
stranger gets nothing derived from a secret.

Why the usual attacks fail: a *reflected* proof has the wrong role; a *replayed* one has
another binding, since both ends contribute a fresh key to it; and a *man in the middle*
has two channels with different bindings, so no proof of one is valid on the other.

Limits: all holders of a token are equal, so one of them can pretend to be the
coordinator to another, or a worker of another name; named tokens, one for each machine,
prevent that.  A token that can be guessed can be guessed offline by anyone a worker
dials.
"""

import hmac
from enum import Enum
from hashlib import sha256

from shoal.domain.credentials import digest_of

NOT_PROVEN = (
    "the peer has not proved the join token: it is another coordinator, or an impostor"
)
_KEY_LABEL = b"shoal token proof v1\n"


class ProofRole(Enum):
    """The end that made a proof."""

    DIALLING = b"dialling\n"
    ACCEPTING = b"accepting\n"


def prove_token(digest: bytes, role: ProofRole, binding: bytes) -> bytes:
    """Return the proof, 32 bytes, of the token with a SHA-256 digest."""
    key = hmac.digest(digest, _KEY_LABEL, sha256)
    return hmac.digest(key, role.value + binding, sha256)


class PresentedProof:
    """A proof that a peer sent; ``digest`` is that of its token, once it is found."""

    def __init__(self, proof: bytes, role: ProofRole, binding: bytes) -> None:
        self._proof, self._role, self._binding = proof, role, binding
        self.digest = b""

    def matches(self, digest: bytes) -> bool:
        """Return whether the proof was made with the token of a digest.

        Takes the same time for any proof.
        """
        expected = prove_token(digest, self._role, self._binding)
        if not hmac.compare_digest(expected, self._proof):
            return False
        self.digest = digest
        return True


class PresentedToken:
    """A token that a peer sent itself; as ``PresentedProof``."""

    def __init__(self, token: str) -> None:
        self._digest = digest_of(token)
        self.digest = b""

    def matches(self, digest: bytes) -> bool:
        """Return whether the token has this digest."""
        if not hmac.compare_digest(self._digest, digest):
            return False
        self.digest = digest
        return True
