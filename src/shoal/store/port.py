"""What the runtime needs from a database."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.facts import Fact
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Job, Outcome
from shoal.pool.lifecycle import JobState


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as the store has it.  Times are Unix seconds."""

    job: Job
    state: JobState
    lease: LeaseNumber
    submitted_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A fact and when it was recorded, in Unix seconds."""

    at: float
    fact: Fact


class Store(Protocol):
    """Tables hold the state, ``facts`` holds the story; both change together."""

    async def append(self, facts: Sequence[Fact], at: float) -> None:
        """Record facts, all or none; they are on disk when this returns.

        Raises StoreError.
        """
        ...

    async def open_jobs(self) -> list[StoredJob]:
        """Return the jobs that have not ended, oldest first."""
        ...

    async def job(self, job_id: JobId) -> StoredJob | None: ...

    async def story(self, job_id: JobId) -> list[Recorded]:
        """Return what happened to a job, in order."""
        ...

    async def models(self, since: float) -> set[str]:
        """Return the models of the workers that have joined since."""
        ...

    async def prune(self, before: float) -> int:
        """Forget jobs that ended before then, and their story; say how many."""
        ...

    async def close(self) -> None: ...
