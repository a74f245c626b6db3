"""Tasks and values between what they are as JSON and as MessagePack.

JSON is what a job over HTTP has, MessagePack what a function is called with.  What both
have is passed on as it is; of the rest it is said what it was.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from shoal.domain.work import JSON, Task

NO_ARGS = b"\x90"  # an empty array
NO_KWARGS = b"\x80"  # an empty map
NIL = b"\xc0"

NAMING = frozenset({"task_type", "args", "kwargs"})  # fields that are no argument

# How a value begins that only our own peers know ("ext" in MessagePack's document).
_MAY_BE_RICH = re.compile(rb"[\xc7-\xc9\xd4-\xd8]")


class NotPlain(ValueError):
    """A value has no form in what it is to be written as; the text says what it is."""


def arguments(task: Task) -> tuple[bytes, bytes]:
    """Return the arguments of the function that does a task: an array and a map.

    They are the payload's ``args`` and ``kwargs``; of a payload that has neither, each
    field but its name is an argument.

    Raises NotPlain if they are no array and no object, or hold a number beyond 64 bit.
    """
    payload = task.payload
    if not isinstance(payload, Mapping):
        payload = {} if payload is None else {"args": [payload]}
    args: JSON = payload.get("args", [])
    kwargs: JSON = payload.get("kwargs", {})
    if "args" not in payload and "kwargs" not in payload:
        kwargs = {name: payload[name] for name in payload if name not in NAMING}
    if not isinstance(args, list | tuple):
        raise NotPlain("payload.args: expected an array")
    if not isinstance(kwargs, Mapping):
        raise NotPlain("payload.kwargs: expected an object")
    try:
        return msgspec.msgpack.encode(args), msgspec.msgpack.encode(kwargs)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise NotPlain(f"payload: {error}") from error


def is_plain(value: bytes | memoryview) -> bool:
    """Say whether there is nothing in a value but what MessagePack itself has."""
    if _MAY_BE_RICH.search(value) is None:
        return True
    try:
        msgspec.msgpack.decode(value, ext_hook=_refuse)
    except NotPlain:
        return False
    except msgspec.DecodeError:
        return True  # it is no value at all, which whoever reads it will say
    return True


def json_text(value: bytes | memoryview) -> str:
    """Return a value as JSON text.  Raises NotPlain, saying what has no form there."""
    try:
        decoded: Any = msgspec.msgpack.decode(value, ext_hook=_refuse)
        return json.dumps(decoded, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotPlain(
            f"what the task returned cannot be written as JSON ({error}): call it from "
            "Python, with shoal.Pool"
        ) from error


def _refuse(code: int, data: memoryview) -> NoReturn:
    raise NotPlain(f"an array, or another value that only Python has (type {code})")
