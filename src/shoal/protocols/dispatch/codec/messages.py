"""The wire's small messages, and what is said of those that are no good.

Source: the WebSocket protocol document, and what real workers send; see
``docs/protocols/dispatch.md``.  Jobs are in ``jobs.py``, answers in ``answers.py``.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.protocols.dispatch.codec.ecmascript_json import (
    NotJson,
    parse,
    stringify,
    to_json,
    to_string,
    with_lone_surrogates_replaced,
)
from shoal.protocols.seam.session import Data

MESSAGE_MAX = 32 << 20  # bytes of a message: a job of 10 MB, escaped
JOB_ID_MAX = 256  # characters
REPLACED = 4000  # close code of ours: a newer connection has the worker's place
REASON_MAX = 1000  # characters of an error or reason that are kept
QUOTED_MAX = 100  # characters of something unknown that are repeated to who sent it

JobIdText: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=JOB_ID_MAX)]
KeyText: TypeAlias = Annotated[  # by the pattern alone, a line feed might follow
    str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$", max_length=64)
]
Lease: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""Which attempt at a job is meant; 0 where the peer does not say."""

_Percent: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Count: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
_Short: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class DispatchErrorCode(StrEnum):
    """What is wrong, for programs.  The original knows the first two."""

    PARSE_ERROR = "PARSE_ERROR"
    UNKNOWN_MSG = "UNKNOWN_MSG"
    INVALID_MESSAGE = "INVALID_MESSAGE"
    NOT_REGISTERED = "NOT_REGISTERED"
    NOT_YOUR_JOB = "NOT_YOUR_JOB"
    REPLACED = "REPLACED"


class ProviderType(StrEnum):
    """What sort of machine a worker is."""

    DESKTOP = "DESKTOP"
    SEEKER = "SEEKER"


class JobType(StrEnum):
    """What a worker is asked to do."""

    LLM_INFER = "LLM_INFER"
    TASK = "TASK"


# From a worker.  What may be anything stays as it was sent: some of it is signed.


class RegisterProvider(msgspec.Struct, frozen=True, tag="register"):
    provider_pubkey: KeyText
    provider_type: ProviderType
    capabilities: Annotated[list[JobType], msgspec.Meta(max_length=16)]
    pricing_hint: _Short | UnsetType | None = UNSET
    shoal: Raw | UnsetType = UNSET


class MachineMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    cpu_pct: _Percent | None = None
    mem_pct: _Percent | None = None
    active_jobs: _Count | None = None


class ProviderHeartbeat(
    msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat"
):
    provider_pubkey: KeyText
    metrics: MachineMetrics | None = None


class JobComplete(msgspec.Struct, frozen=True, tag="job_complete"):
    job_id: JobIdText
    output: Raw | UnsetType = UNSET
    output_hash: Raw | UnsetType = UNSET
    receipt: Raw | UnsetType = UNSET
    receipt_signature: Raw | UnsetType = UNSET
    shoal: Raw | UnsetType = UNSET


class JobReject(msgspec.Struct, frozen=True, tag="job_reject"):
    job_id: JobIdText
    reason: str
    shoal: Raw | UnsetType = UNSET


class ReceiptSubmit(msgspec.Struct, frozen=True, tag="receipt_submit"):
    receipt: Raw
    signature: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Ours: the worker finishes what it has and takes nothing new."""

    reason: str = ""


FromWorker: TypeAlias = (
    RegisterProvider
    | ProviderHeartbeat
    | JobComplete
    | JobReject
    | ReceiptSubmit
    | Drain
)

# From a coordinator.


class RegisterProviderAck(msgspec.Struct, frozen=True, tag="register_ack"):
    status: str
    worker_id: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ProviderHeartbeatAck(msgspec.Struct, frozen=True, tag="heartbeat_ack"):
    status: str = "ok"


class JobCancel(msgspec.Struct, frozen=True, tag="job_cancel"):
    """Ours: nobody waits for the job any more."""

    job_id: JobIdText
    lease: Lease = 0


class ErrorMessage(msgspec.Struct, frozen=True, tag="error"):
    code: str
    message: str


class CoordinatorMessage(msgspec.Struct, frozen=True):
    """Any message of a coordinator, as a worker reads it: it may be anything."""

    type: Any = None
    status: Any = None
    error: Any = None
    code: Any = None
    message: Any = None
    job_id: Any = None
    lease: Any = None


@dataclass(frozen=True, slots=True)
class InvalidMessage:
    """What is wrong with a message; ``about`` is its type, if that is known."""

    code: DispatchErrorCode
    text: str
    about: str = ""


def decode(data: Data) -> FromWorker | InvalidMessage:
    """Decode a worker's message, or say what is wrong with it.

    The original treats text and binary frames alike.
    """
    try:
        message: FromWorker = _messages.decode(
            data if isinstance(data, str) else data.decode()
        )
    except UnicodeDecodeError:
        return _NOT_JSON
    except (msgspec.DecodeError, RecursionError) as error:
        return _diagnose(data, error)
    return message


_RAW = ("output", "output_hash", "receipt", "receipt_signature", "shoal")
_UNDEFINED: Any = object()
_NOT_JSON = InvalidMessage(DispatchErrorCode.PARSE_ERROR, "Invalid JSON")
_messages = msgspec.json.Decoder(FromWorker)
_coordinator_messages = msgspec.json.Decoder(CoordinatorMessage)
_known = frozenset(
    str(each.__struct_config__.tag)
    for each in (
        RegisterProvider,
        ProviderHeartbeat,
        JobComplete,
        JobReject,
        ReceiptSubmit,
        Drain,
    )
)


def _diagnose(data: Data, error: Exception) -> FromWorker | InvalidMessage:
    """Find out slowly what is wrong, if anything is: half a character is not."""
    try:
        value = parse(data)
    except NotJson:
        return _NOT_JSON
    except PeerError as limit:
        return InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, str(limit))
    if value is None:
        # The original dies of it.
        return InvalidMessage(
            DispatchErrorCode.INVALID_MESSAGE, "expected an object, got null"
        )
    kind = value.get("type", _UNDEFINED) if isinstance(value, dict) else _UNDEFINED
    if not isinstance(kind, str) or kind not in _known:
        return unknown_type("undefined" if kind is _UNDEFINED else to_string(kind))
    if isinstance(error, msgspec.ValidationError):
        return _invalid(kind, error)
    raw = {name: Raw(stringify(value.pop(name))) for name in _RAW if name in value}
    try:
        message: FromWorker = msgspec.convert(
            with_lone_surrogates_replaced(value) | raw, FromWorker
        )
    except msgspec.ValidationError as fault:
        return _invalid(kind, fault)
    return message


def _invalid(kind: str, error: msgspec.ValidationError) -> InvalidMessage:
    return InvalidMessage(
        DispatchErrorCode.INVALID_MESSAGE, f"{kind}: {error}"[:REASON_MAX], kind
    )


def decode_coordinator_message(data: Data) -> tuple[CoordinatorMessage, str]:
    """Read a coordinator's message; return it and the text that it was.

    Half a character, which original coordinators pass on, becomes U+FFFD.

    Raises PeerError if it is no object.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        try:
            return _coordinator_messages.decode(text), text
        except msgspec.ValidationError as error:
            raise PeerError(f"expected an object: {error}") from error
        except (msgspec.DecodeError, RecursionError):
            text = to_json(with_lone_surrogates_replaced(parse(text)))
            return _coordinator_messages.decode(text), text
    except ValueError as error:
        raise PeerError("not JSON") from error


def unknown_type(kind: str) -> InvalidMessage:
    """Say, in the original's words, that there is no such type."""
    return InvalidMessage(
        DispatchErrorCode.UNKNOWN_MSG, f"Unknown type: {kind[:QUOTED_MAX]}"
    )
