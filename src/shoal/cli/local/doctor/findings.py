"""What `shoal doctor` finds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from shoal.client.coordinator import CoordinatorApi
from shoal.config import ServeConfig
from shoal.processes.programs import RunProgram, program_output


class Severity(Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; the remedy is empty if there is nothing to do."""

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """The machine and the coordinator that are examined.

    ``serve`` are the settings that `shoal serve` would have here; ``health`` is the
    coordinator's report of its health, and None if it does not answer.
    """

    api: CoordinatorApi
    serve: ServeConfig
    health: Mapping[str, Any] | None = None
    run: RunProgram = field(default=program_output)

    @property
    def folder(self) -> Path:
        """The data folder."""
        return self.serve.data_dir.expanduser()


Check: TypeAlias = Callable[[Examined], Iterator[Finding]]


def ok(subject: str, text: str) -> Finding:
    """Return a finding without a remedy."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding about what could be better."""
    return Finding(Severity.WARNING, subject, text, remedy)


def failed(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding about what does not work."""
    return Finding(Severity.FAILED, subject, text, remedy)
