"""The errors of calls on the wire, as Python exceptions."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shoal.client.errors import CodeRefused, PlainValuesOnly, TaskTimeout
from shoal.client.remote_exceptions import rebuild_exception
from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    PeerError,
    QueueFull,
    ShoalError,
    TooLarge,
    Unavailable,
    UnknownTask,
    WorkerLost,
)
from shoal.tasks.class_instances import MAIN
from shoal.tasks.registry import main_module_name

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


def call_error(kind: str, failed: FailedCall) -> ShoalError | Exception:
    """Return the exception for a failed call; ``kind`` is its code on the wire.

    Raises PeerError if the kind is unknown.
    """
    if (make := _KINDS.get(kind)) is None:
        raise PeerError(f"a call failed with an unknown error kind: {kind!r}")
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


def _unknown_task(failed: FailedCall) -> UnknownTask:
    text = failed.text
    if source := tasks_argument(failed.home):
        end = "" if text.endswith("?") else ";"
        text += f"{end} a worker with `shoal join … --tasks {source}` would have it"
    return UnknownTask(text)


_KINDS: Mapping[str, Callable[[FailedCall], ShoalError | Exception]] = {
    "raised": _raised,
    "timeout": lambda failed: TaskTimeout(failed.text, job_id=failed.job_id),
    "unknown": _unknown_task,
    "code": lambda failed: CodeRefused(failed.text),
    "values": lambda failed: PlainValuesOnly(failed.text),
    "lost": lambda failed: WorkerLost(failed.text),
    "cancelled": lambda failed: Cancelled(failed.text),
    "busy": lambda failed: QueueFull(failed.text),
    "unavailable": lambda failed: Unavailable(failed.text),
    "invalid": lambda failed: InvalidRequest(failed.text),
    "lacks": lambda failed: Unavailable(f"the coordinator does not keep {failed.text}"),
    "too_large": lambda failed: TooLarge(failed.text),
}
