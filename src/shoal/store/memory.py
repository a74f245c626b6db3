"""A store that forgets when the process ends, for trials and the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile, islice
from typing import assert_never

from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
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
    WorkerLeft,
    WorkerLoadChanged,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Job
from shoal.pool.lifecycle import ENDED, JobState, after
from shoal.store.ledger import NO_ENTRIES, LedgerEntries
from shoal.store.memory_keys import MemoryKeys
from shoal.store.memory_ledger import MemoryLedger
from shoal.store.memory_pairing import MemoryPairing
from shoal.store.memory_webhooks import MemoryWebhooks
from shoal.store.port import (
    JobFilter,
    RecordedFact,
    StoredJob,
    StoredJobSummary,
    summarize,
    without_content,
)

NO_LEASE = LeaseNumber(0)


class MemoryStore:
    """Keeps everything in dictionaries."""

    def __init__(self) -> None:
        self.keys = MemoryKeys()
        self.ledger = MemoryLedger(self._owner_of)
        self.webhooks = MemoryWebhooks()
        self._trusted: dict[WorkerTrusted, float] = {}  # since when
        self.pairing = MemoryPairing(self._trusted)
        self._marked: list[RecordedFact] = []
        self._jobs: dict[JobId, StoredJob] = {}
        self._named: dict[tuple[str, str], JobId] = {}  # by owner and idempotency key
        self._stories: dict[JobId, list[RecordedFact]] = {}
        self._models: dict[str, float] = {}  # when a worker joined with it last

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
    ) -> None:
        for each in earlier:
            await self.append([each.fact], each.at)
        changed = self._changed(facts, at)
        # From here on nothing fails: all of it is written, or none was.
        self._jobs |= changed
        self.ledger.write(entries, at)
        self.webhooks.write(entries.deliveries, at)
        for fact in facts:
            self._write(fact, at)

    async def open_jobs(self) -> list[StoredJob]:
        return [job for job in self._jobs.values() if job.state not in ENDED]

    async def job(self, job_id: JobId) -> StoredJob | None:
        return self._jobs.get(job_id)

    async def summary(self, job_id: JobId) -> StoredJobSummary | None:
        stored = self._jobs.get(job_id)
        return None if stored is None else summarize(stored)

    async def recent(self, wanted: JobFilter, limit: int) -> list[StoredJobSummary]:
        newest = iter(reversed(self._jobs.values()))
        if wanted.before is not None:
            newest = dropwhile(lambda each: each.job.id != wanted.before, newest)
            next(newest, None)
        found = (
            summarize(stored)
            for stored in newest
            if wanted.owner in (None, stored.job.owner)
            and (not wanted.states or stored.state in wanted.states)
            and wanted.user in (None, stored.job.terms.user)
            and wanted.kind in (None, stored.job.kind)
        )
        return list(islice(found, limit))

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> StoredJob | None:
        job_id = self._named.get((owner, idempotency_key))
        return None if job_id is None else self._jobs[job_id]

    async def history(self, job_id: JobId) -> list[RecordedFact]:
        return list(self._stories.get(job_id, ()))

    async def history_since(self, job_id: JobId, after: int) -> list[RecordedFact]:
        return [
            replace(each, fact=without_content(each.fact))
            for each in self._stories.get(job_id, ())[after:]
        ]

    async def trusted_workers(self) -> list[WorkerTrusted]:
        return list(self._trusted)

    async def penalties_since(self, since: float) -> list[RecordedFact]:
        return [marked for marked in self._marked if marked.at >= since]

    async def models_since(self, since: float) -> set[str]:
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
        self.webhooks.forget(old)
        self.keys.forget_ended(before)
        self.pairing.forget_expired(before)
        return len(old)

    async def close(self) -> None:
        pass

    def _changed(self, facts: Sequence[Fact], at: float) -> dict[JobId, StoredJob]:
        """Return the jobs that facts change, as they are then.

        Raises StoreError for a job that is there already, or is not there.
        """
        changed: dict[JobId, StoredJob] = {}
        for fact in facts:
            if isinstance(fact, JobSubmitted):
                job = fact.job
                if job.id in self._jobs or job.id in changed:
                    raise StoreError(f"there is a job {job.id} already")
                changed[job.id] = StoredJob(job, JobState.QUEUED, NO_LEASE, at)
            elif isinstance(fact, JobFact):
                stored = changed.get(fact.job_id) or self._jobs.get(fact.job_id)
                if stored is None:
                    raise StoreError(f"there is no job {fact.job_id}")
                changed[fact.job_id] = _after(stored, fact, at)
        return changed

    def _write(self, fact: Fact, at: float) -> None:
        """Write what a fact changes beside the state of its job."""
        match fact:
            case WorkerJoined(offer=offer):
                self._models |= dict.fromkeys(offer.models, at)
            case WorkerMarked():
                self._marked.append(RecordedFact(at, fact))
            case WorkerTrusted():
                self._trusted.setdefault(fact, at)
            case AccountLimited():
                self.ledger.limit(fact)
            case (
                WorkerDraining()
                | WorkerLoadChanged()
                | WorkerLeft()
                | AccountCredited()
            ):
                pass
            case _:
                stored = self._jobs.get(fact.job_id)
                if stored is not None:  # else pruned: nobody could ask for its story
                    self._tell(stored.job, RecordedFact(at, fact))

    def _tell(self, job: Job, recorded: RecordedFact) -> None:
        fact, at = recorded.fact, recorded.at
        self._stories.setdefault(job.id, []).append(recorded)
        if isinstance(fact, JobSubmitted) and job.idempotency_key:
            self._named[job.owner, job.idempotency_key] = job.id
        elif isinstance(fact, JobCompleted):
            self.keys.count_usage(job, fact.outcome, at)
        elif isinstance(fact, JobCancelled | JobExpired):
            self.keys.count_usage(job, fact.written, at)

    def _owner_of(self, job_id: JobId) -> str | None:
        stored = self._jobs.get(job_id)
        return None if stored is None else stored.job.owner


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
