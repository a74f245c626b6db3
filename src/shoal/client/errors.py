"""Converts the errors of calls to Python exceptions.

User-defined exception classes are looked up in the module of the called function, which
the program has already imported, and in the modules that it refers to.  A worker cannot
cause an import, and no code of the class runs.
"""

import ast
import builtins
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from shoal.domain import errors
from shoal.domain.errors import (
    Cancelled,
    ClientError,
    InvalidRequest,
    JobError,
    PeerError,
    QueueFull,
    ShoalError,
    TooLarge,
    Unavailable,
    UnknownTask,
    WorkerLost,
)
from shoal.tasks.registry import main_module_name

MAIN = "__main__"
NO_MODULE = ModuleType("nowhere")


def home_module(name: str, function: object = None) -> str:
    """Return the module of a task's function; empty: unknown.

    Without the function, it is the module named in the task name, if that defines it.
    """
    known: object = getattr(function, "__module__", None)
    if isinstance(known, str):
        return known
    module, _, last = name.rpartition(".")
    home = MAIN if module == main_module_name() else module
    return home if last in vars(sys.modules.get(home, NO_MODULE)) else ""


def tasks_argument(home: str) -> str:
    """Return the ``--tasks`` argument for a module; empty: it has no file."""
    if home != MAIN:
        return home
    file = getattr(sys.modules.get(MAIN), "__file__", None)
    return Path(file).name if file else ""


def own_exception(home: str, name: str, text: str) -> Exception | None:
    """Return an exception of the class named in a traceback, or None.

    Its ``__init__`` is not called: it has its text, but none of its own attributes.
    """
    found = _find_class(home, name)
    if found is None:
        return None
    base = next(each for each in found.__mro__ if each.__module__ == "builtins")
    exception: Exception = base.__new__(found)  # type: ignore[call-overload]  # no type's
    exception.args = (text,) if text else ()
    return exception


def _find_class(home: str, name: str) -> type[Exception] | None:
    module = sys.modules.get(home)
    if module is None:
        return None
    where, _, last = name.rpartition(".")
    for each in [*vars(module).values()]:
        if isinstance(each, ModuleType) and each.__name__ == where:
            each = _namespace(each).get(last)
        if (
            isinstance(each, type)
            and issubclass(each, Exception)
            and not issubclass(
                each, StopIteration | StopAsyncIteration | ExceptionGroup
            )
            and name in _names(each)
        ):
            return each
    return None


def _namespace(module: ModuleType) -> Mapping[str, object]:
    return vars(module)  # not getattr, which may run the module's code


def _names(kind: type) -> tuple[str, ...]:
    """Return the names of a class in tracebacks, local and remote."""
    if kind.__module__ == MAIN:
        return kind.__qualname__, f"{main_module_name()}.{kind.__qualname__}"
    return (f"{kind.__module__}.{kind.__qualname__}",)


HEADING = "Traceback (most recent call last):"
_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?", re.DOTALL)
_SHOAL_ERRORS = "shoal.domain.errors."


class RemoteTraceback(ShoalError):
    """The worker's traceback: the ``__cause__`` of an exception of a call."""

    def __str__(self) -> str:
        # Formatted like concurrent.futures.process._RemoteTraceback.
        return f'\n"""\n{self.args[0]}"""'


class TaskError(JobError):
    """A call failed on its worker, with an exception that cannot be rebuilt here.

    Attributes:
        traceback: the worker's, as text; empty if there is none.
        job_id: for ``shoal jobs explain``; empty if the call was not durable.
    """

    def __init__(self, message: str, traceback: str = "", job_id: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.job_id = job_id

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.traceback, self.job_id)


class TaskTimeout(TaskError, TimeoutError):
    """A call ran longer than its ``timeout``, or waited longer than its ``queue``."""


class CodeRefused(ClientError):
    """No worker runs functions that clients send: none has ``--trust-code``."""


class PlainValuesOnly(ClientError):
    """The workers that have the function accept only the types of MessagePack."""


class ConnectionLost(Unavailable, ConnectionError):
    """The coordinator is unreachable, or the connection to it broke."""


def call_error(
    kind: str, text: str, meta: Mapping[str, object], home: str = ""
) -> ShoalError | Exception:
    """Return the exception for a failed call; ``kind`` is its code on the wire.

    ``home`` is the local module that defines the function; empty: unknown.

    Raises PeerError if the kind is unknown.
    """
    if (make := _KINDS.get(kind)) is None:
        raise PeerError(f"a call failed with an unknown error kind: {kind!r}")
    return make(text, _job(meta), home)


def rebuild_exception(traceback: str, job_id: str = "", home: str = "") -> Exception:
    """Rebuild a function's exception from the last lines of its traceback.

    Only classes from Python, Shoal and the function's module ``home`` are rebuilt: a
    peer cannot cause an import.  Any other exception becomes a TaskError.
    """
    error = _exception_from(_last_lines(traceback), home) or TaskError(
        _last_lines(traceback) or "the function failed without a message",
        traceback,
        job_id,
    )
    error.__cause__ = RemoteTraceback(traceback)
    return error


def _job(meta: Mapping[str, object]) -> str:
    return str(meta.get("job", ""))


def _last_lines(traceback: str) -> str:
    """Return the lines after the last stack, which name the exception."""
    _, heading, stack = traceback.rpartition(HEADING)
    lines = stack.splitlines()
    if not heading:
        return traceback.strip()
    start = next((i for i, line in enumerate(lines) if line and line[0] != " "), 0)
    return "\n".join(lines[start:]).strip()


def _exception_from(last: str, home: str) -> Exception | None:
    if (found := _NAMED.fullmatch(last)) is None:
        return None
    name, text = found["name"], found["text"]
    # The text of a KeyError is its key's repr.
    arguments = (
        () if text is None else (_literal(text) if name == "KeyError" else text,)
    )
    class_ = _known_class(name)
    if class_ is None:
        return own_exception(home, name, text or "")
    try:
        return class_(*arguments)
    except TypeError:  # its constructor needs other arguments
        return None


def _known_class(name: str) -> type[Exception] | None:
    known = (
        getattr(errors, name.removeprefix(_SHOAL_ERRORS), None)
        if name.startswith(_SHOAL_ERRORS)
        else getattr(builtins, name, None)
    )
    if not isinstance(known, type) or not issubclass(known, Exception):
        return None  # SystemExit and similar would end this process
    if issubclass(known, StopIteration | StopAsyncIteration):
        return None  # a future cannot raise them
    return known


def _literal(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def _unknown_task(text: str, job_id: str, home: str) -> UnknownTask:
    if source := tasks_argument(home):
        end = "" if text.endswith("?") else ";"
        text += f"{end} a worker with `shoal join … --tasks {source}` would have it"
    return UnknownTask(text)


_KINDS: Mapping[str, Callable[[str, str, str], ShoalError | Exception]] = {
    "raised": rebuild_exception,
    "timeout": lambda text, job, _: TaskTimeout(text, job_id=job),
    "unknown": _unknown_task,
    "code": lambda text, *_: CodeRefused(text),
    "values": lambda text, *_: PlainValuesOnly(text),
    "lost": lambda text, *_: WorkerLost(text),
    "cancelled": lambda text, *_: Cancelled(text),
    "busy": lambda text, *_: QueueFull(text),
    "unavailable": lambda text, *_: Unavailable(text),
    "invalid": lambda text, *_: InvalidRequest(text),
    "lacks": lambda text, *_: Unavailable(f"the coordinator does not keep {text}"),
    "too_large": lambda text, *_: TooLarge(text),
}
