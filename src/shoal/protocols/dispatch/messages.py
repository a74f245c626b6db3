"""The wire's small messages, and error replies to invalid ones.

Source: the WebSocket protocol document, and what real workers send; see
``docs/protocols/dispatch.md``.  Jobs are in ``jobs.py``, answers in ``answers.py``.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Event
from shoal.protocols.dispatch.ecmascript_json import (
    NotJson,
    parse,
    stringify,
    to_json,
    to_string,
    with_lone_surrogates_replaced,
)
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.seam.session import Data

MESSAGE_MAX = 32 << 20  # bytes of a message: fits an escaped job of 10 MB
JOB_ID_MAX = 256  # characters
DISMISSED = 4000  # Shoal's close code: the worker is not to reconnect
REPLACED_TEXT = "Replaced"  # its text if a newer connection has replaced this one
METRICS_MAX = 4 << 10  # bytes of a heartbeat's metrics that are read
REASON_MAX = 1000  # characters of an error or reason that are kept
CAPABILITIES_MAX = 64  # unknown ones are ignored, for newer workers
QUOTED_MAX = 100  # characters of an unknown value that an error quotes

JobIdText: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=JOB_ID_MAX)]
KeyText: TypeAlias = Annotated[  # the pattern alone allows a final line feed
    str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$", max_length=64)
]

_Percent: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Count: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
_Short: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class DispatchErrorCode(StrEnum):
    """Machine-readable error codes.  Original peers know the first two."""

    PARSE_ERROR = "PARSE_ERROR"
    UNKNOWN_MSG = "UNKNOWN_MSG"
    INVALID_MESSAGE = "INVALID_MESSAGE"
    NOT_REGISTERED = "NOT_REGISTERED"
    NOT_YOUR_JOB = "NOT_YOUR_JOB"
    REPLACED = "REPLACED"
    DISMISSED = "DISMISSED"


class ProviderType(StrEnum):
    """The device kind of a worker."""

    DESKTOP = "DESKTOP"
    SEEKER = "SEEKER"


class JobType(StrEnum):
    """The kind of a job."""

    LLM_INFER = "LLM_INFER"
    TASK = "TASK"


# From a worker.  Fields of any type stay raw, because some of them are signed.


class RegisterProvider(msgspec.Struct, frozen=True, tag="register"):
    provider_pubkey: KeyText
    provider_type: ProviderType
    capabilities: Annotated[list[_Short], msgspec.Meta(max_length=CAPABILITIES_MAX)]
    pricing_hint: Any = UNSET


class MachineMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    cpu_pct: _Percent | None = None
    mem_pct: _Percent | None = None
    active_jobs: _Count | None = None


class ProviderHeartbeat(
    msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat"
):
    provider_pubkey: KeyText
    metrics: Raw | UnsetType = UNSET


class JobComplete(msgspec.Struct, frozen=True, tag="job_complete"):
    job_id: JobIdText
    output: Raw | UnsetType = UNSET
    output_hash: Raw | UnsetType = UNSET
    receipt: Raw | UnsetType = UNSET
    receipt_signature: Raw | UnsetType = UNSET


class JobReject(msgspec.Struct, frozen=True, tag="job_reject"):
    job_id: JobIdText
    reason: Any = None


class ReceiptSubmit(msgspec.Struct, frozen=True, tag="receipt_submit"):
    receipt: Raw
    signature: str


FromWorker: TypeAlias = (
    RegisterProvider | ProviderHeartbeat | JobComplete | JobReject | ReceiptSubmit
)

# From a coordinator.


class RegisterProviderAck(msgspec.Struct, frozen=True, tag="register_ack"):
    status: str
    worker_id: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ProviderHeartbeatAck(msgspec.Struct, frozen=True, tag="heartbeat_ack"):
    status: Annotated[
        str, Unread("the document has one status; only that it arrives counts")
    ] = "ok"


class ErrorMessage(msgspec.Struct, frozen=True, tag="error"):
    code: str
    message: str


class CoordinatorMessage(msgspec.Struct, frozen=True):
    """Any message of a coordinator as a worker decodes it; fields have any type."""

    type: Any = None
    status: Any = None
    error: Any = None
    code: Any = None
    message: Any = None
    job_id: Any = None
    worker_id: Any = None


class InvalidMessage(PeerError):
    """A worker's message that is answered with an error, and counts against it.

    ``about`` is the type of the message, if it is known, and ``event`` what the message
    is all the same.
    """

    def __init__(
        self,
        code: DispatchErrorCode,
        text: str,
        about: str = "",
        event: Event | None = None,
    ) -> None:
        super().__init__(text)
        self.code, self.about, self.event = code, about, event


def decode(data: Data) -> FromWorker:
    """Decode a worker's message.  Raises InvalidMessage.

    Text and binary frames are equivalent, as in the original.
    """
    try:
        message: FromWorker = _messages.decode(
            data if isinstance(data, str) else data.decode()
        )
    except UnicodeDecodeError as error:
        raise _not_json() from error
    except (msgspec.DecodeError, RecursionError) as error:
        return _decode_slowly(data, error)
    return message


_METRICS: Mapping[str, msgspec.json.Decoder[float | None]] = {
    "cpu_pct": msgspec.json.Decoder(_Percent | None),
    "mem_pct": msgspec.json.Decoder(_Percent | None),
    "active_jobs": msgspec.json.Decoder(_Count | None),
}
_RAW = ("metrics", "output", "output_hash", "receipt", "receipt_signature")
_UNDEFINED: Any = object()
_messages = msgspec.json.Decoder(FromWorker)
_objects = msgspec.json.Decoder(dict[str, Raw])
_coordinator_messages = msgspec.json.Decoder(CoordinatorMessage)
_known = frozenset(str(each.__struct_config__.tag) for each in get_args(FromWorker))


def _decode_slowly(data: Data, error: Exception) -> FromWorker:
    """Find the error, or decode a message that has lone surrogates."""
    try:
        value = parse(data)
    except NotJson as fault:
        raise _not_json() from fault
    except PeerError as limit:
        raise _invalid(str(limit)) from limit
    if value is None:
        # It crashes the original coordinator.
        raise _invalid("expected an object, got null")
    kind = value.get("type", _UNDEFINED) if isinstance(value, dict) else _UNDEFINED
    if not isinstance(kind, str) or kind not in _known:
        shown = "undefined" if kind is _UNDEFINED else to_string(kind)
        text = f"Unknown type: {shown[:QUOTED_MAX]}"  # as in the original
        raise InvalidMessage(DispatchErrorCode.UNKNOWN_MSG, text)
    if isinstance(error, msgspec.ValidationError):
        raise _invalid(f"{kind}: {error}", kind)
    raw = {name: Raw(stringify(value.pop(name))) for name in _RAW if name in value}
    try:
        message: FromWorker = msgspec.convert(
            with_lone_surrogates_replaced(value) | raw, FromWorker
        )
    except msgspec.ValidationError as fault:
        raise _invalid(f"{kind}: {fault}", kind) from fault
    return message


def _not_json() -> InvalidMessage:
    return InvalidMessage(DispatchErrorCode.PARSE_ERROR, "Invalid JSON")


def _invalid(text: str, about: str = "") -> InvalidMessage:
    return InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, text[:REASON_MAX], about)


def read_metrics(heartbeat: ProviderHeartbeat) -> tuple[MachineMetrics, list[str]]:
    """Return the metrics of a heartbeat, and the names of those that are unusable.

    An unusable one counts as not measured: the heartbeat is a sign of life all the
    same, and a sum of all processors' percentages is easily above 100.
    """
    if isinstance(heartbeat.metrics, UnsetType):
        return MachineMetrics(), []
    if len(heartbeat.metrics) > METRICS_MAX:
        return MachineMetrics(), ["metrics"]
    try:
        given = _objects.decode(heartbeat.metrics)
    except (msgspec.DecodeError, RecursionError):
        return MachineMetrics(), ["metrics"]
    usable: dict[str, float | None] = {}
    unusable = []
    for name, decoder in _METRICS.items():
        try:
            usable[name] = decoder.decode(given.get(name, b"null"))
        except (msgspec.DecodeError, RecursionError):
            unusable.append(f"metrics.{name}")
    return MachineMetrics(**usable), unusable


def decode_coordinator_message(data: Data) -> tuple[CoordinatorMessage, str]:
    """Decode a coordinator's message; return it and its text.

    Lone surrogates, which original coordinators pass on, become U+FFFD.

    Raises PeerError if it is not an object.
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
