"""What the runtime needs from a database."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shoal.domain.credentials import JoinToken, Key, KeyUsage
from shoal.domain.facts import Fact, JobCompleted, JobSubmitted, WorkerTrusted
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Outcome
from shoal.domain.work import Call, Job, JobKind, JobTerms, Priority, Task
from shoal.pool.lifecycle import JobState
from shoal.store.ledger import NO_ENTRIES, LedgerEntries, LedgerStore
from shoal.store.pairing import PairingStore
from shoal.store.webhooks import WebhookStore

C = TypeVar("C", Key, JoinToken)

OMITTED_WORK = Task("")
"""Stands for the work of a job where that is left out."""


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
class StoredJobSummary:
    """A stored job without what may be large: its work, ``terms.form``, its outcome.

    ``model`` is as in ``model_of``.
    """

    id: JobId
    kind: JobKind
    model: str
    owner: str
    priority: Priority
    terms: JobTerms
    state: JobState
    lease: LeaseNumber
    submitted_at: float
    ended_at: float | None
    error: str | None


def listed_model(job: Job) -> str:
    """Return what stands for a job's model where it is listed: a function's name."""
    return job.work.name if isinstance(job.work, Call) else job.model


def summarize(stored: StoredJob) -> StoredJobSummary:
    """Return what is left of a job without what may be large."""
    job = stored.job
    return StoredJobSummary(
        job.id,
        job.kind,
        listed_model(job),
        job.owner,
        job.priority,
        replace(job.terms, form=""),
        stored.state,
        stored.lease,
        stored.submitted_at,
        stored.ended_at,
        stored.error,
    )


@dataclass(frozen=True, slots=True)
class RecordedFact:
    """A fact and when it was recorded, in Unix seconds."""

    at: float
    fact: Fact


def without_content(fact: Fact) -> Fact:
    """Return a fact without what its job is about."""
    match fact:
        case JobSubmitted(job):
            return JobSubmitted(Job(job.id, OMITTED_WORK))
        case JobCompleted():
            return replace(fact, outcome=Outcome(""))
        case _:
            return fact


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to look for; None, or no states: any."""

    owner: str | None = None
    states: frozenset[JobState] = frozenset()
    user: str | None = None
    kind: JobKind | None = None
    before: JobId | None = None  # those that were submitted before this one


class Store(Protocol):
    """Tables hold the state, ``facts`` holds the story; both change together."""

    @property
    def ledger(self) -> LedgerStore: ...

    @property
    def webhooks(self) -> WebhookStore: ...

    @property
    def pairing(self) -> PairingStore: ...

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
    ) -> None:
        """Record facts, all or none; they are on disk when this returns.

        Before them come those that happened ``earlier`` and could wait; with them, what
        they mean for the books.

        Raises StoreError.
        """
        ...

    async def open_jobs(self) -> list[StoredJob]:
        """Return the jobs that have not ended, oldest first."""
        ...

    async def job(self, job_id: JobId) -> StoredJob | None: ...

    async def summary(self, job_id: JobId) -> StoredJobSummary | None: ...

    async def recent(self, wanted: JobFilter, limit: int) -> list[StoredJobSummary]:
        """Return the jobs submitted last that are ``wanted``, the newest first."""
        ...

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> StoredJob | None:
        """Return the job that stands under an owner's key: the newest, if several."""
        ...

    async def history(self, job_id: JobId) -> list[RecordedFact]:
        """Return what happened to a job, in order."""
        ...

    async def history_since(self, job_id: JobId, after: int) -> list[RecordedFact]:
        """Return what happened to a job after so much that did, in order.

        What it is about is left out: the work, in ``JobSubmitted``, and the outcome.
        """
        ...

    async def trusted_workers(self) -> list[WorkerTrusted]:
        """Return which workers users trust with private jobs."""
        ...

    async def penalties_since(self, since: float) -> list[RecordedFact]:
        """Return what was marked against workers since, the oldest first."""
        ...

    async def models_since(self, since: float) -> set[str]:
        """Return the models of the workers that have joined since."""
        ...

    async def prune(self, before: float) -> int:
        """Forget jobs that ended before then, and their story; say how many.

        Keys, tokens and pairing codes that had ended by then are forgotten as well.
        """
        ...

    async def close(self) -> None: ...


class CredentialStore(Protocol[C]):
    """The credentials of one kind: API keys, or join tokens.

    All methods raise StoreError.
    """

    async def all(self) -> list[C]:
        """Return all credentials, the oldest first."""
        ...

    async def add(self, new: C) -> None: ...

    async def revoke(self, id_: str, at: float) -> None:
        """Mark a credential as revoked at a Unix time, unless it was revoked before."""
        ...


class KeyStore(Protocol):
    """API keys, join tokens, and the usage recorded under the keys.

    ``Store.append`` counts the usage of a job together with its end: once for each job
    that completed, or that was given up after it had started.

    All methods raise StoreError.
    """

    @property
    def keys(self) -> CredentialStore[Key]: ...

    @property
    def tokens(self) -> CredentialStore[JoinToken]: ...

    async def bind_worker(self, token_id: str, worker: str) -> None:
        """Record that a worker joined with a token.  Idempotent."""
        ...

    async def usage_of(self, owner: str, today: int) -> KeyUsage:
        """Return the usage of the keys of this name; ``today`` is a ``day_of``."""
        ...

    async def usage_by_owner(self, today: int) -> dict[str, KeyUsage]:
        """Return the usage of the keys of each name."""
        ...
