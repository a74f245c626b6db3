"""Tasks and their results: maps in MessagePack, whose values are passed on unread.

Source: the MacFleet document, "Tasks".  Real peers check sizes only when they read, and
a worker of theirs that cannot read a task reads no more: so nothing is written that
they would not take.
"""

import math
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError, TooLarge
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Payload
from shoal.protocols.macfleet.codec.values import IncompatibleValue, check_compatible

TASK_MAX = 64 << 20  # bytes
RESULT_MAX = PAYLOAD_MAX
TIMEOUT = 300.0  # seconds, where a task says nothing about it
ID_MAX = 256  # characters
NAME_MAX = 1024  # characters of a function's name
ERROR_MAX = 1 << 20  # characters of a traceback that are written

NIL = Raw(b"\xc0")
NO_ARGS = Raw(b"\x90")  # an empty array
NO_KWARGS = Raw(b"\x80")  # an empty map
NO_REASON = "the task failed, and its worker did not say why"

PayloadParts: TypeAlias = tuple[bytes | memoryview, ...]
"""What a payload consists of, so that no large value need be copied into it."""

Fields: TypeAlias = list[tuple[bytes, bytes | Raw]]

COPY_MAX = 64 << 10  # bytes of a value that is not copied
_FIXMAP = 0x80  # how a map begins that has less than 16 fields, and their number
_FIXSTR = 0xA0  # the same of a text of less than 32 bytes

_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))  # how an array begins
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


class TaskRequest(NamedTuple):
    """A task.  ``args`` is an array and ``kwargs`` a map, whole and in MessagePack.

    ``timeout`` is in seconds; None: it may take as long as it likes.  ``extension`` is
    what our own peers say besides, in MessagePack.  All three look into the payload.
    """

    task_id: str
    name: str
    args: Raw
    kwargs: Raw
    timeout: float | None
    extension: Raw | None = None


class TaskResult(NamedTuple):
    """What came of a task: a value in MessagePack, or an error."""

    task_id: str
    value: Raw
    error: str | None = None
    extension: Raw | None = None


class _TaskMap(msgspec.Struct, frozen=True):
    task_id: str
    name: str
    args: Raw = NO_ARGS
    kwargs: Raw = NO_KWARGS
    timeout: float | int | None = TIMEOUT
    shoal: Raw | UnsetType = UNSET


class _ResultMap(msgspec.Struct, frozen=True):
    task_id: str
    ok: bool | int
    value: Raw = NIL
    error: str | None = None
    shoal: Raw | UnsetType = UNSET


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
    extension: bytes | Raw | None = None,
    *,
    strict: bool = True,
) -> bytes:
    """Return the payload of a TASK frame, as ``encode_task_parts`` does, in one
    piece."""
    said = encode_task_parts(
        task_id, name, args, kwargs, timeout, extension, strict=strict
    )
    return b"".join(said)


def encode_task_parts(
    task_id: str,
    name: str,
    args: bytes | Raw,
    kwargs: bytes | Raw,
    timeout: float | None,
    extension: bytes | Raw | None = None,
    *,
    strict: bool = True,
) -> PayloadParts:
    """Return the payload of a TASK frame; ``args`` and the like are in MessagePack.

    Without ``strict`` it is not looked at what is in them: for our own peers, which
    can say what they do not understand.

    Raises InvalidRequest if they are no values, or such as real peers cannot read, and
    TooLarge.
    """
    _check_outgoing("args", args, _ARRAYS, strict)
    _check_outgoing("kwargs", kwargs, _MAPS, strict)
    fields: Fields = [
        (b"task_id", _encode(task_id)),
        (b"name", _encode(name)),
        (b"args", args),
        (b"kwargs", kwargs),
        (b"timeout", _encode(timeout)),
    ]
    parts = _encode_map(fields, extension)
    size = sum(map(len, parts))
    if size > TASK_MAX:
        raise TooLarge(
            f"the task's arguments make {size} bytes, more than the "
            f"{TASK_MAX} that peers take: pass what is large by file or by blob"
        )
    return parts


def decode_task(payload: Payload, *, strict: bool = True) -> TaskRequest:
    """Read the payload of a TASK frame.  For ``strict`` see ``encode_task``.

    Raises PeerError if it is not that, or too large.
    """
    if len(payload) > TASK_MAX:
        raise LimitExceeded("task", len(payload), TASK_MAX)
    try:
        told = _decode_task_map(payload)
        args = NO_ARGS if _is_nil(told.args) else told.args
        kwargs = NO_KWARGS if _is_nil(told.kwargs) else told.kwargs
        _check("args", args, _ARRAYS, strict)
        _check("kwargs", kwargs, _MAPS, strict)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"task: {error}") from error
    if len(told.task_id) > ID_MAX or len(told.name) > NAME_MAX:
        raise PeerError(
            f"task: an id of {len(told.task_id)} and a name of {len(told.name)} "
            f"characters, where {ID_MAX} and {NAME_MAX} are the limits"
        )
    timeout = _timeout(told.timeout)
    more = None if told.shoal is UNSET else told.shoal
    return TaskRequest(told.task_id, told.name, args, kwargs, timeout, more)


def encode_result(
    task_id: str,
    value: bytes | Raw | None,
    error: str | None = None,
    extension: bytes | Raw | None = None,
    *,
    strict: bool = True,
) -> bytes:
    """Return the payload of a RESULT frame, as ``encode_result_parts`` does, in one
    piece."""
    return b"".join(
        encode_result_parts(task_id, value, error, extension, strict=strict)
    )


def encode_result_parts(
    task_id: str,
    value: bytes | Raw | None,
    error: str | None = None,
    extension: bytes | Raw | None = None,
    *,
    strict: bool = True,
) -> PayloadParts:
    """Return the payload of a RESULT frame: a value in MessagePack, or an error.

    Of a long error the end is written, which names it.

    Raises as ``encode_task_parts`` does.
    """
    if value is not None:
        _check_outgoing("value", value, None, strict)
    told = None if error is None else _well_formed(error[-ERROR_MAX:])
    fields: Fields = [
        (b"task_id", _encode(task_id)),
        (b"ok", _encode(error is None)),
        (b"value", NIL if value is None else value),
        (b"error", _encode(told)),
    ]
    parts = _encode_map(fields, extension)
    size = sum(map(len, parts))
    if size > RESULT_MAX:
        raise TooLarge(
            f"the task returned {size} bytes, more than the {RESULT_MAX} that "
            "peers take: have it return less, or write a file"
        )
    return parts


def decode_result(payload: Payload, *, strict: bool = True) -> TaskResult:
    """Read the payload of a RESULT frame.

    Raises PeerError as ``decode_task`` does.
    """
    if len(payload) > RESULT_MAX:
        raise LimitExceeded("result", len(payload), RESULT_MAX)
    try:
        told = _decode_result_map(payload)
        _check("value", told.value, None, strict)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"result: {error}") from error
    if len(told.task_id) > ID_MAX:
        raise PeerError(f"result: an id of {len(told.task_id)} characters")
    error_text = None if told.ok else told.error or NO_REASON
    more = None if told.shoal is UNSET else told.shoal
    return TaskResult(told.task_id, told.value, error_text, more)


def _encode_map(fields: Fields, extension: bytes | Raw | None) -> PayloadParts:
    """Return a map of values that are written already, large ones as they are."""
    if extension is not None:
        fields.append((b"shoal", extension))
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
    return len(raw) == 1 and raw == NIL


def _check_outgoing(
    what: str, value: bytes | Raw, begins: frozenset[int] | None, strict: bool
) -> None:
    try:
        # One value and nothing after it, or a caller could write the rest of the map.
        _decode_value(value)
        _check(what, value, begins, strict)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what}: {error}", what) from error


def _check(
    what: str, value: bytes | Raw, begins: frozenset[int] | None, strict: bool
) -> None:
    view = memoryview(value)
    if begins is not None and view[0] not in begins:
        raise IncompatibleValue(
            f"{what} is no {'array' if begins is _ARRAYS else 'map'}"
        )
    if strict:
        check_compatible(view)


def _well_formed(text: str) -> str:
    """Return a text that can be written: names of files may have what no text has."""
    return text.encode(errors="replace").decode()


def _timeout(timeout: float | None) -> float | None:
    if timeout is None or timeout == math.inf:
        return None
    if math.isnan(timeout):
        raise PeerError("task: its timeout is no number")
    return max(0.0, float(timeout))
