"""Converts tasks in JSON to calls of functions, and their results back."""

from collections.abc import Mapping, Sequence

import msgspec

from shoal.domain.errors import InvalidRequest
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


def _check(value: object, where: str) -> None:
    """Raise InvalidRequest for a value that the encoder would turn into a text."""
    match value:
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
