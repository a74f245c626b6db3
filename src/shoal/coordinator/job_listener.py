"""Callbacks for a job, for callers that do not wait for it in a task."""

from typing import Protocol

from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult


class EndedJob(Protocol):
    """A job that has ended: how it did, and who had it last."""

    job_id: JobId
    worker_id: WorkerId | None
    lease: LeaseNumber

    @property
    def end(self) -> Outcome | ShoalError | None: ...


class JobListener(Protocol):
    """Is told of a job's turns as they come, and must neither wait nor raise.

    A task and a future for each job would be most of what a short call costs.
    """

    def on_accepted(self, job_id: JobId) -> None:
        """Take note that the job is in the store, if it is to be kept."""
        ...

    def on_leased(
        self, job_id: JobId, lease: LeaseNumber, peer: WorkerConnection
    ) -> None:
        """Take note that a worker was told to do the job."""
        ...

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        """Take note of how far a call has come."""
        ...

    def on_results(self, results: list[CallResult]) -> None:
        """Take what came of calls in a lane."""
        ...

    def on_end(self, job: EndedJob) -> None:
        """Take note that the job has ended: done, failed, or refused at once."""
        ...
