"""The inputs of the hub, on which ``react`` decides."""

from typing import TypeAlias

import msgspec

from shoal.domain import vocabulary as words
from shoal.domain.facts import DeploymentSet
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.worker import Offer, Suspension, WorkerLoad

NO_OUTCOME = Outcome("")


class Submission(msgspec.Struct, frozen=True):
    """A client submitted a job."""

    job: Job


class Cancellation(msgspec.Struct, frozen=True):
    """A client or operator cancelled a job."""

    job_id: JobId
    reason: str


class FirstOutput(msgspec.Struct, frozen=True):
    """The first output under a lease arrived."""

    job_id: JobId
    lease: LeaseNumber


class AnswerRejected(msgspec.Struct, frozen=True):
    """The coordinator gave up a job because its answer cannot be completed."""

    job_id: JobId
    error: str
    lost: bool  # because the worker that began it disconnected
    cut: bool = True  # whether a worker is still running it


class LimitReached(msgspec.Struct, frozen=True):
    """A job exceeded a time limit."""

    job_id: JobId
    limit: TimeLimit


class WorkerConnected(msgspec.Struct, frozen=True):
    """A worker connected; ``shared``: other workers may share its connection.

    ``running`` is as in ``Joined``.
    """

    worker_id: WorkerId
    offer: Offer
    cancels: bool
    shared: bool = False
    running: words.RunningJobNames | None = None


class WorkerDisconnected(msgspec.Struct, frozen=True):
    """A worker disconnected, or timed out."""

    worker_id: WorkerId
    reason: str


class LeaseResult(msgspec.Struct, frozen=True):
    """A worker's report about a lease.

    ``outcome`` is the whole answer, if it is complete.  ``verdict`` is about the
    receipt in the event, and ``output_hash`` the SHA-256 of the output in hexadecimal;
    empty if the job gets no receipt.  ``first_output`` is as in ``JobCompleted``.
    """

    worker_id: WorkerId
    event: words.Completed | words.Rejected | words.Failed
    outcome: Outcome = NO_OUTCOME
    verdict: Verdict = Verdict.UNSIGNED
    output_hash: str = ""
    first_output: float = 0.0


class ReceiptVerified(msgspec.Struct, frozen=True):
    """A receipt that came after the answer was verified."""

    worker_id: WorkerId
    job_id: JobId
    verdict: Verdict
    receipt: SignedReceipt


class AnswerDisputed(msgspec.Struct, frozen=True):
    """A worker's answer differs from that of others to the same request."""

    worker_id: WorkerId
    reason: str
    about: JobId


class WorkerPaired(msgspec.Struct, frozen=True):
    """A user paired with a worker for private jobs."""

    owner: str
    user: str
    public_key: str


class WorkerUnpaired(msgspec.Struct, frozen=True):
    """A user revoked a pairing; jobs that run are finished."""

    owner: str
    user: str
    public_key: str


class DrainAnnounced(msgspec.Struct, frozen=True):
    """A worker announced that it takes no new jobs."""

    worker_id: WorkerId
    event: words.Draining


class LoadReported(msgspec.Struct, frozen=True):
    """A worker reported a change of its load."""

    worker_id: WorkerId
    load: WorkerLoad


class WorkerSuspension(msgspec.Struct, frozen=True):
    """An operator pauses, drains or removes a worker; as in ``WorkerSuspended``.

    ``how`` is not PENDING, which is not an order.
    """

    name: str
    how: Suspension
    by: str
    within: float | None = None


class WorkerResumption(msgspec.Struct, frozen=True):
    """An operator resumes a worker; ``name`` is as in ``WorkerSuspended``."""

    name: str
    by: str


class WorkerApproval(msgspec.Struct, frozen=True):
    """An operator approves a worker; ``name`` is as in ``WorkerSuspended``.

    ``peer_key`` is the key that a connected peer of the name has proved, which may have
    no workers; empty: it proves none; None: no peer of the name is connected.
    """

    name: str
    by: str
    peer_key: str | None = None


class AccountTopUp(msgspec.Struct, frozen=True):
    """An account is credited, in micro-dollars."""

    account: str
    amount: int
    by: str


class BudgetSet(msgspec.Struct, frozen=True):
    """An account's overdraft limit is set; None: unlimited."""

    account: str
    budget: int | None
    by: str


class AliasOrder(msgspec.Struct, frozen=True):
    """An operator sets what a name stands for; without models, it stands for none."""

    name: str
    models: tuple[str, ...]
    by: str


class DeploymentOrder(msgspec.Struct, frozen=True):
    """An operator sets how a model is deployed; None: no longer."""

    name: str
    deployment: DeploymentSet | None
    by: str


class ModelUnplaced(msgspec.Struct, frozen=True):
    """No machine can load a model that jobs wait for, for a reason."""

    model: str
    reason: str


HubInput: TypeAlias = (
    Submission
    | Cancellation
    | FirstOutput
    | AnswerRejected
    | LimitReached
    | WorkerConnected
    | WorkerDisconnected
    | LeaseResult
    | DrainAnnounced
    | LoadReported
    | ReceiptVerified
    | AnswerDisputed
    | WorkerPaired
    | WorkerUnpaired
    | WorkerSuspension
    | WorkerResumption
    | WorkerApproval
    | AccountTopUp
    | BudgetSet
    | AliasOrder
    | DeploymentOrder
    | ModelUnplaced
)
