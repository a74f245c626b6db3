"""The handshake between nodes of ours: mutual, bound to the channel, the client first.

It is offered by a flag in M1 that others ignore, and so costs no round trip where the
other end does not know it.  C is who dialled, S who answers::

    M1  C -> S   flags STRONG, and V2 with a challenge   id of C | challenge, 32 (*)
    M2  S -> C   flags STRONG                            id of S | challenge, 32
    M3  C -> S   flags STRONG                            sealed introduction
    M4  S -> C   flags STRONG                            sealed verdict

    sealed = size of body, u16 | body, MessagePack | proof, 32 (*) | signature, 64 (*)

(*) where there is one: the challenge and the proof if C has a token, and a signature
if its sender has an identity.  A body says which of the two follow it.

The *transcript* of a sealed message is SHA-256 over a label, the SHA-256 fingerprint of
S's certificate as this end of the TLS connection sees it, everything that a frame says
of each message before (type, stream, flags, sequence, payload), and the body.  The
proof is HMAC-SHA256 of "client" or "server" and the transcript; its key is an HMAC of a
label of its own under the SHA-256 of the token, so that tokens of which only digests
are kept can be checked.  The signature is Ed25519 over a label, the role and the
transcript.  M3 says which token is meant by a hint (``session.hint_of``), and has a
nonce, so that S's proof is new as well.

Why what works against v1 and v2 fails here:

* *Reflection*, a proof handed back to whoever made it: a client's proof is no server's,
  each is about challenges that both have drawn, and S refuses its own id.
* *An oracle*: proofs and signatures are of texts that begin with labels of their own,
  and proofs are made with a key of their own, so that none is a heartbeat's signature
  or an answer in v1 or v2.  S proves a token only to a C that has just proved the same.
* *Trying tokens at home*: a stranger who dials gets an id and random bytes, and nothing
  that was made of a secret.
* *A middleman*: what he ends with C is another TLS connection than what he begins with
  S, and has another certificate.  The fingerprint is in both transcripts, so that no
  proof or signature that one end makes is good at the other.
* *A replay*: S's challenge is new, and so is C's nonce.
* *A downgrade*: who knows that the other is ours wants nothing else.  For the others
  both ends' challenges have a mark, by which v1 and v2 are refused if both are ours;
  see ``challenges``.

What it does not do: a token that can be guessed can be guessed at home by whoever gets
C to dial *him*, for he gets a hint and a proof.  Tokens are drawn at random where
nobody chooses one, and invitations name the certificate, which is looked at first.
Secrecy, of this and later, is that of TLS.  In an open fleet there is nothing to prove;
there, and without TLS, only the signatures say who somebody is.
"""

import hmac
import struct
from enum import Enum
from hashlib import sha256

from shoal.protocols.macfleet.wire.frames import Frame

LABEL = b"shoal macfleet strong v1\n"
_KEY_LABEL = b"shoal macfleet strong key v1\n"
_SIGNED_LABEL = b"shoal macfleet strong identity v1\n"
_BODY = b"body\n"
_SIZE = struct.Struct("!H")
_FRAME = struct.Struct("!HIIII")  # type, stream, flags, sequence, size of the payload


class Role(Enum):
    """Whose proof or signature it is."""

    CLIENT = b"client\n"
    SERVER = b"server\n"


class Transcript:
    """Everything that both ends have seen so far, as one hash."""

    def __init__(self, certificate: bytes) -> None:
        self._hash = sha256(LABEL + _SIZE.pack(len(certificate)) + certificate)

    def add(self, frame: Frame) -> None:
        """Note a message, ours or the other's."""
        kind, stream, flags, sequence, payload = frame
        self._hash.update(_FRAME.pack(kind, stream, flags, sequence, len(payload)))
        self._hash.update(payload)

    def of(self, body: bytes) -> bytes:
        """Return the transcript of the sealed message with this body: 32 bytes."""
        last = self._hash.copy()
        last.update(_BODY + _SIZE.pack(len(body)) + body)
        return last.digest()


def proof_of(digest: bytes, role: Role, seen: bytes) -> bytes:
    """Prove the token of a digest over a transcript: 32 bytes."""
    key = hmac.digest(digest, _KEY_LABEL, "sha256")
    return hmac.digest(key, role.value + seen, "sha256")


def is_proof(proof: bytes, digest: bytes, role: Role, seen: bytes) -> bool:
    """Say whether a proof was made with the token of a digest."""
    return hmac.compare_digest(proof_of(digest, role, seen), proof)


def to_be_signed(role: Role, seen: bytes) -> bytes:
    """Return what an end with an identity signs of a transcript."""
    return _SIGNED_LABEL + role.value + seen
