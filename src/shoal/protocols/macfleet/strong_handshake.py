"""The handshake between Shoal nodes: mutual, bound to the channel, the client first.

A flag in M1 that others ignore offers it, so it costs no round trip where the other end
does not know it.  C is the client, S the server::

    M1  C -> S   flags STRONG, and V2 with a challenge   id of C | challenge, 32 (*)
    M2  S -> C   flags STRONG                            id of S | challenge, 32
    M3  C -> S   flags STRONG                            sealed introduction
    M4  S -> C   flags STRONG                            sealed verdict

    sealed = size of body, u16 | body, MessagePack | proof, 32 (*) | signature, 64 (*)

(*) where there is one: the challenge and the proof if C has a token, and a signature if
its sender has an identity.  A body says which of the two follow it.

The *transcript* of a sealed message is SHA-256 over a label, the SHA-256 fingerprint of
S's certificate as this end of the TLS connection sees it, every field of each earlier
frame (type, stream, flags, sequence, payload), and the body.  The proof is HMAC-SHA256
of "client" or "server" and the transcript; its key is an HMAC of a label of its own
under the SHA-256 of the token, so that tokens of which only digests are kept can be
checked.  The signature is Ed25519 over a label, the role and the transcript.  M3 names
the token by a hint (``seam.admission.token_hint``) and has a nonce, so that S's proof
is also fresh.

Why attacks that work against v1 and v2 fail here:

* *Reflection*, a proof sent back to its maker: a client's proof is not a server's, each
  covers challenges that both ends drew, and S refuses its own id.
* *An oracle*: proofs and signatures cover texts that begin with labels of their own,
  and proofs have a key of their own, so none is a heartbeat's signature or an answer
  of v1 or v2.  S proves a token only to a C that has just proved the same.
* *Offline guessing*: a stranger who dials receives an id and random bytes, and nothing
  derived from a secret.
* *A man in the middle* ends one TLS connection with C and begins another with S, under
  another certificate.  The fingerprint is in both transcripts, so no proof or signature
  of one end is valid at the other.
* *A replay*: S's challenge is fresh, and so is C's nonce.
* *A downgrade*: an end that knows that the other is a Shoal node accepts nothing else.
  Otherwise both ends' challenges have a mark, by which v1 and v2 are refused between
  Shoal nodes; see ``handshake``.

Limits: a token that can be guessed can be guessed offline by a server that C dials,
since it receives a hint and a proof.  Tokens are drawn at random unless an operator
chooses one, and invitations name the certificate, which is checked first.  Secrecy,
forward secrecy included, is that of TLS.  In an open fleet there is nothing to prove;
there, and without TLS, only the signatures identify a peer.
"""

import hmac
import struct
from collections.abc import Mapping
from enum import Enum
from hashlib import sha256
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Flag, Frame
from shoal.protocols.macfleet.codec.hardware import HARDWARE_MAX
from shoal.protocols.macfleet.codec.keys import DEFAULT_FLEET
from shoal.protocols.macfleet.handshake import MESSAGE_MAX, HandshakeSettings
from shoal.protocols.macfleet.handshake_messages import control_frame
from shoal.protocols.seam.admission import TOKEN_HINT_SIZE, token_hint

LABEL = b"shoal macfleet strong v1\n"
_KEY_LABEL = b"shoal macfleet strong key v1\n"
_SIGNED_LABEL = b"shoal macfleet strong identity v1\n"
_BODY = b"body\n"
_SIZE = struct.Struct("!H")
_FRAME = struct.Struct("!HIIII")  # type, stream, flags, sequence, size of the payload


class HandshakeRole(Enum):
    """The end that made a proof or signature."""

    CLIENT = b"client\n"
    SERVER = b"server\n"


class Transcript:
    """A hash of all messages of a handshake so far."""

    def __init__(self, certificate: bytes) -> None:
        self._hash = sha256(LABEL + _SIZE.pack(len(certificate)) + certificate)

    def add(self, frame: Frame) -> None:
        """Add a message of either end."""
        kind, stream, flags, sequence, payload, _ = frame
        self._hash.update(_FRAME.pack(kind, stream, flags, sequence, len(payload)))
        self._hash.update(payload)

    def digest_with(self, body: bytes) -> bytes:
        """Return the transcript of the sealed message with this body: 32 bytes."""
        last = self._hash.copy()
        last.update(_BODY + _SIZE.pack(len(body)) + body)
        return last.digest()


def token_proof(digest: bytes, role: HandshakeRole, transcript_hash: bytes) -> bytes:
    """Return the proof of a token over a transcript: 32 bytes."""
    key = hmac.digest(digest, _KEY_LABEL, "sha256")
    return hmac.digest(key, role.value + transcript_hash, "sha256")


def is_token_proof(
    proof: bytes, digest: bytes, role: HandshakeRole, transcript_hash: bytes
) -> bool:
    """Say whether a proof was made with the token of this digest."""
    return hmac.compare_digest(token_proof(digest, role, transcript_hash), proof)


def message_to_sign(role: HandshakeRole, transcript_hash: bytes) -> bytes:
    """Return the message that the identity key signs."""
    return _SIGNED_LABEL + role.value + transcript_hash


VERSION = 1
NONCE_SIZE = 32  # bytes
PROOF_SIZE = 32  # bytes
PUBLIC_KEY_SIZE = 32  # bytes
SIGNATURE_SIZE = 64  # bytes
FLEET_TAG_SIZE = 8  # bytes
FEATURES_MAX = 32
FEATURE_MAX = 32  # characters
REFUSAL_MAX = 500  # characters


Feature = Annotated[str, msgspec.Meta(max_length=FEATURE_MAX)]


class SealedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both bodies; unknown fields are ignored, for newer peers.

    ``key`` is the Ed25519 public key of the signature; empty without one.
    """

    version: Annotated[int, msgspec.Meta(ge=1)] = VERSION
    key: Annotated[bytes, msgspec.Meta(max_length=PUBLIC_KEY_SIZE)] = b""
    profile: Annotated[bytes, msgspec.Meta(max_length=HARDWARE_MAX)] = b"{}"
    features: Annotated[tuple[Feature, ...], msgspec.Meta(max_length=FEATURES_MAX)] = ()


class SealedIntroduction(SealedBody, frozen=True, kw_only=True):
    """The body of M3.  ``hint`` identifies the token that is proved; empty: none.

    ``fleet`` identifies the fleet (``fleet_tag``); empty: any.
    """

    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
    hint: Annotated[bytes, msgspec.Meta(max_length=TOKEN_HINT_SIZE)] = b""
    fleet: Annotated[bytes, msgspec.Meta(max_length=FLEET_TAG_SIZE)] = b""

    @property
    def proves(self) -> bool:
        """Whether a proof follows."""
        return bool(self.hint)


class SealedVerdict(SealedBody, frozen=True, kw_only=True):
    """The body of M4.  ``refusal`` says why C is refused; empty: it is admitted.

    ``later``: C may try again later.  ``proves``: a proof follows.
    """

    refusal: Annotated[str, msgspec.Meta(max_length=REFUSAL_MAX)] = ""
    later: bool = False
    proves: bool = False


Body = TypeVar("Body", SealedIntroduction, SealedVerdict)

_TITLES: Mapping[type, str] = {
    SealedIntroduction: "introduction",
    SealedVerdict: "verdict",
}


class SealedProofs(NamedTuple):
    """The unverified proof and signature that came with a body.

    ``transcript`` is the transcript that they must cover.
    """

    transcript: bytes
    proof: bytes
    signature: bytes

    def proves_token(self, digest: bytes, role: HandshakeRole) -> bool:
        """Say whether the proof was made with the token of a digest."""
        return is_token_proof(self.proof, digest, role, self.transcript)

    def is_signed_by(
        self, settings: HandshakeSettings, key: bytes, role: HandshakeRole
    ) -> bool:
        """Say whether the signature is valid; True if this node cannot verify."""
        message = message_to_sign(role, self.transcript)
        return settings.verifies is None or settings.verifies(
            key, self.signature, message
        )


def introduce(settings: HandshakeSettings) -> SealedIntroduction:
    """Return the client's introduction."""
    return SealedIntroduction(
        nonce=settings.random_bytes(NONCE_SIZE),
        hint=token_hint(settings.digest) if settings.digest else b"",
        fleet=fleet_tag(settings),
        key=_public_key(settings),
        profile=settings.profile,
        features=tuple(sorted(settings.features)),
    )


def decide(
    settings: HandshakeSettings,
    refusal: str = "",
    *,
    later: bool = False,
    proves: bool = False,
) -> SealedVerdict:
    """Return the server's verdict."""
    return SealedVerdict(
        refusal=refusal[:REFUSAL_MAX],
        later=later,
        proves=proves,
        key=_public_key(settings),
        profile=settings.profile,
        features=tuple(sorted(settings.features)),
    )


def fleet_tag(settings: HandshakeSettings) -> bytes:
    """Return the tag that tells apart fleets with the same token.

    Empty if this node has a join token only.
    """
    if settings.key is None:
        return b""
    return sha256((settings.fleet or DEFAULT_FLEET).encode()).digest()[:FLEET_TAG_SIZE]


def seal(
    contents: SealedIntroduction | SealedVerdict,
    settings: HandshakeSettings,
    role: HandshakeRole,
    transcript: Transcript,
    digest: bytes,
) -> bytes:
    """Encode a sealed message; ``digest`` is that of the token it proves."""
    body = msgspec.msgpack.encode(contents)
    transcript_hash = transcript.digest_with(body)
    sealed = _SIZE.pack(len(body)) + body
    if contents.proves:
        sealed += token_proof(digest, role, transcript_hash)
    if settings.identity is not None:
        sealed += settings.identity.sign(message_to_sign(role, transcript_hash))
    assert len(sealed) <= MESSAGE_MAX, "every field has a limit"
    return sealed


def unseal(
    frame: Frame, body_type: type[Body], transcript: Transcript
) -> tuple[Body, SealedProofs]:
    """Split a sealed message, which follows the frames in the transcript.

    Raises PeerError if it is malformed.  The caller verifies proof and signature.
    """
    payload = bytes(frame.payload)
    # Its own transcript does not cover the frame's header, so it must be exact.
    if frame._replace(payload=b"") != control_frame(b"", Flag.STRONG):
        raise PeerError(f"expected a sealed message, found {frame.type.name}")
    if len(payload) < _SIZE.size:
        raise PeerError(f"a sealed message of {len(payload)} bytes")
    (size,) = _SIZE.unpack_from(payload)
    body, rest = payload[_SIZE.size :][:size], payload[_SIZE.size + size :]
    try:
        contents = msgspec.msgpack.decode(body, type=body_type)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PeerError(f"{_TITLES[body_type]}: {error}") from error
    if len(contents.key) not in (0, PUBLIC_KEY_SIZE):
        raise PeerError(
            f"an Ed25519 key of {len(contents.key)} bytes, expected {PUBLIC_KEY_SIZE}"
        )
    proof = PROOF_SIZE if contents.proves else 0
    if len(rest) != proof + (SIGNATURE_SIZE if contents.key else 0):
        raise PeerError(
            f"{len(rest)} bytes follow the {_TITLES[body_type]}, which do not match "
            "the proof and the signature that it announces"
        )
    return contents, SealedProofs(
        transcript.digest_with(body), rest[:proof], rest[proof:]
    )


def _public_key(settings: HandshakeSettings) -> bytes:
    return b"" if settings.identity is None else settings.identity.public_key
