"""Errors of tasks as text, which begin where the task's own code does."""

import importlib
import traceback
from pathlib import Path
from types import TracebackType

from shoal.tasks.limits import TRACEBACK_MAX

OURS = str(Path(__file__).parent)
_ON_THE_WAY = (OURS, "<frozen importlib", str(Path(importlib.__file__).parent))
"""How files begin that lead to a task's module, or its function."""


def told(error: BaseException) -> str:
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
