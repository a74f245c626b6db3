"""What happened, in the past tense: the only thing that changes the pool.

Facts are stored and logged as they are, so they hold no prompts, answers or keys but
in ``JobSubmitted.job`` and ``JobCompleted.outcome``, which the store keeps apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import Job, TimeLimit
from shoal.domain.worker import Offer, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker_id: WorkerId
    offer: Offer
    cancels: bool  # whether its wire can carry a cancellation


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerMarked:
    """A worker did what it should not; with enough points it gets no work for a while.

    ``about`` is the job in question, which may be forgotten before this is.
    ``public_key`` is what the worker had proved to have, if anything: then whoever
    names that key is meant.
    """

    worker_id: WorkerId
    points: int
    reason: str
    about: JobId
    public_key: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoadChanged:
    """How much a worker can take beside what it was given here has changed.

    ``turned`` says that this is what makes it fit, or unfit.  Never stored: nobody asks
    for it after a restart, and a worker may say it as often as it likes.
    """

    worker_id: WorkerId
    load: WorkerLoad
    fitness_changed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerTrusted:
    """A user of a key's owner lets private jobs go to whoever has this public key."""

    owner: str
    user: str
    public_key: str


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    job: Job

    @property
    def job_id(self) -> JobId:
        return self.job.id


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Workers that did not get a job, and the reason they share.

    ``workers`` names the first few; ``count`` is how many there were.
    """

    reason: str
    count: int
    workers: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class JobLeased:
    job_id: JobId
    worker_id: WorkerId
    lease: LeaseNumber
    reason: str
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class JobHedged:
    """A second worker was given a job of which the first has said nothing for long."""

    job_id: JobId
    worker_id: WorkerId
    lease: LeaseNumber
    reason: str


@dataclass(frozen=True, slots=True)
class JobUnhedged:
    """One of a job's two leases is over, and the job goes on under the other.

    ``lost`` says that this is because its worker went away, ``cut`` that the worker is
    still at it; else it would not or could not do the job.
    """

    job_id: JobId
    lease: LeaseNumber
    reason: str
    lost: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class JobStarted:
    job_id: JobId
    lease: LeaseNumber


@dataclass(frozen=True, slots=True)
class JobRequeued:
    """The job waits again; ``refused_by`` names a worker not to ask at once again."""

    job_id: JobId
    lease: LeaseNumber
    reason: str
    refused_by: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class JobCompleted:
    """A worker has done the job.

    ``output_hash`` is the SHA-256 of the output in hexadecimal; empty if the job gets
    no receipt.  ``verdict`` is about ``worker_receipt``, which came with the answer.
    The receipt is stored in the ledger, not with the fact.
    """

    job_id: JobId
    lease: LeaseNumber
    outcome: Outcome
    verdict: Verdict = Verdict.UNSIGNED
    output_hash: str = ""
    worker_receipt: SignedReceipt | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ReceiptPresented:
    """A worker presented a receipt after the answer.

    The receipt is stored in the ledger, not with the fact.
    """

    job_id: JobId
    worker_id: WorkerId
    verdict: Verdict
    worker_receipt: SignedReceipt | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job ended badly.

    ``lost`` says that this is because its workers went away, ``cut`` that a worker was
    still at it.
    """

    job_id: JobId
    error: str
    lost: bool = False
    cut: bool = False
    fault: Fault = Fault.WORKER


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """Nobody wants the job any more; ``written`` is how many characters there were."""

    job_id: JobId
    reason: str
    written: int = 0


@dataclass(frozen=True, slots=True)
class JobExpired:
    """The job ran into a limit; ``written`` is how many characters there were."""

    job_id: JobId
    limit: TimeLimit
    error: str
    written: int = 0


@dataclass(frozen=True, slots=True)
class LateResult:
    """A worker answered for a lease that is over: recorded, never delivered."""

    job_id: JobId
    lease: LeaseNumber
    worker_id: WorkerId
    what: str


JobFact: TypeAlias = (
    JobSubmitted
    | JobLeased
    | JobHedged
    | JobUnhedged
    | JobStarted
    | JobRequeued
    | JobCompleted
    | JobFailed
    | JobCancelled
    | JobExpired
)


@dataclass(frozen=True, slots=True)
class AccountCredited:
    """Someone was given money, in micro-dollars; ``by`` is the key of who did it."""

    account: str
    amount: int
    by: str


@dataclass(frozen=True, slots=True)
class AccountLimited:
    """How far below zero an account may go, in micro-dollars; None: without limit."""

    account: str
    budget: int | None
    by: str


AccountFact: TypeAlias = AccountCredited | AccountLimited
WorkerFact: TypeAlias = (
    WorkerJoined
    | WorkerDraining
    | WorkerLoadChanged
    | WorkerLeft
    | WorkerMarked
    | WorkerTrusted
)
Fact: TypeAlias = JobFact | WorkerFact | AccountFact | LateResult | ReceiptPresented


FACT_NAMES: Mapping[type[Fact], str] = {
    JobSubmitted: "JobSubmitted",
    JobLeased: "JobLeased",
    JobHedged: "JobHedged",
    JobUnhedged: "JobUnhedged",
    JobStarted: "JobStarted",
    JobRequeued: "JobRequeued",
    JobCompleted: "JobCompleted",
    JobFailed: "JobFailed",
    JobCancelled: "JobCancelled",
    JobExpired: "JobExpired",
    LateResult: "CameLate",
    ReceiptPresented: "ReceiptPresented",
    WorkerJoined: "WorkerJoined",
    WorkerDraining: "WorkerDraining",
    WorkerLoadChanged: "WorkerConditioned",
    WorkerLeft: "WorkerLost",
    WorkerMarked: "WorkerMarked",
    WorkerTrusted: "WorkerTrusted",
    AccountCredited: "AccountCredited",
    AccountLimited: "AccountLimited",
}
"""The name of each fact in the database, the log and the metrics: it never changes."""
