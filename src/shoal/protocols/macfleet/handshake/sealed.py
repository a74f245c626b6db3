"""The two sealed messages of the strong handshake: what they say, and their bytes.

See ``strong`` for what the proofs and signatures in them are about.
"""

import struct
from hashlib import sha256
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.messages import control
from shoal.protocols.macfleet.handshake.steps import MESSAGE_MAX, Own
from shoal.protocols.macfleet.handshake.strong import (
    Role,
    Transcript,
    is_proof,
    proof_of,
    to_be_signed,
)
from shoal.protocols.macfleet.wire.frames import Flag, Frame
from shoal.protocols.macfleet.wire.hardware import HARDWARE_MAX
from shoal.protocols.macfleet.wire.keys import DEFAULT_FLEET
from shoal.protocols.session import HINT_SIZE, hint_of

VERSION = 1
NONCE = 32  # bytes
PROOF = 32  # bytes
KEY = 32  # bytes
SIGNATURE = 64  # bytes
FLEET = 8  # bytes
FEATURES_MAX = 32
FEATURE_MAX = 32  # characters
REFUSAL_MAX = 500  # characters

_SIZE = struct.Struct("!H")

Feature = Annotated[str, msgspec.Meta(max_length=FEATURE_MAX)]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What both say of themselves; other fields are for newer peers.

    ``key`` is the Ed25519 key that signs, and empty if none does.
    """

    version: Annotated[int, msgspec.Meta(ge=1)] = VERSION
    key: Annotated[bytes, msgspec.Meta(max_length=KEY)] = b""
    profile: Annotated[bytes, msgspec.Meta(max_length=HARDWARE_MAX)] = b"{}"
    features: Annotated[tuple[Feature, ...], msgspec.Meta(max_length=FEATURES_MAX)] = ()


class Introduction(Said, frozen=True, kw_only=True):
    """The body of M3.  ``hint`` tells which token is proved; empty: none.

    ``fleet`` tells which fleet is meant (``fleet_of``); empty: any.
    """

    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE, max_length=NONCE)]
    hint: Annotated[bytes, msgspec.Meta(max_length=HINT_SIZE)] = b""
    fleet: Annotated[bytes, msgspec.Meta(max_length=FLEET)] = b""

    @property
    def proves(self) -> bool:
        """Whether a proof follows."""
        return bool(self.hint)


class Verdict(Said, frozen=True, kw_only=True):
    """The body of M4.  ``refusal`` says why C is not let in; empty: it is.

    ``later`` says that it may be another time.  ``proves``: a proof follows.
    """

    refusal: Annotated[str, msgspec.Meta(max_length=REFUSAL_MAX)] = ""
    later: bool = False
    proves: bool = False


Body = TypeVar("Body", Introduction, Verdict)


class Sealed(NamedTuple):
    """What came with a body, of which nothing is believed yet.

    ``seen`` is the transcript that it should be about.
    """

    seen: bytes
    proof: bytes
    signature: bytes

    def proves(self, digest: bytes, role: Role) -> bool:
        """Say whether it proves the token of a digest."""
        return is_proof(self.proof, digest, role, self.seen)

    def signed(self, own: Own, key: bytes, role: Role) -> bool:
        """Say whether the owner of a key signed it, as far as we can tell."""
        message = to_be_signed(role, self.seen)
        return own.verifies is None or own.verifies(key, self.signature, message)


def introduction(own: Own) -> Introduction:
    """Return what we say of ourselves where we dialled."""
    return Introduction(
        nonce=own.draw(NONCE),
        hint=hint_of(own.digest) if own.digest else b"",
        fleet=fleet_of(own),
        key=_key_of(own),
        profile=own.profile,
        features=tuple(sorted(own.features)),
    )


def verdict(
    own: Own, refusal: str = "", *, later: bool = False, proves: bool = False
) -> Verdict:
    """Return what we say to whom we let in, or not."""
    return Verdict(
        refusal=refusal[:REFUSAL_MAX],
        later=later,
        proves=proves,
        key=_key_of(own),
        profile=own.profile,
        features=tuple(sorted(own.features)),
    )


def fleet_of(own: Own) -> bytes:
    """Return what tells our fleet from others with the same token.

    Empty if we have none, as who joins by a token.
    """
    if own.key is None:
        return b""
    return sha256((own.fleet or DEFAULT_FLEET).encode()).digest()[:FLEET]


def seal(
    said: Introduction | Verdict,
    own: Own,
    role: Role,
    transcript: Transcript,
    digest: bytes,
) -> bytes:
    """Write a sealed message; ``digest`` is that of the token that it proves."""
    body = msgspec.msgpack.encode(said)
    seen = transcript.of(body)
    sealed = _SIZE.pack(len(body)) + body
    if said.proves:
        sealed += proof_of(digest, role, seen)
    if own.identity is not None:
        sealed += own.identity.sign(to_be_signed(role, seen))
    assert len(sealed) <= MESSAGE_MAX, "what we say of ourselves is bounded"
    return sealed


def unseal(
    frame: Frame, type_: type[Body], transcript: Transcript
) -> tuple[Body, Sealed]:
    """Take a sealed message apart, which comes after what the transcript has.

    Raises PeerError if it is none; whether it is genuine is still to be seen.
    """
    payload = bytes(frame.payload)
    # No transcript that its own seal is about has the frame's head.
    if frame._replace(payload=b"") != control(b"", Flag.STRONG):
        raise PeerError(f"expected a sealed message, found {frame.type.name}")
    if len(payload) < _SIZE.size:
        raise PeerError(f"a sealed message of {len(payload)} bytes")
    (size,) = _SIZE.unpack_from(payload)
    body, rest = payload[_SIZE.size :][:size], payload[_SIZE.size + size :]
    try:
        said = msgspec.msgpack.decode(body, type=type_)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PeerError(f"{type_.__name__.lower()}: {error}") from error
    if len(said.key) not in (0, KEY):
        raise PeerError(f"an Ed25519 key of {len(said.key)} bytes, expected {KEY}")
    proof = PROOF if said.proves else 0
    if len(rest) != proof + (SIGNATURE if said.key else 0):
        raise PeerError(
            f"{len(rest)} bytes follow the {type_.__name__.lower()}, which are not the "
            "proof and the signature that it speaks of"
        )
    return said, Sealed(transcript.of(body), rest[:proof], rest[proof:])


def _key_of(own: Own) -> bytes:
    return b"" if own.identity is None else own.identity.public_key
