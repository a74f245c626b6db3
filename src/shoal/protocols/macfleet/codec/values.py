"""Values in MessagePack: which of them every peer can decode, and their form in JSON.

MacFleet's own programs decode with Python's msgpack, which refuses map keys other than
text and bytes, text that is not UTF-8, and deep nesting; after one value that it cannot
decode, such a worker stops reading.  ``check_compatible`` finds these values
before they are sent, without decoding them.  Jobs over HTTP carry JSON, functions take
MessagePack: ``task_arguments`` and ``to_json`` convert, and report what has no
equivalent.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from shoal.domain.work import JSON, Task

NIL = b"\xc0"
NO_ARGS = b"\x90"  # an empty array
NO_KWARGS = b"\x80"  # an empty map

DEPTH_MAX = 511  # nested containers: the limit of Python's msgpack
STEPS_MAX = 1 << 18  # values visited one by one, which takes 0.1 s
RUN_MIN = 8  # values from which on a search for a run pays
RUN_FIRST = 32  # values that a search begins with
RUN_GROWTH = 8  # and how many times as many it goes on with
RUN_MAX = 1 << 14  # values from which on a search stops
RUN_START = 2  # steps that the search for a run takes, whatever it finds
RUN_STEPS = 256  # values of a run that take as long as one by itself
RUN_STEPS_JSON = 4  # the same where a value becomes JSON, which takes longer

_FIXED_TEXTS = range(0xA0, 0xC0)
_FIXED_MAPS = range(0x80, 0x90)
_FIXED_ARRAYS = range(0x90, 0xA0)
_OWN_TYPES = 0x80  # extension types from there on are reserved by MessagePack
_TIMESTAMP = 0xFF  # the only reserved type in use

_WIDTHS = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 1),
    **{lead: 1 + (lead & 31) for lead in _FIXED_TEXTS},
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    **{0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18},
}
"""The size of a value in bytes, by its first byte."""

_SIZES = {
    **{0xC4: 1, 0xC5: 2, 0xC6: 4},  # bytes
    **{0xC7: 1, 0xC8: 2, 0xC9: 4},  # extensions
    **{0xD9: 1, 0xDA: 2, 0xDB: 4},  # texts
    **{0xDC: 2, 0xDD: 4},  # arrays
    **{0xDE: 2, 0xDF: 4},  # maps
}
"""The width of a value's length field in bytes, by its first byte."""

_TEXTS = frozenset((*_FIXED_TEXTS, 0xD9, 0xDA, 0xDB))
_KEYS = _TEXTS | {0xC4, 0xC5, 0xC6}
_EXTENSIONS = frozenset((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))
_MAPS = frozenset((*_FIXED_MAPS, 0xDE, 0xDF))
_CONTAINERS = _MAPS | {*_FIXED_ARRAYS, 0xDC, 0xDD}


_RUNS = {
    lead: (bytes(each not in leads for each in range(256)), width)
    for leads, width in (
        (bytes((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3)), 1),
        (b"\xcc\xd0", 2),
        (b"\xcd\xd1", 3),
        (b"\xca\xce\xd2", 5),
        (b"\xcb\xcf\xd3", 9),
    )
    for lead in leads
}
"""By a number's first byte: its width in bytes, after a table of all first bytes.

That has 0 for those of the same width, 1 for others.
"""


class IncompatibleValue(ValueError):
    """A value that upstream cannot decode; the text says why."""


def check_compatible(value: memoryview) -> None:
    """Check one value in MessagePack, which is complete and the only one.

    Raises IncompatibleValue if upstream cannot decode it, or it is too large to check.
    """
    at = steps = 0
    left, in_map = 1, False  # values left in the innermost container
    outer: list[tuple[int, bool]] = []
    while left or outer:
        if not left:
            left, in_map = outer.pop()
            continue
        if steps > STEPS_MAX:
            raise IncompatibleValue(
                f"more than {STEPS_MAX} values: pass an array, or bytes"
            )
        lead = value[at]
        if not in_map and left >= RUN_MIN and (run := _RUNS.get(lead)) is not None:
            length = _run_length(value, at, left, *run)
            left -= length
            at += length * run[1]
            steps += RUN_START + length // RUN_STEPS
            continue
        if in_map and not left & 1 and lead not in _KEYS:
            raise IncompatibleValue("a map has a key that is neither text nor bytes")
        steps += 1
        left -= 1
        if lead in _CONTAINERS:
            outer.append((left, in_map))
            if len(outer) > DEPTH_MAX:
                raise IncompatibleValue(f"more than {DEPTH_MAX} nested containers")
            at, left = _count(value, at, lead)
            if in_map := lead in _MAPS:
                left *= 2
        else:
            at = _scalar_end(value, at, lead)


def _check_size(value: memoryview) -> None:
    """Raise IncompatibleValue if a value is too large to be written as JSON."""
    at = steps = 0
    left = 1  # values, of all containers that are open
    while left:
        lead = value[at]
        steps += 1
        if left >= RUN_MIN and (run := _RUNS.get(lead)) is not None:
            length = _run_length(value, at, left, *run)
            left -= length
            at += length * run[1]
            steps += length // RUN_STEPS_JSON
        elif lead in _CONTAINERS:
            at, count = _count(value, at, lead)
            left += (2 * count if lead in _MAPS else count) - 1
        else:
            at = _scalar_end(value, at, lead)
            left -= 1
        if steps > STEPS_MAX:
            raise IncompatibleValue(f"more than {STEPS_MAX} values")


def _run_length(
    value: memoryview, at: int, left: int, others: bytes, width: int
) -> int:
    """Return how many values from there on are numbers of one width.

    A search that finds little costs little: it begins with a few values, and widens.
    """
    length, searched = 0, RUN_FIRST
    while True:
        searched = min(searched, left - length)
        begin = at + length * width
        firsts = value[begin : begin + searched * width : width].tobytes()
        found = firsts.translate(others).find(1)
        if found >= 0:
            return length + found
        length += searched
        if length == left or length >= RUN_MAX:
            return length
        searched *= RUN_GROWTH


def _count(value: memoryview, at: int, lead: int) -> tuple[int, int]:
    """Return the offset of a container's first value, and the number of values."""
    if (size := _SIZES.get(lead)) is None:
        return at + 1, lead & 15
    begin = at + 1 + size
    return begin, int.from_bytes(value[at + 1 : begin])


def _scalar_end(value: memoryview, at: int, lead: int) -> int:
    """Return the offset after a value."""
    if (width := _WIDTHS.get(lead)) is not None:
        begin, end = at + 1, at + width
    else:
        begin = at + 1 + _SIZES[lead]
        end = begin + int.from_bytes(value[at + 1 : begin]) + (lead in _EXTENSIONS)
    if lead in _TEXTS:
        try:
            str(value[begin:end], "utf-8")
        except UnicodeError as error:
            raise IncompatibleValue(f"a text is not UTF-8: {error}") from error
    elif lead in _EXTENSIONS and value[begin] >= _OWN_TYPES:
        _check_reserved_type(value[at:end], value[begin])
    return end


def _check_reserved_type(extension: memoryview, type: int) -> None:
    if type != _TIMESTAMP:
        raise IncompatibleValue(f"an extension has the unknown type {type - 256}")
    try:
        msgspec.msgpack.decode(extension)
    except msgspec.MsgspecError as error:
        raise IncompatibleValue(str(error)) from error


NAME_FIELDS = frozenset({"task_type", "args", "kwargs"})  # fields, not arguments

# First bytes of MessagePack extensions: arrays, and other values of Python alone.
_EXTENSION_LEAD = re.compile(rb"[\xc7-\xc9\xd4-\xd8]")


class NotConvertible(ValueError):
    """A value cannot be converted; the text says why."""


def task_arguments(task: Task) -> tuple[bytes, bytes]:
    """Return the arguments of a task's function in MessagePack: an array and a map.

    They are the payload's ``args`` and ``kwargs``.  If the payload has neither, each
    field except the task's name is a keyword argument.

    Raises NotConvertible if they have the wrong types, or contain a number beyond 64
    bits.
    """
    payload = task.payload
    if not isinstance(payload, Mapping):
        payload = {} if payload is None else {"args": [payload]}
    args: JSON = payload.get("args", [])
    kwargs: JSON = payload.get("kwargs", {})
    if "args" not in payload and "kwargs" not in payload:
        kwargs = {name: payload[name] for name in payload if name not in NAME_FIELDS}
    if not isinstance(args, list | tuple):
        raise NotConvertible("payload.args: expected an array")
    if not isinstance(kwargs, Mapping):
        raise NotConvertible("payload.kwargs: expected an object")
    try:
        return msgspec.msgpack.encode(args), msgspec.msgpack.encode(kwargs)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise NotConvertible(f"payload: {error}") from error


def is_plain_value(value: bytes | memoryview) -> bool:
    """Say whether a value contains no extension types."""
    if _EXTENSION_LEAD.search(value) is None:
        return True
    try:
        msgspec.msgpack.decode(value, ext_hook=_refuse_extension)
    except NotConvertible:
        return False
    except msgspec.DecodeError:
        return True  # malformed; the receiver reports that
    return True


def to_json(value: bytes | memoryview) -> str:
    """Return a value as JSON text.  Raises NotConvertible if it has no JSON form."""
    try:
        if len(value) > STEPS_MAX:
            _check_size(memoryview(value))
        decoded: Any = msgspec.msgpack.decode(value, ext_hook=_refuse_extension)
        return json.dumps(decoded, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotConvertible(
            f"the task's value cannot be written as JSON ({error}): call it from "
            "Python with shoal.Pool"
        ) from error


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise NotConvertible(
        f"an array, or another value that only Python supports (type {code})"
    )
