"""Shoal's extension of Dispatch, in headers and fields that original peers ignore.

A worker announces the extension with a header of its upgrade request, and the
coordinator with the same header of its response, which also carries a challenge.  Only
then the worker's ``register`` has the extension field, with the proof of its key.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote, unquote

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.work import Feature, JobKind
from shoal.protocols.dispatch.codec.messages import Lease
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.document_fields import Unread

HEADER = "Shoal-Dispatch"
VERSION = 1
CHALLENGE_SIZE = 32  # bytes
KEY_SIZE = 32  # bytes
NAME_MAX = 256  # characters of a model name
SLOTS_MAX = 1024  # most concurrent jobs accepted from a worker's offer
NAMES_MAX = 256  # most tasks, and most keys, that a worker may list
CONTEXT_MAX = 2**31 - 1  # tokens

PROOF = b"shoal dispatch proof v1\n"
"""Prefix of the signed message: keeps proofs distinct from other signatures."""

_HEX_KEY = re.compile("[0-9a-fA-F]{64}")

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
_Names: TypeAlias = Annotated[list[_Name], msgspec.Meta(max_length=NAMES_MAX)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True)
class CoordinatorAnnouncement:
    """Content of a peer's header; ``known`` if the peer supports the extension."""

    known: bool = False
    key: bytes = b""
    model: str = ""
    challenge: bytes = b""


class WorkerPresentation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Extension field of ``register``: the proof, and what the worker supports.

    A program that only proves its key sends ``proof`` alone.  One that sends
    ``version`` uses the messages of the extension, and fills the other fields.
    """

    proof: Annotated[str, msgspec.Meta(max_length=128)]
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    slots: Annotated[int, msgspec.Meta(ge=0)] = 1
    kinds: _Names = []
    features: _Names = []
    context: _Tokens = 0
    tasks: _Names = []
    only_for: _Names = []
    privacy: _Name = ""
    engine: _Name = ""  # as in ``Offer``


class AttemptExtension(msgspec.Struct, frozen=True):
    """Extension field of ``job_reject``: the attempt, and whether it ran and failed."""

    lease: Lease = 0
    failed: bool = False
    fault: str = ""


class TokenCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token usage on the wire, as in ``Usage``."""

    prompt_tokens: _Tokens
    completion_tokens: _Tokens
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class CompletionExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Extension field of ``job_complete``: how the answer ended."""

    lease: Annotated[
        Lease, Unread("`AttemptExtension` decodes the same field, and reads it")
    ] = 0
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] = "stop"
    usage: TokenCounts | None = None
    logprobs: list[Any] = []  # of each choice; too many values to sign


def read_header(value: str) -> CoordinatorAnnouncement:
    """Parse the value of the header; ignore what is unknown or invalid."""
    version, *entries = (entry.strip() for entry in value.split(","))
    if not (version.isascii() and version.isdigit()) or int(version[:9]) < VERSION:
        return CoordinatorAnnouncement()
    settings = {
        name.lower(): value
        for name, _, value in (entry.partition("=") for entry in entries)
    }
    return CoordinatorAnnouncement(
        True,
        key_of(settings.get("key", "")),
        unquote(settings.get("model", "")),
        _decode_base64(settings.get("challenge", "")),
    )


def write_header(settings: Mapping[str, str]) -> str:
    """Return the value that announces the extension."""
    entries = [
        f"{name}={quote(value, safe='+/=', errors='replace')}"
        for name, value in settings.items()
    ]
    return ", ".join([str(VERSION), *entries])


def key_of(text: str) -> bytes:
    """Parse a public key of 64 hexadecimal digits; return b"" for anything else."""
    return bytes.fromhex(text) if _HEX_KEY.fullmatch(text) else b""


def proof_message(challenge: bytes, coordinator: bytes, worker: bytes) -> bytes:
    """Return the message a worker signs to prove its key to this coordinator only."""
    return PROOF + challenge + coordinator + worker


def read_presentation(raw: bytes) -> WorkerPresentation:
    """Decode the extension field of ``register``.  Raises PeerError if invalid."""
    try:
        return _presentations.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"register: shoal: {error}") from error


def read_attempt(raw: bytes) -> AttemptExtension:
    """Decode which attempt is meant; an invalid field names none."""
    try:
        return _attempts.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return AttemptExtension()


def present(profile: WorkerProfile, proof: bytes) -> WorkerPresentation:
    """Return the extension field with which a worker registers."""
    model = profile.model
    return WorkerPresentation(
        base64.b64encode(proof).decode(),
        VERSION,
        profile.slots,
        sorted(kind.value for kind in kinds_of(profile)),
        sorted(feature.value for feature in model.features),
        model.context,
        sorted(profile.tasks)[:NAMES_MAX],
        sorted(profile.only_for)[:NAMES_MAX],
        "" if profile.privacy is None else profile.privacy.value,
        profile.engine,
    )


def kinds_of(profile: WorkerProfile) -> frozenset[JobKind]:
    """Return the job kinds a worker supports: tasks only if it lists some."""
    kinds = profile.model.kinds - {JobKind.TASK}
    return kinds | {JobKind.TASK} if profile.tasks else kinds


def known_kinds(names: list[str]) -> frozenset[JobKind]:
    """Return the known job kinds among ``names``; newer workers may list others."""
    return frozenset(kind for kind in JobKind if kind.value in names)


def known_features(names: list[str]) -> frozenset[Feature]:
    """Return the known features among ``names``."""
    return frozenset(feature for feature in Feature if feature.value in names)


_presentations = msgspec.json.Decoder(WorkerPresentation)
_attempts = msgspec.json.Decoder(AttemptExtension)


def _decode_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return b""
