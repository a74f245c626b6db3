"""A worker's state for one coordinator, across connections.

It consists of the jobs that still run when a connection breaks, and of the messages
that are not sent yet.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import JobKind
from shoal.domain.worker import MachineHealth

UNSENT_MAX = 64  # messages kept while the coordinator is unreachable
UNSENT_SIZE_MAX = 16 << 20  # characters of these messages
ANSWER_MAX = 16 << 20  # characters of an answer, as far as collected
JOBS_MAX = 4096  # concurrent jobs accepted from a coordinator


@dataclass(slots=True)
class RunningJob:
    """A running job; ``wire_id`` is its id at the coordinator."""

    wire_id: str
    lease: LeaseNumber
    kind: JobKind
    pieces: list[AnswerPiece] = field(default_factory=list)
    size: int = 0  # approximate number of characters


@dataclass(slots=True)
class WorkerJobs:
    """Running jobs, unsent messages, and the machine's health.

    ``acknowledges``: the coordinator has acknowledged a heartbeat, on this connection
    or on one before it.
    """

    running: dict[JobId, RunningJob] = field(default_factory=dict)
    unsent: deque[str] = field(default_factory=deque)
    unsent_size: int = 0
    health: MachineHealth | None = None
    acknowledges: bool = False
    refusal: str = ""  # the coordinator's reason for refusing this worker

    def add(
        self,
        wire_id: str,
        lease: LeaseNumber,
        kind: JobKind,
        beginning: Sequence[AnswerPiece] = (),
    ) -> JobId | None:
        """Record a running job; return its local id, or None if it runs already.

        Each lease of a job has an id of its own.  The answer includes the ``beginning``
        by another, because the signature covers the whole.
        """
        job_id = JobId(f"{wire_id}#{lease}" if lease else wire_id)
        if job_id in self.running:
            return None
        size = sum(len(e) if isinstance(e, str) else e.size for e in beginning)
        self.running[job_id] = RunningJob(wire_id, lease, kind, [*beginning], size)
        return job_id

    def keep_unsent(self, message: str) -> None:
        """Keep a message for later; beyond the limits, drop the oldest.

        By then, the coordinator has requeued the jobs of the oldest.
        """
        self.unsent.append(message)
        self.unsent_size += len(message)
        while len(self.unsent) > UNSENT_MAX or self.unsent_size > UNSENT_SIZE_MAX:
            self.unsent_size -= len(self.unsent.popleft())

    def drain_unsent(self) -> list[str]:
        """Return the unsent messages, oldest first, and clear them."""
        unsent = list(self.unsent)
        self.unsent.clear()
        self.unsent_size = 0
        return unsent
