"""Converts tasks in JSON to calls of functions, and their results back."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks.extension_types import EXACT, INSTANCE, TAGGED
from shoal.tasks.limits import ARGS_MAX
from shoal.tasks.values import ValueReader, pack

_NAMES = ("task_type", "name", "job_type")
"""Fields of a payload that name the task and its kind."""


def json_arguments(payload: object) -> tuple[bytes, bytes]:
    """Return the encoded arguments of a task in JSON.

    They are its ``args`` and ``kwargs``, if it has any; else all fields but the names.
    Raises InvalidRequest if they are not a list and a map.
    """
    fields = dict(payload) if isinstance(payload, Mapping) else {}
    for name in _NAMES:
        fields.pop(name, None)
    if fields.keys() <= {"args", "kwargs"}:
        args, kwargs = fields.get("args") or [], fields.get("kwargs") or {}
    else:
        args, kwargs = [], fields
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise InvalidRequest("args: expected a list", "args")
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest("kwargs: expected a map", "kwargs")
    positional = pack([*args], "args", size_max=ARGS_MAX)
    return positional.data, pack(dict(kwargs), "kwargs", size_max=ARGS_MAX).data


def value_as_json(value: bytes) -> str:
    """Return a value as JSON text; raises InvalidRequest if it has no JSON form."""
    read = ValueReader().read(value)
    _check(read, "what it returned")
    return msgspec.json.encode(read).decode()


def contents_as_json(value: bytes) -> bytes:
    """Return what JSON can show of a value: its contents, without their types.

    Raises InvalidRequest if it has parts without such contents.
    """
    try:
        contents = _contents.decode(value)
        _reject_infinite(contents)
        return msgspec.json.encode(contents)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a value has no JSON form: {error}") from error


def _content_of(code: int, data: memoryview) -> object:
    if code == TAGGED:
        tag, parts = _contents.decode(data)
        if tag == EXACT:
            return parts[0]
        if tag == "tuple":
            return parts
        if tag == INSTANCE:
            module, _, state = parts
            # Pydantic's own classes may be secrets, and have private fields.
            own = not module.startswith("pydantic")
            if own and "__pydantic_private__" not in state:
                return state
    raise ValueError(f"it has a part of the type {code}")


_contents = msgspec.msgpack.Decoder(ext_hook=_content_of)


def _reject_infinite(value: object) -> None:
    """Raise ValueError for what the encoder would turn into null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it has {value}")
    for item in value.values() if isinstance(value, dict) else ():
        _reject_infinite(item)
    for item in value if isinstance(value, list) else ():
        _reject_infinite(item)


def _check(value: object, where: str) -> None:
    """Raise InvalidRequest for a value that the encoder would turn into a text."""
    match value:
        case float() if not math.isfinite(value):
            raise InvalidRequest(f"{where}: {value} has no JSON form")
        case None | bool() | int() | float() | str():
            return
        case list():
            for number, item in enumerate(value):
                _check(item, f"{where}[{number}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidRequest(
                        f"{where}: a key that is not a text has no JSON form"
                    )
                _check(item, f"{where}.{key:.40}")
        case _:
            raise InvalidRequest(f"{where}: a {type(value).__name__} has no JSON form")
