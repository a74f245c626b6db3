"""Facts: events that have happened, and the only way to change the pool.

Facts are stored and logged, so they hold no prompts, answers or keys, except in
``JobSubmitted.job`` and ``JobCompleted.outcome``, which the store keeps separately.
"""

from collections.abc import Mapping
from typing import TypeAlias, get_args

import msgspec

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import HubModel
from shoal.domain.worker import Offer, Suspension, WorkerLoad


class WorkerJoined(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    offer: Offer
    cancels: bool  # whether its wire can carry a cancellation
    shared: bool = False  # whether other workers may share its connection
    keeps_jobs: bool = False  # whether it runs them on when its connection is lost


class WorkerDraining(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    reason: str


class WorkerLeft(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    reason: str


class WorkerSuspended(msgspec.Struct, frozen=True):
    """An operator, with the key ``by``, paused, drained or removed a worker.

    ``name`` is the worker's id, or the part of it that names the machine and stands for
    all its workers (see ``peer_of``).  Jobs that a drain has not ended ``within`` so
    many seconds are handed over; None: it waits.
    """

    name: str
    how: Suspension
    by: str
    within: float | None = None


class WorkerResumed(msgspec.Struct, frozen=True):
    """An operator ended the suspension of a worker; that of a machine: of them all."""

    name: str
    by: str


class WorkerApproved(msgspec.Struct, frozen=True):
    """An operator approved a worker, or a machine; ``name`` is as in WorkerSuspended.

    ``public_key`` is the key that it has proved, which is approved under any name;
    empty: it proves none, so its name is approved.  None: no worker of the name is
    connected, and the first to connect decides.
    """

    name: str
    by: str
    public_key: str | None = None


class WorkerDisapproved(msgspec.Struct, frozen=True):
    """An operator withdrew an approval, by a removal."""

    name: str
    by: str
    public_key: str | None = None


class WorkerDismissed(msgspec.Struct, frozen=True):
    """The coordinator disconnects a worker that was removed."""

    worker_id: WorkerId
    reason: str


class WorkerMarked(msgspec.Struct, frozen=True):
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


class WorkerLoadChanged(msgspec.Struct, frozen=True):
    """A worker's load outside this pool changed.

    ``fitness_changed``: the worker became fit or unfit by it.  Never stored: workers
    report it often, and it means nothing after a restart.
    """

    worker_id: WorkerId
    load: WorkerLoad
    fitness_changed: bool = False


class MachineCalled(msgspec.Struct, frozen=True):
    """The machine of a lost worker, which may sleep, is needed: others call it."""

    worker_id: WorkerId
    addresses: tuple[str, ...]
    callers: tuple[WorkerId, ...]


class WorkerTrusted(msgspec.Struct, frozen=True):
    """A user of a key's owner trusts this public key with private jobs."""

    owner: str
    user: str
    public_key: str


class WorkerDistrusted(msgspec.Struct, frozen=True):
    """A user of a key's owner no longer trusts this public key."""

    owner: str
    user: str
    public_key: str


class JobSubmitted(msgspec.Struct, frozen=True):
    job: Job

    @property
    def job_id(self) -> JobId:
        return self.job.id


class PassedOver(msgspec.Struct, frozen=True):
    """Workers that were not given a job for one reason.

    ``workers`` names the first few; ``count`` is their number.
    """

    reason: str
    count: int
    workers: tuple[WorkerId, ...] = ()


class JobLeased(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker was given the job.

    ``kept``: it runs the job on if its connection is lost.  ``resumes``: it has come
    back, and still runs the job since this lease; 0: it starts the job.  ``carrier``: a
    call stream carries the job, under this lease and number.
    """

    job_id: JobId
    worker_id: WorkerId
    lease: LeaseNumber
    reason: str
    passed_over: tuple[PassedOver, ...] = ()
    kept: bool = False
    resumes: LeaseNumber = LeaseNumber(0)
    carrier: tuple[JobId, LeaseNumber, int] | None = None


class JobHedged(msgspec.Struct, frozen=True):
    """A second worker was given a job on which the first has long been silent."""

    job_id: JobId
    worker_id: WorkerId
    lease: LeaseNumber
    reason: str


class JobUnhedged(msgspec.Struct, frozen=True):
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


class JobStarted(msgspec.Struct, frozen=True):
    job_id: JobId
    lease: LeaseNumber


class JobRequeued(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job waits again; ``refused_by`` is a worker not to ask again at once.

    ``handed_over``: an operator took it from a worker, which may still be running it,
    or the owner of the worker needs the machine.  ``too_long``: the worker
    refused it for its length.  ``failed``: its engine failed.  ``awaited``: it waits a
    while for its worker to come back, since no other can go on with it.
    """

    job_id: JobId
    lease: LeaseNumber
    reason: str
    refused_by: WorkerId | None = None
    handed_over: bool = False
    too_long: bool = False
    failed: bool = False
    awaited: bool = False


class JobCompleted(msgspec.Struct, frozen=True):
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
    worker_receipt: SignedReceipt | None = None
    first_output: float = 0.0


class ReceiptPresented(msgspec.Struct, frozen=True):
    """A worker presented a receipt after the answer.

    The receipt is stored in the ledger, not with the fact.
    """

    job_id: JobId
    worker_id: WorkerId
    verdict: Verdict
    worker_receipt: SignedReceipt | None = None


class JobFailed(msgspec.Struct, frozen=True):
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


class JobCancelled(msgspec.Struct, frozen=True):
    """A client or operator cancelled the job after ``written`` characters of output."""

    job_id: JobId
    reason: str
    written: int = 0


class LoadState(msgspec.Struct, frozen=True):
    """How far the load of a model is, for a client that does not wait for it.

    ``step`` is in the machine's words.  ``bytes`` counts what is loaded, of ``size``;
    ``seconds`` estimates the rest.  None: unknown.
    """

    model: str
    machine: str
    step: str
    bytes: int | None
    size: int | None
    seconds: float | None


class JobExpired(msgspec.Struct, frozen=True):
    """The job exceeded a limit after ``written`` characters of output.

    ``retry_after``: seconds until another try may find a worker; 0: unknown.
    ``loading``: the job waited for a model that is still being loaded.
    """

    job_id: JobId
    limit: TimeLimit
    error: str
    written: int = 0
    retry_after: int = 0
    loading: LoadState | None = None


class LateResult(msgspec.Struct, frozen=True):
    """A worker answered under a lease that has ended: recorded, never delivered."""

    job_id: JobId
    lease: LeaseNumber
    worker_id: WorkerId
    what: str


JobEnd: TypeAlias = JobCompleted | JobFailed | JobCancelled | JobExpired
JOB_ENDS: tuple[type[JobEnd], ...] = get_args(JobEnd)

JobFact: TypeAlias = (  # those of every job first: they are known soonest
    JobSubmitted
    | JobLeased
    | JobCompleted
    | JobStarted
    | JobHedged
    | JobUnhedged
    | JobRequeued
    | JobFailed
    | JobCancelled
    | JobExpired
)


class AccountCredited(msgspec.Struct, frozen=True):
    """An account was credited, in micro-dollars, with the key ``by``."""

    account: str
    amount: int
    by: str


class AccountLimited(msgspec.Struct, frozen=True):
    """An account's overdraft limit was set, in micro-dollars; None: unlimited."""

    account: str
    budget: int | None
    by: str


class AliasSet(msgspec.Struct, frozen=True):
    """A name, or a pattern with one ``*``, stands for models: the first that is served.

    Set by an operator, with the key ``by``.
    """

    name: str
    models: tuple[str, ...]
    by: str


class AliasRemoved(msgspec.Struct, frozen=True):
    """An operator removed an alias."""

    name: str
    by: str


class DeploymentSet(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator deployed a model, with the key ``by``, or changed its deployment.

    The pool keeps it loaded on ``replicas`` machines.  ``most`` other than 0: on one to
    so many, as its requests need, and at least ``replicas``.  ``on`` names the machines
    that may have it; empty: any.  Nothing else evicts a ``pinned`` replica.  ``idle``
    is after how many seconds without a request a replica above the least number is
    unloaded; None: never.  ``context`` is in tokens, for each of the ``slots``; 0: as
    the machine chooses.  A machine has at most one model of an ``exclusive_group``.
    ``schedule`` has the times at which it is kept loaded, by the coordinator's clock,
    such as ``mon-fri 8:00-18:00``; empty: always.  Machines without the model get it
    from the ``hub``, if no other sends it; None: only from machines that have it.
    """

    name: str
    replicas: int
    by: str
    most: int = 0
    on: tuple[str, ...] = ()
    pinned: bool = False
    idle: float | None = None
    context: int = 0
    slots: int = 0
    exclusive_group: str = ""
    schedule: tuple[str, ...] = ()
    hub: HubModel | None = None


class DeploymentRemoved(msgspec.Struct, frozen=True):
    """An operator ended the deployment of a model, which may stay loaded."""

    name: str
    by: str


AccountFact: TypeAlias = AccountCredited | AccountLimited
ModelFact: TypeAlias = AliasSet | AliasRemoved | DeploymentSet | DeploymentRemoved
WorkerFact: TypeAlias = (
    WorkerJoined
    | WorkerDraining
    | WorkerLoadChanged
    | MachineCalled
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
Fact: TypeAlias = (
    JobFact | WorkerFact | AccountFact | ModelFact | LateResult | ReceiptPresented
)


FACT_NAMES: Mapping[type[Fact], str] = {
    **{each: each.__name__ for each in get_args(Fact)},
    LateResult: "CameLate",
    WorkerLoadChanged: "WorkerConditioned",
    WorkerLeft: "WorkerLost",
}
"""The name of each fact in the database, the log and the metrics: it never changes."""
