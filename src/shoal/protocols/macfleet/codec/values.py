"""Values in MessagePack: which of them every peer can read, and their form in JSON.

MacFleet's own programs decode with Python's msgpack, which refuses map keys other than
text and bytes, text that is not UTF-8, and deep nesting; after one value that it cannot
decode, such a worker reads nothing more.  ``check_compatible`` finds these values
before they are sent, without decoding them.  Jobs over HTTP carry JSON, functions take
MessagePack: ``task_arguments`` and ``to_json`` convert, and name what has no
equivalent.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from shoal.domain.work import JSON, Task

DEPTH_MAX = 511  # containers in each other: what Python's msgpack writes
STEPS_MAX = 1 << 20  # values looked at one by one, which takes most of a second
RUN_MIN = 8  # values from which on it pays to look for more of the same kind

_FIXED_TEXTS = range(0xA0, 0xC0)
_FIXED_MAPS = range(0x80, 0x90)
_FIXED_ARRAYS = range(0x90, 0xA0)
_OWN_TYPES = 0x80  # types of extensions from there on are MessagePack's own
_TIMESTAMP = 0xFF  # the only one that there is

_WIDTHS = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 1),
    **{lead: 1 + (lead & 31) for lead in _FIXED_TEXTS},
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    **{0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18},
}
"""How many bytes a value has, by its first."""

_SIZES = {
    **{0xC4: 1, 0xC5: 2, 0xC6: 4},  # bytes
    **{0xC7: 1, 0xC8: 2, 0xC9: 4},  # extensions
    **{0xD9: 1, 0xDA: 2, 0xDB: 4},  # texts
    **{0xDC: 2, 0xDD: 4},  # arrays
    **{0xDE: 2, 0xDF: 4},  # maps
}
"""How many bytes the size of a value has, by its first."""

_TEXTS = frozenset((*_FIXED_TEXTS, 0xD9, 0xDA, 0xDB))
_KEYS = _TEXTS | {0xC4, 0xC5, 0xC6}
_EXTENSIONS = frozenset((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))
_MAPS = frozenset((*_FIXED_MAPS, 0xDE, 0xDF))
_CONTAINERS = _MAPS | {*_FIXED_ARRAYS, 0xDC, 0xDD}


def _run(leads: bytes, width: int) -> tuple["re.Pattern[bytes]", int]:
    each = rb"[%b].{%d}" % (re.escape(leads), width - 1)
    return re.compile(rb"(?:%b)+" % each, re.DOTALL), width


_RUNS = {
    lead: run
    for leads, width in (
        (bytes((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3)), 1),
        (b"\xcc\xd0", 2),
        (b"\xcd\xd1", 3),
        (b"\xca\xce\xd2", 5),
        (b"\xcb\xcf\xd3", 9),
    )
    for run in (_run(leads, width),)
    for lead in leads
}
"""What finds numbers of one width that follow each other, and that width."""


class IncompatibleValue(ValueError):
    """A value that real peers cannot read; the text says why."""


def check_compatible(value: memoryview) -> None:
    """Go through one value in MessagePack, which is whole and the only one.

    Raises IncompatibleValue for what real peers would stumble over, and for more than
    can be looked through.
    """
    at = steps = 0
    left, in_map = 1, False  # values that the innermost container still has
    outer: list[tuple[int, bool]] = []
    while left or outer:
        if not left:
            left, in_map = outer.pop()
            continue
        lead = value[at]
        if not in_map and left >= RUN_MIN and (run := _RUNS.get(lead)) is not None:
            pattern, width = run
            found = pattern.match(value, at, at + left * width)
            assert found is not None, "it begins with one of them"
            left -= (found.end() - at) // width
            at = found.end()
            continue
        if in_map and not left & 1 and lead not in _KEYS:
            raise IncompatibleValue("a map has a key that is neither a text nor bytes")
        steps += 1
        if steps > STEPS_MAX:
            raise IncompatibleValue(
                f"more than {STEPS_MAX} values: pass an array, or bytes"
            )
        left -= 1
        if lead in _CONTAINERS:
            outer.append((left, in_map))
            if len(outer) > DEPTH_MAX:
                raise IncompatibleValue(
                    f"more than {DEPTH_MAX} containers are in each other"
                )
            at, left = _count(value, at, lead)
            if in_map := lead in _MAPS:
                left *= 2
        else:
            at = _scalar_end(value, at, lead)


def _count(value: memoryview, at: int, lead: int) -> tuple[int, int]:
    """Return where the first value of a container is, and how many there are."""
    if (size := _SIZES.get(lead)) is None:
        return at + 1, lead & 15
    begin = at + 1 + size
    return begin, int.from_bytes(value[at + 1 : begin])


def _scalar_end(value: memoryview, at: int, lead: int) -> int:
    """Return where the next value begins."""
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
        raise IncompatibleValue(
            f"an extension has the type {type - 256}, which nobody knows"
        )
    try:
        msgspec.msgpack.decode(extension)
    except msgspec.MsgspecError as error:
        raise IncompatibleValue(str(error)) from error


NO_ARGS = b"\x90"  # an empty array
NO_KWARGS = b"\x80"  # an empty map
NIL = b"\xc0"

NAME_FIELDS = frozenset({"task_type", "args", "kwargs"})  # fields that are no argument

# How a value begins that only our own peers know ("ext" in MessagePack's document).
_EXTENSION_LEAD = re.compile(rb"[\xc7-\xc9\xd4-\xd8]")


class NotConvertible(ValueError):
    """A value has no form in what it is to be written as; the text says what it is."""


def task_arguments(task: Task) -> tuple[bytes, bytes]:
    """Return the arguments of the function that does a task: an array and a map.

    They are the payload's ``args`` and ``kwargs``; of a payload that has neither, each
    field but its name is an argument.

    Raises NotConvertible if they are no array and no object, or hold a number beyond
    64 bit.
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
    """Say whether there is nothing in a value but what MessagePack itself has."""
    if _EXTENSION_LEAD.search(value) is None:
        return True
    try:
        msgspec.msgpack.decode(value, ext_hook=_refuse_extension)
    except NotConvertible:
        return False
    except msgspec.DecodeError:
        return True  # it is no value at all, which whoever reads it will say
    return True


def to_json(value: bytes | memoryview) -> str:
    """Return a value as JSON text.  Raises NotConvertible, saying what has no form
    there."""
    try:
        decoded: Any = msgspec.msgpack.decode(value, ext_hook=_refuse_extension)
        return json.dumps(decoded, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotConvertible(
            f"what the task returned cannot be written as JSON ({error}): call it from "
            "Python, with shoal.Pool"
        ) from error


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise NotConvertible(
        f"an array, or another value that only Python has (type {code})"
    )
