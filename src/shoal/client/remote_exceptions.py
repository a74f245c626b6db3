"""Rebuilds the exceptions of functions from their records, or from their tracebacks.

User-defined exception classes are looked up in the module of the called function, which
the program has already imported, and in the modules that it refers to.  A worker cannot
cause an import, and no code of the class runs.
"""

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from shoal.client.errors import RemoteTraceback, TaskError
from shoal.domain import errors
from shoal.domain.errors import InvalidRequest
from shoal.tasks.exception_record import (
    ExceptionRecord,
    builtin_base,
    decode_exception,
)
from shoal.tasks.registry import main_module_name
from shoal.tasks.values import ValueReader, load_worker_pickle

MAIN = "__main__"
HEADING = "Traceback (most recent call last):"
UNRAISABLE = (StopIteration, StopAsyncIteration)
"""Exceptions that a future cannot raise."""

_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?", re.DOTALL)
_SHOAL_ERRORS = "shoal.domain.errors."


def rebuild_exception(
    traceback: str,
    job_id: str = "",
    home: str = "",
    *,
    record: bytes = b"",
    worker: str = "",
    trust: bool = False,
) -> Exception:
    """Rebuild a function's exception.

    Only classes from Python, Shoal and the function's module ``home`` are rebuilt: a
    peer cannot cause an import.  Any other exception becomes a TaskError.  With
    ``trust``, it is unpickled if it was pickled.

    Its notes end with the machine, or else the ``worker``, and the job.  The last of
    its causes is the worker's traceback.
    """
    decoded = decode_exception(record)
    error = None if decoded is None else _Rebuilder(home, trust).rebuild(decoded)
    if error is None:
        last = _last_lines(traceback)
        error = _exception_from(last, home) or TaskError(
            last or "the function failed without a message", traceback, job_id
        )
    machine = decoded.machine if decoded is not None else ""
    error.add_note(origin_note(machine or worker, job_id))
    *_, first = _causes(error)
    first.__cause__ = RemoteTraceback(traceback)
    return error


def origin_note(machine: str, job_id: str) -> str:
    """Return the note that says where an exception was raised."""
    where = f"on the machine {machine}" if machine else "by a worker"
    return f"raised {where}, in the job {job_id}" if job_id else f"raised {where}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class _Rebuilder:
    """Rebuilds exceptions from records."""

    def __init__(self, home: str, trust: bool) -> None:
        self._home = home
        self._trust = trust
        self._read = ValueReader().read

    def rebuild(self, record: ExceptionRecord) -> Exception | None:
        """Return an exception; None if its class is not known here."""
        error = self._unpickled(record) or self._rebuilt(record)
        if error is None:
            return None
        if record.cause is not None:
            error.__cause__ = self._related(record.cause)
        return error

    def _unpickled(self, record: ExceptionRecord) -> Exception | None:
        if not (self._trust and record.pickled):
            return None
        try:
            error = load_worker_pickle(memoryview(record.pickled))
        except InvalidRequest:  # its constructor may need other arguments
            return None
        if isinstance(error, UNRAISABLE) or not isinstance(error, Exception):
            return None
        return error

    def _rebuilt(self, record: ExceptionRecord) -> Exception | None:
        kind = _known_class(record.name) or _find_class(self._home, record.name)
        if kind is None:
            return None
        if record.members and not issubclass(kind, ExceptionGroup):
            return None
        args = self._args(record)
        if issubclass(kind, ExceptionGroup):
            args = [*args, [self._related(each) for each in record.members]]
        if (error := _instance(kind, args)) is None:
            return None
        for name, packed in record.fields.items():
            self._set_field(error, name, packed)
        for note in record.notes:
            error.add_note(note)
        return error

    def _args(self, record: ExceptionRecord) -> list[object]:
        args = self._value(record.args, None)
        if not isinstance(args, list):
            return [record.text] if record.text else []
        return [
            tuple(arg) if at in record.tuples and isinstance(arg, list) else arg
            for at, arg in enumerate(args)
        ]

    def _related(self, record: ExceptionRecord) -> Exception:
        """Return a cause or the member of a group."""
        text = f"{record.name}: {record.text}" if record.text else record.name
        return self.rebuild(record) or TaskError(text)

    def _set_field(self, error: Exception, name: str, packed: bytes) -> None:
        value = self._value(packed, None)
        member = inspect.getattr_static(builtin_base(type(error)), name, None)
        if not inspect.ismemberdescriptor(member):
            vars(error)[name] = value  # not setattr, which may run code of the class
        elif value is None or isinstance(value, str):
            member.__set__(error, value)

    def _value(self, packed: bytes, default: Any) -> Any:
        try:
            return self._read(packed) if packed else default
        except InvalidRequest:
            return default


def _instance(kind: type[Exception], args: Sequence[object]) -> Exception | None:
    """Return an exception; ``__init__`` of its own class is not called."""
    base: Any = builtin_base(kind)
    try:
        error: Exception = base.__new__(kind, *args)
        base.__init__(error, *args)
    except (TypeError, ValueError):  # these are not its arguments
        return None
    return error


def own_exception(home: str, name: str, text: str) -> Exception | None:
    """Return an exception of the class named in a traceback, or None.

    It has its text, but none of its own attributes.
    """
    found = _find_class(home, name)
    if found is None:
        return None
    return _instance(found, (text,) if text else ())


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
            and not issubclass(each, UNRAISABLE)
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
    if issubclass(known, UNRAISABLE):
        return None
    return known


def _literal(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value
