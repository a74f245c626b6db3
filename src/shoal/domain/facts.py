"""Facts: events that have happened, and the only way to change the pool.

Facts are stored and logged, so they hold no prompts, answers or keys, except in
``JobSubmitted.job`` and ``JobCompleted.outcome``, which the store keeps separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.worker import Offer, Suspension, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker_id: WorkerId
    offer: Offer
    cancels: bool  # whether its wire can carry a cancellation
    shared: bool = False  # whether other workers may share its connection


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSuspended:
    """An operator, with the key ``by``, paused, drained or removed a worker.

    ``name`` is the worker's id, or the part of it that names the machine and stands for
    all its workers (see ``peer_of``).  Jobs that a drain has not ended ``within`` so
    many seconds are handed over; None: it waits.
    """

    name: str
    how: Suspension
    by: str
    within: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerResumed:
    """An operator ended the suspension of a worker; that of a machine: of them all."""

    name: str
    by: str


@dataclass(frozen=True, slots=True)
class WorkerApproved:
    """An operator approved a worker, or a machine; ``name`` is as in WorkerSuspended.

    ``public_key`` is the key that it has proved, which is approved under any name;
    empty: it proves none, so its name is approved.  None: no worker of the name is
    connected, and the first to connect decides.
    """

    name: str
    by: str
    public_key: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerDisapproved:
    """An operator withdrew an approval, by a removal."""

    name: str
    by: str
    public_key: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerDismissed:
    """The coordinator disconnects a worker that was removed."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerMarked:
    """A worker misbehaved; with enough points it gets no work for a while.

    ``about`` is the job in question, which may be pruned before this fact is.
    ``public_key`` is the key that the worker proved, if any: the points then apply to
    every worker that names the key.
    """

    worker_id: WorkerId
    points: int
    reason: str
    about: JobId
    public_key: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoadChanged:
    """A worker's load outside this pool changed.

    ``fitness_changed``: the worker became fit or unfit by it.  Never stored: workers
    report it often, and it means nothing after a restart.
    """

    worker_id: WorkerId
    load: WorkerLoad
    fitness_changed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerTrusted:
    """A user of a key's owner trusts this public key with private jobs."""

    owner: str
    user: str
    public_key: str


@dataclass(frozen=True, slots=True)
class WorkerDistrusted:
    """A user of a key's owner no longer trusts this public key."""

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
    """Workers that were not given a job for one reason.

    ``workers`` names the first few; ``count`` is their number.
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
    """A second worker was given a job on which the first has long been silent."""

    job_id: JobId
    worker_id: WorkerId
    lease: LeaseNumber
    reason: str


@dataclass(frozen=True, slots=True)
class JobUnhedged:
    """One of a job's two leases ended, and the job continues under the other.

    ``lost``: its worker disconnected; ``cut``: its worker is still running the job;
    ``too_long``: its worker refused the job for its length; ``failed``: its engine
    failed; else its worker rejected the job.
    """

    job_id: JobId
    lease: LeaseNumber
    reason: str
    lost: bool = False
    cut: bool = False
    too_long: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class JobStarted:
    job_id: JobId
    lease: LeaseNumber


@dataclass(frozen=True, slots=True)
class JobRequeued:
    """The job waits again; ``refused_by`` is a worker not to ask again at once.

    ``handed_over``: an operator took it from a worker, which may still be running it,
    or the worker gave it back for the sake of its owner.  ``too_long``: the worker
    refused it for its length.  ``failed``: its engine failed.
    """

    job_id: JobId
    lease: LeaseNumber
    reason: str
    refused_by: WorkerId | None = None
    handed_over: bool = False
    too_long: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class JobCompleted:
    """A worker has done the job.

    ``output_hash`` is the SHA-256 of the output in hexadecimal; empty if the job gets
    no receipt.  ``verdict`` is about ``worker_receipt``, which came with the answer.
    The receipt is stored in the ledger, not with the fact.  ``first_output`` is the
    Unix time of the first output, if the end came so soon after it that no JobStarted
    says it; 0: it is unknown.
    """

    job_id: JobId
    lease: LeaseNumber
    outcome: Outcome
    verdict: Verdict = Verdict.UNSIGNED
    output_hash: str = ""
    worker_receipt: SignedReceipt | None = field(default=None, compare=False)
    first_output: float = 0.0


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
    """The job failed.

    ``lost``: because its workers disconnected; ``cut``: while a worker was still
    running it.  ``exception`` is as in ``JobError``.
    """

    job_id: JobId
    error: str
    lost: bool = False
    cut: bool = False
    fault: Fault = Fault.WORKER
    exception: bytes = b""


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """A client or operator cancelled the job after ``written`` characters of output."""

    job_id: JobId
    reason: str
    written: int = 0


@dataclass(frozen=True, slots=True)
class JobExpired:
    """The job exceeded a limit after ``written`` characters of output.

    ``retry_after``: in so many seconds another try may find a worker; 0: unknown.
    """

    job_id: JobId
    limit: TimeLimit
    error: str
    written: int = 0
    retry_after: int = 0


@dataclass(frozen=True, slots=True)
class LateResult:
    """A worker answered under a lease that has ended: recorded, never delivered."""

    job_id: JobId
    lease: LeaseNumber
    worker_id: WorkerId
    what: str


JobEnd: TypeAlias = JobCompleted | JobFailed | JobCancelled | JobExpired
JOB_ENDS: tuple[type[JobEnd], ...] = (
    JobCompleted,
    JobFailed,
    JobCancelled,
    JobExpired,
)

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
    """An account was credited, in micro-dollars, with the key ``by``."""

    account: str
    amount: int
    by: str


@dataclass(frozen=True, slots=True)
class AccountLimited:
    """An account's overdraft limit was set, in micro-dollars; None: unlimited."""

    account: str
    budget: int | None
    by: str


AccountFact: TypeAlias = AccountCredited | AccountLimited
WorkerFact: TypeAlias = (
    WorkerJoined
    | WorkerDraining
    | WorkerLoadChanged
    | WorkerLeft
    | WorkerSuspended
    | WorkerResumed
    | WorkerApproved
    | WorkerDisapproved
    | WorkerDismissed
    | WorkerMarked
    | WorkerTrusted
    | WorkerDistrusted
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
    WorkerSuspended: "WorkerSuspended",
    WorkerResumed: "WorkerResumed",
    WorkerApproved: "WorkerApproved",
    WorkerDisapproved: "WorkerDisapproved",
    WorkerDismissed: "WorkerDismissed",
    WorkerMarked: "WorkerMarked",
    WorkerTrusted: "WorkerTrusted",
    WorkerDistrusted: "WorkerDistrusted",
    AccountCredited: "AccountCredited",
    AccountLimited: "AccountLimited",
}
"""The name of each fact in the database, the log and the metrics: it never changes."""
