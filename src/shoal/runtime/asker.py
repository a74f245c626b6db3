"""Who has a job done without waiting for it in a task: is told, and never asks."""

from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import LaneReturn
from shoal.runtime.peers import Peer


class Ended(Protocol):
    """A job that has ended: how it did, and who had it last."""

    job_id: JobId
    worker_id: WorkerId | None
    lease: LeaseNumber

    @property
    def end(self) -> Outcome | ShoalError | None: ...


class Asker(Protocol):
    """Is told of a job's turns as they come, and must neither wait nor raise.

    A task and a future for each job would be most of what a short call costs.
    """

    def accepted(self, job_id: JobId) -> None:
        """Take note that the job is in the store, if it is to be kept."""
        ...

    def leased(self, job_id: JobId, lease: LeaseNumber, peer: Peer) -> None:
        """Take note that a worker was told to do the job."""
        ...

    def advanced(self, job_id: JobId, share: float | None, remark: str) -> None:
        """Take note of how far a call has come."""
        ...

    def returned(self, returns: list[LaneReturn]) -> None:
        """Take what came of calls in a lane."""
        ...

    def ended(self, job: Ended) -> None:
        """Take note that the job has ended: done, failed, or refused at once."""
        ...
