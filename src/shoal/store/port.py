"""The port of the store: jobs, facts, keys, pairing codes, and sign-ins.

The ports of its further parts are in ``batches``, ``ledger`` and ``webhooks``.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Literal, NamedTuple, NewType, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from shoal.domain.credentials import BrowserSession, JoinToken, Key, KeyUsage
from shoal.domain.errors import StoreBroken
from shoal.domain.facts import (
    AliasSet,
    DeploymentSet,
    Fact,
    WorkerApproved,
    WorkerSuspended,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Gang, Job, JobTerms, Priority
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Call, JobKind, ModelOrder, Task
from shoal.pool.lifecycle import JobState
from shoal.store.batches import BatchStore, FileStore
from shoal.store.ledger import NO_ENTRIES, LedgerEntries, LedgerStore, UsageStore
from shoal.store.webhooks import WebhookStore

C = TypeVar("C", Key, JoinToken)

JOBS_EXAMINED_MAX = 2000  # for one page, by default

Epoch = NewType("Epoch", int)
"""The number of a takeover of the database; 0 before the first one."""

Writer: TypeAlias = Literal["hub", "calls"]
"""A part of a coordinator that commits facts, one commit after the other."""

OMITTED_WORK = Task("")
"""Placeholder for the work of a job that was left out."""


class CommitId(NamedTuple):
    """Identifies a commit, so that it counts once although it is repeated.

    A writer numbers its commits in an epoch from 1.
    """

    epoch: Epoch
    writer: Writer
    number: int


def commit_ids(epoch: Epoch, writer: Writer) -> Iterator[CommitId]:
    """Return the ids of a writer's commits, in order."""
    return map(CommitId, repeat(epoch), repeat(writer), count(1))


@dataclass(frozen=True, slots=True)
class PairingCode:
    """A code that one worker may claim.  Times are Unix seconds.

    ``owner`` and ``user`` identify whose private jobs, as in ``WorkerTrusted``.
    """

    code: str
    owner: str
    user: str
    expires_at: float
    public_key: str = ""  # of the worker that claimed it
    claimed_at: float | None = None


@dataclass(frozen=True, slots=True)
class PairedWorker:
    """A worker that a user trusts with private jobs, and since when (Unix seconds)."""

    public_key: str
    paired_at: float


class PairingStore(Protocol):
    """Pairing codes; ``Store.append`` records the trust that results from them.

    All methods raise StoreError.
    """

    async def add(self, code: PairingCode) -> bool:
        """Add a code unless it exists; return whether it was added."""

    async def find(self, beginning: str) -> list[PairingCode]:
        """Return the codes that begin so.

        The caller compares the rest in constant time.
        """

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        """Record the claim of a code; return whether it was claimable at that time."""

    async def count_claimable(self, owner: str, at: float) -> int:
        """Return how many codes of an owner can still be claimed."""

    async def count_paired(self, owner: str) -> int:
        """Return the number of pairs of a user of the owner and a trusted worker."""

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        """Return the workers that a user trusts, in the order of their pairing."""


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
    """A stored job without what may be large: work, long texts of terms, outcome.

    ``model`` is that of ``listed_model``.
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
    """Return the model that a list of jobs shows; for a call, the function's name."""
    return job.work.name if isinstance(job.work, Call | ModelOrder) else job.model


def summarize(stored: StoredJob) -> StoredJobSummary:
    """Return a job without the parts that may be large."""
    job = stored.job
    return StoredJobSummary(
        job.id,
        job.kind,
        listed_model(job),
        job.owner,
        job.priority,
        replace(job.terms, form="", api_fields=""),
        stored.state,
        stored.lease,
        stored.submitted_at,
        stored.ended_at,
        stored.error,
    )


class RecordedFact(msgspec.Struct, frozen=True):
    """A fact and when it was recorded, in Unix seconds."""

    at: float
    fact: Fact


class NumberedFact(RecordedFact, frozen=True):
    """A fact about a worker or an account, with its number in their order."""

    number: int


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs; None, or an empty set of states, matches any.

    ``text`` is a job's id, or part of its id, model or owner, in either case.
    ``before`` is a job, or the place at which the page before ended: only jobs that
    were submitted earlier match.
    """

    owner: str | None = None
    states: frozenset[JobState] = frozenset()
    user: str | None = None
    kind: JobKind | None = None
    before: JobId | int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class StoredJobPage:
    """A page of jobs, and the place ``before`` which the next page is; None: no more.

    The place stays when its job is deleted.  A page is short if few of many jobs match
    the filter.
    """

    jobs: list[StoredJobSummary]
    before: int | None


@dataclass(frozen=True, slots=True)
class JobRun:
    """What a job's workers did: its facts in order, and its receipt's token counts.

    Of the facts, the work in ``JobSubmitted`` and the outcome are left out.
    """

    facts: list[RecordedFact]
    usage: Usage | None


class CredentialStore(Protocol[C]):
    """The credentials of one kind: API keys, or join tokens.

    All methods raise StoreError.
    """

    async def all(self) -> list[C]:
        """Return all credentials, the oldest first."""

    async def add(self, new: C) -> None: ...

    async def revoke(self, id_: str, at: float) -> None:
        """Mark a credential as revoked at a Unix time, unless it was revoked before."""


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

    async def usage_of(self, owner: str, today: int) -> KeyUsage:
        """Return the usage of the keys of this name; ``today`` is a ``day_of``."""

    async def usage_by_owner(
        self, today: int, owners: Collection[str]
    ) -> dict[str, KeyUsage]:
        """Return the usage of the keys of each of these names that has any."""


@dataclass(frozen=True, slots=True)
class SignInCode:
    """The code of a link that signs a browser in once, until a Unix time.

    It is known by its digest, and stands for the key with ``key_digest``.
    """

    digest: bytes
    key_digest: bytes
    expires_at: float


class SignInStore(Protocol):
    """The sessions of browsers, and the codes that begin one.

    All methods raise StoreError.
    """

    async def sessions(self) -> list[BrowserSession]:
        """Return the sessions in the order in which they began."""

    async def write_sessions(
        self, changes: Mapping[bytes, BrowserSession | None]
    ) -> None:
        """Add sessions by their digests; None: delete it.  Idempotent."""

    async def add_code(self, new: SignInCode, count_max: int) -> None:
        """Add a code; only the newest ``count_max`` stay."""

    async def redeem(self, digest: bytes) -> SignInCode | None:
        """Delete a code and return it; None: there is none, or no more."""


class Store(Protocol):
    """All that a database provides: jobs, the facts about them, and further parts.

    What ``append`` writes to several parts changes in one transaction.
    """

    @property
    def name(self) -> str:
        """The database's file, or its URL without a password, for operators."""

    @property
    def keys(self) -> KeyStore: ...

    @property
    def ledger(self) -> LedgerStore: ...

    @property
    def webhooks(self) -> WebhookStore: ...

    @property
    def pairing(self) -> PairingStore: ...

    @property
    def sign_ins(self) -> SignInStore: ...

    @property
    def files(self) -> FileStore: ...

    @property
    def batches(self) -> BatchStore: ...

    @property
    def usage(self) -> UsageStore: ...

    async def open(self, *, create: bool = True) -> None:
        """Open the database, and migrate it to the present version.

        ``create``: make it if it is missing or empty.  Raises StoreError if it is in
        use or from a newer Shoal; StoreBroken if it is damaged, or missing and not to
        be created.
        """

    async def take_over(self) -> Epoch:
        """Begin an epoch, the only one whose commits count from now on.

        Raises StoreError.
        """

    async def check(self) -> None:
        """Check the database's files for damage, at little cost.

        Raises StoreBroken if there is any, StoreError.
        """

    async def wait_damaged(self) -> StoreBroken:
        """Wait until a read, a write or a check finds damage; return it.

        Raises StoreError if the database is not open.
        """

    async def prepare(self, job: Job) -> None:
        """Write what is large of a job that is about to be submitted.

        Other writes go on meanwhile, and ``append`` has less to write then.  Call
        ``discard`` if the job is not submitted.

        Raises StoreError.
        """

    def discard(self, job_id: JobId) -> None:
        """Delete later what ``prepare`` wrote, if it wrote anything."""

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
        commit: CommitId | None = None,
    ) -> None:
        """Record facts atomically; they are on disk when this returns.

        ``earlier`` facts, whose write was deferred, are recorded first, and the
        ``entries`` of the ledger in the same transaction.

        An attempt that raises may have succeeded, as when its answer is lost.  With
        the same ``commit`` it can be repeated: the facts are recorded once.

        Raises StoreError.  Of a ``commit``: Fenced if its epoch is over, WentBack if
        the database lacks the one before it; then nothing was recorded.
        """

    async def open_jobs(self) -> list[StoredJob]:
        """Return the jobs that have not ended, oldest first."""

    async def ended_members(self, since: float) -> list[tuple[Gang, JobState]]:
        """Return the members of gangs that ended since a Unix time, and how."""

    async def job(self, job_id: JobId) -> StoredJob | None: ...

    async def summary(self, job_id: JobId) -> StoredJobSummary | None: ...

    async def recent(
        self, wanted: JobFilter, limit: int, examined_max: int = JOBS_EXAMINED_MAX
    ) -> StoredJobPage:
        """Return the newest jobs that match the filter, the newest first.

        Tests at most ``examined_max`` jobs, or ``limit`` if that is more.
        """

    async def runs(self, job_ids: Sequence[JobId]) -> list[JobRun]:
        """Return the runs of jobs, in the same order; one without facts is unknown."""

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> StoredJob | None:
        """Return the newest job with this idempotency key of the owner."""

    async def history(self, job_id: JobId) -> list[RecordedFact]:
        """Return the facts about a job, in order.

        ``output_hash`` is left out: the receipt of the job has it.
        """

    async def history_since(self, job_id: JobId, after: int) -> list[RecordedFact]:
        """Return the facts about a job in order, without the first ``after``.

        The work in ``JobSubmitted`` and the outcome are left out.
        """

    async def trusted_workers(self) -> list[WorkerTrusted]:
        """Return the workers that users trust with private jobs."""

    async def suspensions(self) -> list[tuple[WorkerSuspended, float]]:
        """Return the suspensions in force, oldest first, each with its Unix time.

        They have no limits: a limit means nothing after a restart.
        """

    async def approvals(self) -> list[WorkerApproved]:
        """Return the approvals in force, the oldest first."""

    async def aliases(self) -> list[AliasSet]:
        """Return the aliases, by name."""

    async def deployments(self) -> list[DeploymentSet]:
        """Return the deployments of models, by name."""

    async def penalties_since(self, since: float) -> list[RecordedFact]:
        """Return the ``WorkerMarked`` facts since a Unix time, the oldest first."""

    async def worker_facts(
        self, limit: int, before: int | None = None, skip: int = 0
    ) -> list[NumberedFact]:
        """Return the newest facts about workers and accounts, the newest first.

        Only those with a number less than ``before``, and without the first ``skip``.
        """

    async def models_since(self, since: float) -> set[str]:
        """Return the models of the workers that joined since a Unix time."""

    async def functions_since(self, since: float) -> set[str]:
        """Return the tasks and functions of these workers that are named."""

    async def prune(self, before: float) -> int:
        """Delete the jobs that ended before a Unix time; return their number.

        Deletes their facts, and keys, tokens, pairing codes and batches that ended
        before, too.  Receipts, transfers, usage and files stay, and so do the jobs of
        batches that have not ended.  Other writes go on meanwhile.
        """

    async def delete_job(self, job_id: JobId) -> bool:
        """Delete a job that has ended, as ``prune`` does; return whether it did.

        An open job stays, and one of a batch that has not ended.
        """

    async def close(self) -> None: ...
