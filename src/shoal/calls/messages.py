"""What is said on ``/v1/calls``: items in MessagePack, many to a message.

Each item is an array that begins with its kind and with the number that the client gave
the call (docs/tasks.md).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw

from shoal.domain.errors import (
    Cancelled,
    CannotDo,
    ClientError,
    InvalidRequest,
    JobError,
    NotFound,
    QueueFull,
    RateLimited,
    ShoalError,
    TimedOut,
    TooLarge,
    Unavailable,
    UnknownTask,
    WorkerLost,
)
from shoal.domain.vocabulary import CallResult

NUMBER_MAX = 2**53 - 1  # that every client can count to
NAME_MAX = 256  # characters of a function's name
BLOBS_MAX = 1024  # values of one call that travel apart
KEY_MAX = 255  # characters of an idempotency key, as over HTTP
SECONDS_MAX = 86_400.0  # that a call may wait, or run

Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class CallRequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a call is to be made; ``queue`` is for how many seconds it may wait.

    ``fresh`` vouches that nobody has asked under the ``key`` before, so that nobody has
    to look.
    """

    timeout: Seconds | None = None
    needs: Annotated[tuple[str, ...], Meta(max_length=8)] = ()
    blobs: Annotated[tuple[Digest, ...], Meta(max_length=BLOBS_MAX)] = ()
    key: Annotated[str, Meta(max_length=KEY_MAX)] = ""
    priority: str = "normal"
    kept: bool = True
    queue: Seconds | None = None
    progress: bool = False
    fresh: bool = False


DEFAULT_OPTIONS = CallRequestOptions()


class CallRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Call a function; ``args`` and ``kwargs`` are as in ``Call``."""

    number: Number
    name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    args: bytes
    kwargs: bytes
    options: CallRequestOptions = DEFAULT_OPTIONS


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Do not make this call, or stop in the middle."""

    number: Number


CallItem: TypeAlias = CallRequest | CancelCall

ACCEPTED, DONE, FAILED, PROGRESS, STARTED = 1, 2, 3, 4, 5
"""The kinds of items that the client is told."""

ReplyItem: TypeAlias = Sequence[object]
"""One of those: its kind, the number of the call, and the rest."""


class InvalidItem(msgspec.Struct, frozen=True):
    """An item that makes no sense, with its number where that does."""

    number: int
    error: InvalidRequest


_items = msgspec.msgpack.Decoder(list[CallItem])
_raws = msgspec.msgpack.Decoder(list[Raw])
_item: msgspec.msgpack.Decoder[CallItem] = msgspec.msgpack.Decoder(CallItem)
_any = msgspec.msgpack.Decoder(list[object])
ERROR_KINDS: Mapping[type[ShoalError], str] = {
    JobError: "raised",
    Cancelled: "cancelled",
    TimedOut: "timeout",
    WorkerLost: "lost",
    UnknownTask: "unknown",
    NotFound: "lacks",
    TooLarge: "too_large",
    QueueFull: "busy",
    RateLimited: "busy",
    Unavailable: "unavailable",
    ClientError: "invalid",
    ShoalError: "unavailable",
}
"""What clients are told of a kind of error, in a word."""

REQUIREMENT_FIELDS = frozenset({"code", "values"})
"""What no worker can do, where that is a word of its own."""

TIMED_OUT = "Task timed out after "
"""How a worker's error begins where a function ran for too long."""


def decode_items(data: bytes) -> Sequence[CallItem | InvalidItem]:
    """Read a message.  Raises InvalidRequest if it is no array of numbered items."""
    try:
        return _items.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass  # found out below, item by item, for the others may be good
    try:
        return [_decode_item(raw) for raw in _raws.decode(data)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the message is no array of items: {error}") from error


def _decode_item(raw: Raw) -> CallItem | InvalidItem:
    try:
        return _item.decode(raw)
    except msgspec.ValidationError as error:
        try:
            parts = _any.decode(raw)
        except msgspec.ValidationError:
            parts = []
        if len(parts) > 1 and isinstance(parts[1], int):
            return InvalidItem(parts[1], InvalidRequest(str(error)))
        raise InvalidRequest(f"an item without a number: {error}") from error


def error_kind(error: ShoalError) -> str:
    """Say in a word what a client's call came to."""
    if isinstance(error, CannotDo) and error.field in REQUIREMENT_FIELDS:
        return error.field or ""
    if isinstance(error, JobError) and str(error).startswith(TIMED_OUT):
        return ERROR_KINDS[TimedOut]
    return next(
        ERROR_KINDS[each] for each in type(error).__mro__ if each in ERROR_KINDS
    )


def return_item(lane_return: CallResult) -> ReplyItem:
    """Return what is said of a call that came back from a lane."""
    number, value, error = lane_return
    if not error:
        return DONE, number, value, {}
    kind = (
        ERROR_KINDS[TimedOut] if error.startswith(TIMED_OUT) else ERROR_KINDS[JobError]
    )
    return FAILED, number, kind, error, {}


def failure_item(
    number: int, error: ShoalError, meta: Mapping[str, object]
) -> ReplyItem:
    """Return what is said of a call that came to nothing."""
    return FAILED, number, error_kind(error), str(error), meta
