"""What a worker keeps for one coordinator, across its connections.

That is the jobs which still run when a connection breaks, and the messages that could
not be sent.
"""

from collections import deque
from dataclasses import dataclass, field

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import JobKind
from shoal.domain.worker import MachineHealth

UNSENT_MAX = 64  # messages kept for a coordinator that cannot be reached
UNSENT_SIZE_MAX = 16 << 20  # characters of them
ANSWER_MAX = 16 << 20  # characters of an answer that is being put together
JOBS_MAX = 4096  # jobs that a coordinator may give us at a time


@dataclass(slots=True)
class RunningJob:
    """A job that the worker does; ``wire_id`` is what the coordinator calls it."""

    wire_id: str
    lease: LeaseNumber
    kind: JobKind
    pieces: list[AnswerPiece] = field(default_factory=list)
    size: int = 0  # characters, about


@dataclass(slots=True)
class WorkerJobs:
    """The jobs at work, what could not be said yet, and how the machine is doing."""

    running: dict[JobId, RunningJob] = field(default_factory=dict)
    kept: deque[str] = field(default_factory=deque)
    kept_size: int = 0
    health: MachineHealth | None = None
    refusal: str = ""  # what the coordinator said when it would not have us

    def add(
        self, wire_id: str, lease: LeaseNumber, kind: JobKind, continues: str = ""
    ) -> JobId | None:
        """Note a job; return our name for it, or None if it is at work already.

        Two leases of one job have different names.  What an answer ``continues`` is a
        part of it: signed is the whole.
        """
        job_id = JobId(f"{wire_id}#{lease}" if lease else wire_id)
        if job_id in self.running:
            return None
        begun: list[AnswerPiece] = [continues] if continues else []
        self.running[job_id] = RunningJob(wire_id, lease, kind, begun, len(continues))
        return job_id

    def keep_unsent(self, message: str) -> None:
        """Keep a message for later.  When there are too many, the oldest are lost.

        Whom they are for has given those jobs to others long since.
        """
        self.kept.append(message)
        self.kept_size += len(message)
        while len(self.kept) > UNSENT_MAX or self.kept_size > UNSENT_SIZE_MAX:
            self.kept_size -= len(self.kept.popleft())

    def drain_unsent(self) -> list[str]:
        """Return what was kept, oldest first, and forget it."""
        kept = list(self.kept)
        self.kept.clear()
        self.kept_size = 0
        return kept
