"""Error texts of tasks: tracebacks, and why a value cannot be sent.

A traceback begins at the task's own code.
"""

import importlib
import traceback
from pathlib import Path
from types import TracebackType

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.tasks.limits import TRACEBACK_MAX

TASKS_FOLDER = str(Path(__file__).parent)
_ON_THE_WAY = (TASKS_FOLDER, "<frozen importlib", str(Path(importlib.__file__).parent))
"""Prefixes of files whose frames precede those of a task."""


def format_task_error(error: BaseException) -> str:
    """Format a traceback as Python does, beginning at the task's own code."""
    begin = error.__traceback__
    while begin is not None and _is_on_the_way(begin):
        begin = begin.tb_next
    lines = traceback.format_exception(type(error), error, begin)
    text = "".join(lines).rstrip("\n").encode(errors="backslashreplace").decode()
    if len(text) > TRACEBACK_MAX:
        half = TRACEBACK_MAX // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return text


def _is_on_the_way(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_ON_THE_WAY)


RESULT = "result"
"""Name of a function's value in errors."""

_GIVE_LESS = "upload large parts with pool.put, or send less at a time"
_RETURN_LESS = (
    "return it in parts, by several calls, or store it where the caller can read it"
)
_WHAT_IT_WILL_BE = (
    "it is a future: pass its result(), or the value that awaiting it returns"
)
_MADE_OF = (
    "convert it to lists, dictionaries with str keys, str, numbers, bytes, NumPy "
    "arrays, dataclasses or Pydantic models"
)


def unsupported_type(where: str, kind: type) -> InvalidRequest:
    """Return the error for a value whose type cannot be encoded."""
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    # Python's and Shoal's futures, and similar classes.
    future = hasattr(kind, "add_done_callback") and hasattr(kind, "result")
    hint = _WHAT_IT_WILL_BE if future else _MADE_OF
    return InvalidRequest(f"{where}: a value of the type {name} cannot be sent; {hint}")


def unpicklable(where: str, kind: type, error: Exception) -> InvalidRequest:
    """Return the error for a value that pickle refuses."""
    return InvalidRequest(
        f"{where}: a value of the type {kind.__qualname__} cannot be pickled: {error}; "
        "create it in the function, or send what it is made of"
    )


def value_too_large(root: str, size: int, size_max: int) -> TooLarge:
    """Return the error for a value of ``size`` bytes, called ``root``."""
    hint = _RETURN_LESS if root == RESULT else _GIVE_LESS
    return _too_large(root, size, size_max, hint)


def blob_too_large(where: str, size: int, size_max: int) -> TooLarge:
    """Return the error for a part of a value that is sent separately."""
    return _too_large(where, size, size_max, "send it in parts, in several arguments")


def _too_large(where: str, size: int, size_max: int, hint: str) -> TooLarge:
    return TooLarge(
        f"{where} has {size} bytes, more than the limit of {size_max}; {hint}"
    )
