"""The errors of calls on the wire, as Python exceptions; and those of their functions.

The latter are rebuilt from their records, or from their tracebacks.  Exception classes
are looked up among the modules that the program has imported.  A worker cannot cause an
import, and no code of the class runs.
"""

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.client.errors import (
    CodeRefused,
    PlainValuesOnly,
    RemoteTraceback,
    TaskError,
    TaskTimeout,
)
from shoal.domain import errors
from shoal.tasks import exception_record
from shoal.tasks.class_instances import MAIN, find_class, slots_of
from shoal.tasks.registry import main_module_name
from shoal.tasks.values import ValueReader, load_worker_pickle

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


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A failed call: the coordinator's words, and what the program knows of it.

    ``home`` is the local module that defines the function; empty: unknown.  ``trust``
    says whether what the worker sent may be unpickled.
    """

    text: str
    meta: Mapping[str, object]
    home: str = ""
    trust: bool = False

    @property
    def job_id(self) -> str:
        return str(self.meta.get("job", ""))


def call_error(kind: str, failed: FailedCall) -> errors.ShoalError | Exception:
    """Return the exception for a failed call; ``kind`` is its code on the wire.

    Raises PeerError if the kind is unknown.
    """
    if (make := _KINDS.get(kind)) is None:
        raise errors.PeerError(f"a call failed with an unknown error kind: {kind!r}")
    return make(failed)


def _raised(failed: FailedCall) -> Exception:
    record, worker = failed.meta.get("exception"), failed.meta.get("worker")
    return rebuild_exception(
        failed.text,
        failed.job_id,
        record=record if isinstance(record, bytes) else b"",
        worker=str(worker or ""),
        trust=failed.trust,
    )


def _unknown_task(failed: FailedCall) -> errors.UnknownTask:
    text = failed.text
    if source := tasks_argument(failed.home):
        end = "" if text.endswith("?") else ";"
        text += f"{end} a worker with `shoal join … --tasks {source}` would have it"
    return errors.UnknownTask(text)


_KINDS: Mapping[str, Callable[[FailedCall], errors.ShoalError | Exception]] = {
    "raised": _raised,
    "timeout": lambda failed: TaskTimeout(failed.text, job_id=failed.job_id),
    "unknown": _unknown_task,
    "code": lambda failed: CodeRefused(failed.text),
    "values": lambda failed: PlainValuesOnly(failed.text),
    "lost": lambda failed: errors.WorkerLost(failed.text),
    "cancelled": lambda failed: errors.Cancelled(failed.text),
    "busy": lambda failed: errors.QueueFull(failed.text),
    "unavailable": lambda failed: errors.Unavailable(failed.text),
    "invalid": lambda failed: errors.InvalidRequest(failed.text),
    "lacks": lambda failed: errors.Unavailable(
        f"the coordinator does not keep {failed.text}"
    ),
    "too_large": lambda failed: errors.TooLarge(failed.text),
}


HEADING = "Traceback (most recent call last):"
UNRAISABLE = (StopIteration, StopAsyncIteration)
"""Exceptions that a future cannot raise."""

_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?", re.DOTALL)
_SHOAL_ERRORS = "shoal.domain.errors."


def rebuild_exception(
    traceback: str,
    job_id: str = "",
    *,
    record: bytes = b"",
    worker: str = "",
    trust: bool = False,
) -> Exception:
    """Rebuild a function's exception.

    Only classes that are imported are rebuilt: a peer cannot cause an import.  Any
    other exception becomes a TaskError.  With ``trust``, it is unpickled if it was
    pickled.

    Its notes end with the machine, or else the ``worker``, and the job.  The last of
    its causes is the worker's traceback.
    """
    decoded = exception_record.decode_exception(record)
    error = None if decoded is None else _Rebuilder(trust).rebuild(decoded)
    if error is None:
        if decoded is not None and decoded.members:  # each has a traceback in it
            last = _summary(decoded)
        else:
            last = _last_lines(traceback)
        error = _exception_from(last) or TaskError(
            last or "the function failed without a message", traceback, job_id
        )
    machine = decoded.machine if decoded is not None else ""
    _add_note(error, origin_note(machine or worker, job_id))
    *_, first = _causes(error)
    _set_cause(first, RemoteTraceback(traceback))
    return error


def origin_note(machine: str, job_id: str) -> str:
    """Return the note that says where an exception was raised."""
    where = f"on the machine {machine}" if machine else "by a worker"
    return f"raised {where}, in the job {job_id}" if job_id else f"raised {where}"


def _add_note(error: BaseException, note: str) -> None:
    """Add a note, past the code of the class: ``HTTPError`` has a ``__getattr__``."""
    notes = vars(error).get("__notes__")  # which a program may have set to anything
    kept = notes if isinstance(notes, list | tuple) else ()
    vars(error)["__notes__"] = [*kept, note]


def _set_cause(error: BaseException, cause: BaseException) -> None:
    """Set the cause, past the code of the class: frozen dataclasses refuse it."""
    BaseException.__dict__["__cause__"].__set__(error, cause)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class _Rebuilder:
    """Rebuilds exceptions from records."""

    def __init__(self, trust: bool) -> None:
        self._trust = trust
        self._read = ValueReader().read

    def rebuild(self, record: exception_record.ExceptionRecord) -> Exception | None:
        """Return an exception; None if its class is not known here."""
        error = self._unpickled(record) or self._rebuilt(record)
        if error is None:
            return None
        if record.cause is not None:
            _set_cause(error, self._related(record.cause))
        return error

    def _unpickled(self, record: exception_record.ExceptionRecord) -> Exception | None:
        if not (self._trust and record.pickled):
            return None
        try:
            error = load_worker_pickle(memoryview(record.pickled))
        except errors.InvalidRequest:  # its constructor may need other arguments
            return None
        if isinstance(error, UNRAISABLE) or not isinstance(error, Exception):
            return None
        return error

    def _rebuilt(self, record: exception_record.ExceptionRecord) -> Exception | None:
        kind = _known_class(record.name) or _imported_class(record.name)
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
            if name[:2] != "__":
                self._set_field(error, name, packed)
        for note in record.notes:
            _add_note(error, note)
        return error

    def _args(self, record: exception_record.ExceptionRecord) -> list[object]:
        args = self._value(record.args, None)
        if isinstance(args, list):
            return args
        return [record.text] if record.text else []

    def _related(self, record: exception_record.ExceptionRecord) -> Exception:
        """Return a cause or the member of a group."""
        return self.rebuild(record) or TaskError(_summary(record))

    def _set_field(self, error: Exception, name: str, packed: bytes) -> None:
        value = self._value(packed, None)
        kind: Any = type(error)
        member = inspect.getattr_static(kind, name, None)
        if not inspect.ismemberdescriptor(member):
            vars(error)[name] = value  # not setattr, which may run code of the class
        elif name in slots_of(kind) or value is None or isinstance(value, str):
            with suppress(TypeError):  # a member that C code keeps as a number
                member.__set__(error, value)

    def _value(self, packed: bytes, default: Any) -> Any:
        try:
            return self._read(packed) if packed else default
        except errors.InvalidRequest:
            return default


def _summary(record: exception_record.ExceptionRecord) -> str:
    return f"{record.name}: {record.text}" if record.text else record.name


def _instance(kind: type[Exception], args: Sequence[object]) -> Exception | None:
    """Return an exception; ``__init__`` of its own class is not called."""
    base: Any = exception_record.builtin_base(kind)
    try:
        if exception_record.is_validation_error(kind):
            return _validation_error(kind, *args)
        error: Exception = base.__new__(kind, *args)
        base.__init__(error, *args)
    except Exception:  # these are not its arguments; OverflowError is one of many
        return None
    return error


def _validation_error(kind: Any, title: Any, lines: Any = ()) -> Exception | None:
    from pydantic_core import PydanticCustomError

    problems = [
        {"type": PydanticCustomError(type_, message), "loc": where, "input": given}
        for type_, where, message, given in lines
    ]
    error: Exception = kind.from_exception_data(title, problems)
    return error


def _imported_class(name: str) -> type[Exception] | None:
    """Return the exception class with a name in tracebacks, if it is imported here."""
    parts = name.split(".")
    found = find_class(MAIN, name)  # tracebacks do not name it
    for at in range(len(parts) - 1, 0, -1):
        found = found or find_class(".".join(parts[:at]), ".".join(parts[at:]))
    if found is None or not issubclass(found, Exception):
        return None  # SystemExit and similar would end this process
    return None if issubclass(found, UNRAISABLE) else found


def _last_lines(traceback: str) -> str:
    """Return the lines after the last stack, which name the exception."""
    _, heading, stack = traceback.rpartition(HEADING)
    lines = stack.splitlines()
    if not heading:
        return traceback.strip()
    start = next((i for i, line in enumerate(lines) if line and line[0] != " "), 0)
    return "\n".join(lines[start:]).strip()


def _exception_from(last: str) -> Exception | None:
    if (found := _NAMED.fullmatch(last)) is None:
        return None
    name, text = found["name"], found["text"]
    # The text of a KeyError is its key's repr.
    arguments = (
        () if text is None else (_literal(text) if name == "KeyError" else text,)
    )
    class_ = _known_class(name)
    if class_ is None:
        own = _imported_class(name)
        return None if own is None else _instance(own, (text,) if text else ())
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
