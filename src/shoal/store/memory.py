"""A store that forgets when the process ends, for trials and the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import assert_never

from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFact,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.pool.lifecycle import ENDED, JobState, after
from shoal.store.memory_keys import MemoryKeys
from shoal.store.port import Recorded, StoredJob


class MemoryStore:
    """Keeps everything in dictionaries."""

    def __init__(self) -> None:
        self.keys = MemoryKeys()
        self._jobs: dict[JobId, StoredJob] = {}
        self._named: dict[tuple[str, str], JobId] = {}  # by owner and idempotency key
        self._stories: dict[JobId, list[Recorded]] = {}
        self._models: dict[str, float] = {}  # when a worker joined with it last

    async def append(
        self, facts: Sequence[Fact], at: float, earlier: Sequence[Recorded] = ()
    ) -> None:
        for each in earlier:
            await self.append([each.fact], each.at)
        changed: dict[JobId, StoredJob] = {}
        told: list[tuple[JobId, Recorded]] = []
        joined: dict[str, float] = {}
        for fact in facts:
            match fact:
                case WorkerJoined(offer=offer):
                    joined |= dict.fromkeys(offer.models, at)
                    continue
                case WorkerDraining() | WorkerLost():
                    continue
                case JobSubmitted(job):
                    if job.id in self._jobs or job.id in changed:
                        raise StoreError(f"there is a job {job.id} already")
                    none = LeaseNumber(0)
                    changed[job.id] = StoredJob(job, JobState.QUEUED, none, at)
                case CameLate():
                    pass
                case _:
                    stored = changed.get(fact.job_id) or self._jobs.get(fact.job_id)
                    if stored is None:
                        raise StoreError(f"there is no job {fact.job_id}")
                    changed[fact.job_id] = _after(stored, fact, at)
            told.append((fact.job_id, Recorded(at, fact)))
        self._jobs |= changed
        self._models |= joined
        for fact in facts:
            if isinstance(fact, JobSubmitted) and fact.job.idempotency_key:
                self._named[fact.job.owner, fact.job.idempotency_key] = fact.job.id
            elif isinstance(fact, JobCompleted):
                self.keys.count_usage(changed[fact.job_id].job, fact.outcome, at)
            elif isinstance(fact, JobCancelled | JobExpired):
                self.keys.count_usage(changed[fact.job_id].job, fact.written, at)
        for job_id, recorded in told:
            if job_id in self._jobs:
                self._stories.setdefault(job_id, []).append(recorded)

    async def open_jobs(self) -> list[StoredJob]:
        return [job for job in self._jobs.values() if job.state not in ENDED]

    async def job(self, job_id: JobId) -> StoredJob | None:
        return self._jobs.get(job_id)

    async def recent(
        self, owner: str | None, state: JobState | None, limit: int
    ) -> list[StoredJob]:
        wanted = (
            stored
            for stored in reversed(self._jobs.values())
            if owner in (None, stored.job.owner) and state in (None, stored.state)
        )
        return list(islice(wanted, limit))

    async def named(self, owner: str, idempotency_key: str) -> StoredJob | None:
        job_id = self._named.get((owner, idempotency_key))
        return None if job_id is None else self._jobs[job_id]

    async def story(self, job_id: JobId) -> list[Recorded]:
        return list(self._stories.get(job_id, ()))

    async def models(self, since: float) -> set[str]:
        return {model for model, at in self._models.items() if at >= since}

    async def prune(self, before: float) -> int:
        old = [
            job_id
            for job_id, job in self._jobs.items()
            if job.ended_at is not None and job.ended_at < before
        ]
        for job_id in old:
            job = self._jobs.pop(job_id).job
            del self._stories[job_id]
            name = (job.owner, job.idempotency_key)
            if self._named.get(name) == job_id:
                del self._named[name]
        self.keys.forget_ended(before)
        return len(old)

    async def close(self) -> None:
        pass


def _after(stored: StoredJob, fact: JobFact, at: float) -> StoredJob:
    stored = replace(stored, state=after(stored.state, fact))
    match fact:
        case JobLeased(lease=lease) | JobHedged(lease=lease):
            return replace(stored, lease=lease)
        case JobStarted() | JobRequeued() | JobSubmitted() | JobUnhedged():
            return stored
        case JobCompleted(outcome=outcome):
            return replace(stored, ended_at=at, outcome=outcome)
        case JobFailed(error=error) | JobExpired(error=error):
            return replace(stored, ended_at=at, error=error)
        case JobCancelled(reason=reason):
            return replace(stored, ended_at=at, error=reason)
        case _:
            assert_never(fact)
