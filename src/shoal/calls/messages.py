"""The messages of ``/v1/calls``, arrays of items in MessagePack, and their queue.

Each item is an array that begins with its kind and with the number that the client gave
the call (docs/protocols/calls.md).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw

from shoal.domain import errors
from shoal.domain.vocabulary import CallResult

INTEGER_MAX = 2**53 - 1  # the largest integer of JavaScript
NAME_MAX = 256  # characters of a function's name
BLOBS_MAX = 1024  # values of one call that are sent separately
KEY_MAX = 255  # characters of an idempotency key, as over HTTP
ITEMS_MAX = 1 << 17  # items of one message: twice the calls that may be open
PYTHON_MAX = 16  # characters of a version of Python
SECONDS_MAX = 86_400.0  # to wait, or to run

Number = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
UNSENT_MAX = 256 << 20  # estimated unread bytes at which the client is disconnected
ITEM_SIZE = 128  # estimated bytes of an item without its value


class GangOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call's membership of a gang; as in ``Gang``, which checks it."""

    id: str
    rank: int
    size: int
    least: int
    slots: int = 0


class CallRequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a call; ``queue`` is the number of seconds that it may wait.

    ``fresh`` promises that the ``key`` is unused, which saves a look-up.  ``python``
    and ``exact`` are as in ``Call``, ``wait`` is as ``JobTerms.waits``.
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
    python: Annotated[str, Meta(max_length=PYTHON_MAX)] = ""
    gang: GangOptions | None = None
    exact: bool = False
    wait: bool = False


DEFAULT_OPTIONS = CallRequestOptions()


class CallRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Call a function; ``args`` and ``kwargs`` are as in ``Call``."""

    number: Number
    name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    args: bytes
    kwargs: bytes
    options: CallRequestOptions = DEFAULT_OPTIONS


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Cancel a call, also while it runs."""

    number: Number


CallItem: TypeAlias = CallRequest | CancelCall

ACCEPTED, DONE, FAILED, PROGRESS, STARTED = 1, 2, 3, 4, 5
"""The kinds of items to the client."""

ReplyItem: TypeAlias = Sequence[object]
"""An item to the client: its kind, the number of the call, and the rest."""


class InvalidItem(msgspec.Struct, frozen=True):
    """An invalid item that has a valid number."""

    number: int
    error: errors.InvalidRequest


_items = msgspec.msgpack.Decoder(list[CallItem])
_raws = msgspec.msgpack.Decoder(list[Raw])
_item: msgspec.msgpack.Decoder[CallItem] = msgspec.msgpack.Decoder(CallItem)
_any = msgspec.msgpack.Decoder(list[object])
ERROR_KINDS: Mapping[type[errors.ShoalError], str] = {
    errors.JobError: "raised",
    errors.Cancelled: "cancelled",
    errors.TimedOut: "timeout",
    errors.WorkerLost: "lost",
    errors.UnknownTask: "unknown",
    errors.NotFound: "lacks",
    errors.TooLarge: "too_large",
    errors.QueueFull: "busy",
    errors.RateLimited: "busy",
    errors.Unavailable: "unavailable",
    errors.ClientError: "invalid",
    errors.ShoalError: "unavailable",
}
"""The code of each kind of error."""

REQUIREMENT_FIELDS = frozenset({"code", "values"})
"""Fields of ``CannotDo`` that are codes of their own."""

TIMED_OUT = "Task timed out after "
"""The start of a worker's error for a function that timed out."""


def decode_items(data: bytes) -> Sequence[CallItem | InvalidItem]:
    """Decode a message of at most ``ITEMS_MAX`` items.

    Raises InvalidRequest if it is not an array of items, or has more.
    """
    # An array of 32 bits, before its items are decoded: each takes a byte at least.
    if data[:1] == b"\xdd" and int.from_bytes(data[1:5]) > ITEMS_MAX:
        raise errors.InvalidRequest(f"more than {ITEMS_MAX} items in a message")
    try:
        return _items.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass  # decode item by item: the others may be valid
    try:
        return [_decode_item(raw) for raw in _raws.decode(data)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.InvalidRequest(
            f"the message is not an array of items: {error}"
        ) from error


def _decode_item(raw: Raw) -> CallItem | InvalidItem:
    try:
        return _item.decode(raw)
    except msgspec.ValidationError as error:
        try:
            parts = _any.decode(raw)
        except msgspec.ValidationError:
            parts = []
        if len(parts) > 1 and isinstance(parts[1], int):
            return InvalidItem(parts[1], errors.InvalidRequest(str(error)))
        raise errors.InvalidRequest(f"an item without a number: {error}") from error


def error_kind(error: errors.ShoalError) -> str:
    """Return the code of a call's error."""
    if isinstance(error, errors.CannotDo) and error.field in REQUIREMENT_FIELDS:
        return error.field or ""
    if isinstance(error, errors.JobError) and str(error).startswith(TIMED_OUT):
        return ERROR_KINDS[errors.TimedOut]
    return next(
        ERROR_KINDS[each] for each in type(error).__mro__ if each in ERROR_KINDS
    )


def return_item(result: CallResult) -> ReplyItem:
    """Return the item for the result of a streamed call."""
    number, value, error = result
    if not error:
        return DONE, number, value, {}
    kind = (
        ERROR_KINDS[errors.TimedOut]
        if error.startswith(TIMED_OUT)
        else ERROR_KINDS[errors.JobError]
    )
    return FAILED, number, kind, error, {"exception": value} if value else {}


def failure_item(
    number: int, error: errors.ShoalError, meta: Mapping[str, object]
) -> ReplyItem:
    """Return the item for a call that failed."""
    if isinstance(error, errors.JobError) and error.exception:
        meta = {**meta, "exception": error.exception}
    if isinstance(error, errors.ShuttingDown):
        meta = {**meta, "stopping": True}
    return FAILED, number, error_kind(error), str(error), meta


class SendQueue:
    """Collects items and batches them into messages."""

    def __init__(self) -> None:
        self._items: list[ReplyItem] = []
        self._size = 0  # bytes, including those being written
        self._writing = 0  # bytes being written
        self._wake: asyncio.Future[None] | None = None
        self._closed = False
        self._overflow = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, item: ReplyItem) -> None:
        """Queue an item, unless the queue is closed."""
        if self._closed:
            return
        self._items.append(item)
        value = item[2]
        self._size += ITEM_SIZE
        if isinstance(value, bytes):
            self._size += len(value)
        if self._size > UNSENT_MAX:
            # Checked here, because a client that does not read blocks the writer.
            self.close()
            self._overflow.set()
            return
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Drop all items, and queue no more."""
        self._closed = True
        self._items.clear()

    async def wait_overflow(self) -> None:
        """Wait until the queue overflows because the client does not read."""
        await self._overflow.wait()

    async def next_message(self) -> bytes:
        """Wait for items; return them as one message.

        The previous message counts as written.
        """
        self._size -= self._writing
        self._writing = 0
        while not self._items:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        items, self._items = self._items, []
        self._writing = self._size
        return self._encode(items)
