"""Callbacks for a job, for callers that do not wait for it in a task."""

from typing import Protocol

from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult


class EndedJob(Protocol):
    """A job that has ended: its outcome, and the worker that had it last."""

    @property
    def job_id(self) -> JobId: ...

    @property
    def worker_id(self) -> WorkerId | None: ...

    @property
    def lease(self) -> LeaseNumber: ...

    @property
    def end(self) -> Outcome | ShoalError | None: ...


class JobListener(Protocol):
    """Callbacks for the events of a job.  They must neither wait nor raise.

    A task and a future per job would be most of the cost of a short call.
    """

    def on_accepted(self, job_id: JobId) -> None:
        """The job is accepted; if it is durable, it is in the store."""

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        """A worker got the job."""

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        """The worker reports progress of a call."""

    def on_results(self, results: list[CallResult]) -> None:
        """Calls in a call stream returned."""

    def on_end(self, job: EndedJob) -> None:
        """The job has ended: done, failed, or refused at once."""

    def runs(self, number: int) -> bool:
        """Return whether a call of a call stream is with its worker."""
