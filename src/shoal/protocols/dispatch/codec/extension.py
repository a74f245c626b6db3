"""What both ends of our own kind say of themselves, where original peers do not look.

A worker announces the extension by a header of its upgrade request, and the
coordinator by the same header of its answer, which also holds a challenge.  Only then
``register`` has a field of ours, with the proof of the worker's key.
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

HEADER = "Shoal-Dispatch"
VERSION = 1
CHALLENGE_SIZE = 32  # bytes
KEY_SIZE = 32  # bytes
NAME_MAX = 256  # characters of a model
SLOTS_MAX = 1024  # jobs at a time that we believe a worker to run
NAMES_MAX = 256  # tasks or keys that a worker may name
CONTEXT_MAX = 2**31 - 1  # tokens

PROOF = b"shoal dispatch proof v1\n"
"""What a proof begins with, so that no other signature is taken for one."""

_HEX_KEY = re.compile("[0-9a-fA-F]{64}")

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
_Names: TypeAlias = Annotated[list[_Name], msgspec.Meta(max_length=NAMES_MAX)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True)
class CoordinatorAnnouncement:
    """What a peer's header says; without ``known`` it is none of ours, or other."""

    known: bool = False
    key: bytes = b""
    model: str = ""
    challenge: bytes = b""


class WorkerPresentation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Our field in ``register``: the proof, and what the worker can do.

    A program that only proves its key leaves out all but ``proof``.  With ``version``
    it speaks the messages of the extension, and tells the rest.
    """

    proof: Annotated[str, msgspec.Meta(max_length=128)]
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    slots: Annotated[int, msgspec.Meta(ge=0)] = 1
    kinds: _Names = []
    features: _Names = []
    context: _Tokens = 0
    tasks: _Names = []
    only_for: _Names = []


class AttemptExtension(msgspec.Struct, frozen=True):
    """Our field in ``job_reject``: which attempt is meant, and whether it was run."""

    lease: Lease = 0
    failed: bool = False
    fault: str = ""


class TokenCounts(msgspec.Struct, frozen=True):
    """Usage, on the wire."""

    prompt_tokens: _Tokens
    completion_tokens: _Tokens


class CompletionExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Our field in ``job_complete``: how the answer ended."""

    lease: Lease = 0
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] = "stop"
    usage: TokenCounts | None = None
    logprobs: list[Any] = []  # of each choice, for they are too many to be signed


def read_header(value: str) -> CoordinatorAnnouncement:
    """Read the value of the header; what is not understood counts as not said."""
    version, *entries = (entry.strip() for entry in value.split(","))
    if not (version.isascii() and version.isdigit()) or int(version[:9]) < VERSION:
        return CoordinatorAnnouncement()
    given = {
        name.lower(): said for name, _, said in (e.partition("=") for e in entries)
    }
    return CoordinatorAnnouncement(
        True,
        key_of(given.get("key", "")),
        unquote(given.get("model", "")),
        _decode_base64(given.get("challenge", "")),
    )


def write_header(settings: Mapping[str, str]) -> str:
    """Return the value that announces the extension."""
    entries = [
        f"{name}={quote(said, safe='+/=', errors='replace')}"
        for name, said in settings.items()
    ]
    return ", ".join([str(VERSION), *entries])


def key_of(text: str) -> bytes:
    """Return a public key from its 64 hexadecimal digits; of anything else, nothing."""
    return bytes.fromhex(text) if _HEX_KEY.fullmatch(text) else b""


def proof_message(challenge: bytes, coordinator: bytes, worker: bytes) -> bytes:
    """Return what a worker signs to prove its key, to this coordinator and no other."""
    return PROOF + challenge + coordinator + worker


def read_presentation(raw: bytes) -> WorkerPresentation:
    """Read our field in ``register``.  Raises PeerError saying what is wrong."""
    try:
        return _presentations.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"register: shoal: {error}") from error


def read_attempt(raw: bytes) -> AttemptExtension:
    """Read which attempt is meant; what cannot be read names none."""
    try:
        return _attempts.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return AttemptExtension()


def present(member: WorkerProfile, proof: bytes) -> WorkerPresentation:
    """Return what a worker says of itself beside the original's fields."""
    model = member.model
    return WorkerPresentation(
        base64.b64encode(proof).decode(),
        VERSION,
        member.slots,
        sorted(kind.value for kind in kinds_of(member)),
        sorted(feature.value for feature in model.features),
        model.context,
        sorted(member.tasks)[:NAMES_MAX],
        sorted(member.only_for)[:NAMES_MAX],
    )


def kinds_of(member: WorkerProfile) -> frozenset[JobKind]:
    """Return what a worker does: tasks only if it names some."""
    kinds = member.model.kinds - {JobKind.TASK}
    return kinds | {JobKind.TASK} if member.tasks else kinds


def known_kinds(names: list[str]) -> frozenset[JobKind]:
    """Return the kinds of work among ``names``; newer workers may say more."""
    return frozenset(kind for kind in JobKind if kind.value in names)


def known_features(names: list[str]) -> frozenset[Feature]:
    """Return the features among ``names``."""
    return frozenset(feature for feature in Feature if feature.value in names)


_presentations = msgspec.json.Decoder(WorkerPresentation)
_attempts = msgspec.json.Decoder(AttemptExtension)


def _decode_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return b""
