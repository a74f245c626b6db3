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
"""How files begin that lead to a task's module, or its function."""


def format_task_error(error: BaseException) -> str:
    """Return an error as Python prints it, without the calls that led to the task."""
    begin = error.__traceback__
    while begin is not None and _is_on_the_way(begin):
        begin = begin.tb_next
    lines = traceback.format_exception(type(error), error, begin)
    text = "".join(lines).rstrip("\n")
    if len(text) > TRACEBACK_MAX:
        half = TRACEBACK_MAX // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return text


def _is_on_the_way(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_ON_THE_WAY)


RESULT = "result"
"""What the value of a function is called in errors."""

_GIVE_LESS = "give large parts by pool.put, or less at a time"
_RETURN_LESS = (
    "return it in parts, by several calls, or write it to where the caller can read it"
)
_WHAT_IT_WILL_BE = (
    "it stands for a result that is still to come: give its result(), or what awaiting "
    "it returns"
)
_MADE_OF = (
    "give what it is made of: lists, maps with texts as keys, texts, numbers, bytes, "
    "NumPy arrays, dataclasses or Pydantic models"
)


def unsupported_type(where: str, kind: type) -> InvalidRequest:
    """Return the error for a value that MessagePack and we have no word for."""
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    # Futures of Python's and of ours, and what is made like them.
    future = hasattr(kind, "add_done_callback") and hasattr(kind, "result")
    hint = _WHAT_IT_WILL_BE if future else _MADE_OF
    return InvalidRequest(f"{where}: a value of the type {name} cannot be sent; {hint}")


def value_too_large(root: str, size: int, size_max: int) -> TooLarge:
    """Return the error for a value of so many bytes; ``root`` is what it is called."""
    hint = _RETURN_LESS if root == RESULT else _GIVE_LESS
    return TooLarge(
        f"{root} has {size} bytes, more than the limit of {size_max}; {hint}"
    )
