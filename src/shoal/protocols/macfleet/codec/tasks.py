"""Tasks and results: MessagePack maps, whose values are passed on without decoding.

Source: the MacFleet document, "Tasks".  Upstream checks sizes only when it reads, and
its worker stops reading after a task that it cannot decode, so the encoders here reject
whatever upstream would not accept.
"""

import math
import re
import traceback
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Raw

from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError, TooLarge
from shoal.protocols.macfleet.codec import values
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Payload

TASK_MAX = 64 << 20  # bytes
RESULT_MAX = PAYLOAD_MAX
TIMEOUT = 300.0  # seconds, if a task has none
ID_MAX = 256  # characters
NAME_MAX = 1024  # characters of a function's name
ERROR_MAX = 1 << 20  # characters of a traceback that are sent

NO_REASON = "the task failed, and its worker did not report why"

PayloadParts: TypeAlias = tuple[bytes | memoryview, ...]
"""The parts of a payload, so that large values need not be copied into it."""

Fields: TypeAlias = list[tuple[bytes, bytes | Raw]]

COPY_MAX = 64 << 10  # bytes: larger values are not copied
_FIXMAP = 0x80  # first byte of a map of up to 15 fields, plus their number
_FIXSTR = 0xA0  # first byte of a text of up to 31 bytes, plus its length

_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))  # first bytes of arrays
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


class TaskRequest(NamedTuple):
    """A task.  ``args`` is an array and ``kwargs`` a map, in MessagePack.

    Both are views of the payload.  ``timeout`` is in seconds; None: unlimited.
    """

    task_id: str
    name: str
    args: Raw
    kwargs: Raw
    timeout: float | None


class TaskResult(NamedTuple):
    """A task's result: a value in MessagePack, or an error."""

    task_id: str
    value: Raw
    error: str | None = None


class _TaskMap(msgspec.Struct, frozen=True):
    task_id: str
    name: str
    args: Raw = Raw(values.NO_ARGS)
    kwargs: Raw = Raw(values.NO_KWARGS)
    timeout: float | int | None = TIMEOUT


class _ResultMap(msgspec.Struct, frozen=True):
    task_id: str
    ok: bool | int
    value: Raw = Raw(values.NIL)
    error: str | None = None


# The first byte of a map, the key ``task_id``, and the length of a text.
_ID_FIRST = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)\xa7task_id"
    rb"(?:(?P<fixed>[\xa0-\xbf])|\xd9(?P<size>.)|\xda(?P<large>..))",
    re.DOTALL,
)

_encode = msgspec.msgpack.Encoder().encode
_decode_task_map = msgspec.msgpack.Decoder(_TaskMap).decode
_decode_result_map = msgspec.msgpack.Decoder(_ResultMap).decode
_decode_value = msgspec.msgpack.Decoder(Raw).decode


def encode_task(
    task_id: str,
    name: str,
    args: bytes | Raw,
    kwargs: bytes | Raw,
    timeout: float | None,
) -> PayloadParts:
    """Return the payload of a TASK frame; values are given in MessagePack.

    Raises InvalidRequest for values that upstream cannot decode, and TooLarge.
    """
    _check_outgoing("args", args, _ARRAYS)
    _check_outgoing("kwargs", kwargs, _MAPS)
    fields: Fields = [
        (b"task_id", _encode(task_id)),
        (b"name", _encode(name)),
        (b"args", args),
        (b"kwargs", kwargs),
        (b"timeout", _encode(timeout)),
    ]
    parts = _encode_map(fields)
    size = sum(map(len, parts))
    if size > TASK_MAX:
        raise arguments_too_large(size)
    return parts


def decode_task(payload: Payload) -> TaskRequest:
    """Decode the payload of a TASK frame.

    Raises PeerError if it is malformed or too large.
    """
    if len(payload) > TASK_MAX:
        raise LimitExceeded("task", len(payload), TASK_MAX)
    try:
        decoded = _decode_task_map(payload)
        args = Raw(values.NO_ARGS) if _is_nil(decoded.args) else decoded.args
        kwargs = Raw(values.NO_KWARGS) if _is_nil(decoded.kwargs) else decoded.kwargs
        _check("args", args, _ARRAYS)
        _check("kwargs", kwargs, _MAPS)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"task: {error}") from error
    if len(decoded.task_id) > ID_MAX or len(decoded.name) > NAME_MAX:
        raise PeerError(
            f"task: an id of {len(decoded.task_id)} and a name of {len(decoded.name)} "
            f"characters, where {ID_MAX} and {NAME_MAX} are the limits"
        )
    return TaskRequest(
        decoded.task_id, decoded.name, args, kwargs, _timeout(decoded.timeout)
    )


def encode_result(
    task_id: str, value: bytes | Raw | None, error: str | None = None
) -> PayloadParts:
    """Return the payload of a RESULT frame: a value in MessagePack, or an error.

    A long error is cut at the start: its end names the exception.

    Raises as ``encode_task`` does.
    """
    if value is not None:
        _check_outgoing("value", value, None)
    decoded = None if error is None else _well_formed(error[-ERROR_MAX:])
    fields: Fields = [
        (b"task_id", _encode(task_id)),
        (b"ok", _encode(error is None)),
        (b"value", values.NIL if value is None else value),
        (b"error", _encode(decoded)),
    ]
    parts = _encode_map(fields)
    size = sum(map(len, parts))
    if size > RESULT_MAX:
        raise result_too_large(size)
    return parts


def decode_result(payload: Payload) -> TaskResult:
    """Decode the payload of a RESULT frame.

    Raises PeerError as ``decode_task`` does.
    """
    if len(payload) > RESULT_MAX:
        raise LimitExceeded("result", len(payload), RESULT_MAX)
    try:
        decoded = _decode_result_map(payload)
        _check("value", decoded.value, None)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"result: {error}") from error
    if len(decoded.task_id) > ID_MAX:
        raise PeerError(f"result: an id of {len(decoded.task_id)} characters")
    error_text = None if decoded.ok else decoded.error or NO_REASON
    return TaskResult(decoded.task_id, decoded.value, error_text)


def arguments_too_large(size: int) -> TooLarge:
    """Return the error for a task of ``size`` bytes."""
    return TooLarge(
        f"the task's arguments make {size} bytes, more than the "
        f"{TASK_MAX} that peers accept: pass large data by file or by blob"
    )


def result_too_large(size: int) -> TooLarge:
    """Return the error for a result of ``size`` bytes."""
    return TooLarge(
        f"the task returned {size} bytes, more than the {RESULT_MAX} that "
        "peers accept: return less, or write a file"
    )


def error_text(error: Exception) -> str:
    """Return an exception as the last line of a traceback has it.

    The caller's program rebuilds the exception from that line.
    """
    return "".join(traceback.format_exception_only(error)).strip()


def timeout_error(timeout: float) -> str:
    """Return the error of a task that has timed out, as upstream writes it."""
    return f"Task timed out after {timeout}s"


def task_id_at_start(payload: Payload) -> str | None:
    """Return the id of a task or result whose end is missing; None: unreadable.

    Upstream writes the id first.
    """
    found = _ID_FIRST.match(payload)
    if found is None:
        return None
    size = (
        found["fixed"][0] & 31
        if found["fixed"]
        else int.from_bytes(found["size"] or found["large"])
    )
    raw = bytes(payload[found.end() : found.end() + size])
    try:
        task_id = raw.decode()
    except UnicodeDecodeError:
        return None
    return task_id if len(raw) == size and len(task_id) <= ID_MAX else None


def task_id_in(payload: Payload) -> str | None:
    """Return the id of a task or result that is otherwise malformed, if it has one."""
    try:
        fields = msgspec.msgpack.decode(payload, type=dict[str, Raw])
        task_id = msgspec.msgpack.decode(fields["task_id"], type=str)
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError):
        return None
    return task_id if len(task_id) <= ID_MAX else None


def _encode_map(fields: Fields) -> PayloadParts:
    """Return a map of encoded values; large ones are not copied."""
    parts: list[bytes | memoryview] = []
    small = bytearray((_FIXMAP + len(fields),))
    for name, value in fields:
        small.append(_FIXSTR + len(name))
        small += name
        if len(value) < COPY_MAX:
            small += value
        else:
            parts += (bytes(small), memoryview(value))
            small.clear()
    if small:
        parts.append(bytes(small))
    return tuple(parts)


def _is_nil(raw: Raw) -> bool:
    return len(raw) == 1 and bytes(raw) == values.NIL


def _check_outgoing(
    field: str, value: bytes | Raw, first_bytes: frozenset[int] | None
) -> None:
    try:
        # Exactly one value, or else a caller could write further fields of the map.
        _decode_value(value)
        _check(field, value, first_bytes)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: {error}", field) from error


def _check(field: str, value: bytes | Raw, first_bytes: frozenset[int] | None) -> None:
    view = memoryview(value)
    if first_bytes is not None and view[0] not in first_bytes:
        raise values.IncompatibleValue(
            f"{field} is not {'an array' if first_bytes is _ARRAYS else 'a map'}"
        )
    values.check_compatible(view)


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which quoted file names may contain."""
    return text.encode(errors="replace").decode()


def _timeout(timeout: float | None) -> float | None:
    if timeout is None or timeout == math.inf:
        return None
    if math.isnan(timeout):
        raise PeerError("task: its timeout is not a number")
    return max(0.0, float(timeout))
