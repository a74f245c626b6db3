"""Open jobs that the pool does not know, because call streams carry them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from shoal.coordinator.answer_reader import AnswerStream
from shoal.domain.ids import JobId


class CarriedJobs(Protocol):
    """The port to components that run jobs for the hub; see ``shoal.calls.durable``."""

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; return whether it was open."""
        ...

    def cancel_all_of(self, owner: str, reason: str) -> int:
        """Cancel all open jobs of an owner; return their number."""
        ...

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerStream | None]:
        """Read a job's answer; None if the job is not open."""
        ...

    async def stored(self) -> None:
        """Wait until all that has happened so far is in the store.

        Raises StoreError.
        """
        ...


class NoCarriedJobs:
    """There are none."""

    def cancel(self, job_id: JobId, reason: str) -> bool:
        return False

    def cancel_all_of(self, owner: str, reason: str) -> int:
        return 0

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerStream | None]:
        return nullcontext(None)

    async def stored(self) -> None:
        pass
