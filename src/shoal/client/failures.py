"""Why a call has no value: what the coordinator says, as Python exceptions."""

import ast
import builtins
import re
from collections.abc import Callable, Mapping

from shoal.client.own_errors import own_error, source_of
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

HEADING = "Traceback (most recent call last):"
_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?", re.DOTALL)
_OURS = "shoal.domain.errors."


class RemoteTraceback(ShoalError):
    """The traceback on the worker: the ``__cause__`` of what a function raised."""

    def __str__(self) -> str:
        # As Python's own process pools show it: apart from the traceback around it.
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


def failure(
    kind: str, text: str, meta: Mapping[str, object], home: str = ""
) -> ShoalError | Exception:
    """Return the exception for a call that failed; ``kind`` is the wire's word.

    ``home`` is the module here that has the function; empty: none is known.

    Raises PeerError if there is no such kind.
    """
    if (make := _KINDS.get(kind)) is None:
        raise PeerError(f"a call failed in a way that is not known: {kind!r}")
    return make(text, _job(meta), home)


def rebuilt(traceback: str, job_id: str = "", home: str = "") -> Exception:
    """Return what a function raised, as far as the last lines of its traceback tell.

    Only classes that Python, Shoal itself or the function's own module ``home`` has are
    built again: nothing is imported because a peer names it.  Anything else is a
    TaskError.
    """
    error = _named(_last(traceback), home) or TaskError(
        _last(traceback) or "the function failed without a word", traceback, job_id
    )
    error.__cause__ = RemoteTraceback(traceback)
    return error


def _job(meta: Mapping[str, object]) -> str:
    return str(meta.get("job", ""))


def _last(traceback: str) -> str:
    """Return the lines that name the exception: all after the last stack."""
    _, heading, stack = traceback.rpartition(HEADING)
    lines = stack.splitlines()
    if not heading:
        return traceback.strip()
    start = next((i for i, line in enumerate(lines) if line and line[0] != " "), 0)
    return "\n".join(lines[start:]).strip()


def _named(last: str, home: str) -> Exception | None:
    if (found := _NAMED.fullmatch(last)) is None:
        return None
    name, text = found["name"], found["text"]
    # A KeyError shows its key as Python would write it.
    arguments = (
        () if text is None else (_literal(text) if name == "KeyError" else text,)
    )
    class_ = _class(name)
    if class_ is None:
        return own_error(home, name, text or "")
    try:
        return class_(*arguments)
    except TypeError:  # it takes more than a text
        return None


def _class(name: str) -> type[Exception] | None:
    known = (
        getattr(errors, name.removeprefix(_OURS), None)
        if name.startswith(_OURS)
        else getattr(builtins, name, None)
    )
    if not isinstance(known, type) or not issubclass(known, Exception):
        return None  # SystemExit and the like end a process, and not this one
    if issubclass(known, StopIteration | StopAsyncIteration):
        return None  # a future cannot raise them
    return known


def _literal(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def _unknown(text: str, job_id: str, home: str) -> UnknownTask:
    if source := source_of(home):
        end = "" if text.endswith("?") else ";"
        text += f"{end} a worker with `shoal join … --tasks {source}` would have it"
    return UnknownTask(text)


_KINDS: Mapping[str, Callable[[str, str, str], ShoalError | Exception]] = {
    "raised": rebuilt,
    "timeout": lambda text, job, _: TaskTimeout(text, job_id=job),
    "unknown": _unknown,
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
