"""Inputs of the hub: everything that it has to decide about."""

from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed, Draining, Failed, Rejected
from shoal.domain.work import Job, TimeLimit
from shoal.domain.worker import Offer, WorkerLoad

NO_OUTCOME = Outcome("")


@dataclass(frozen=True, slots=True)
class Submission:
    """Someone wants this done."""

    job: Job


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Nobody wants the job any more."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """The first text of a lease has come."""

    job_id: JobId
    lease: LeaseNumber


@dataclass(frozen=True, slots=True)
class AnswerRejected:
    """The answer cannot be made whole: the coordinator itself gives the job up."""

    job_id: JobId
    error: str
    lost: bool  # for it was a lost worker that began it
    cut: bool = True  # whether a worker is still at it


@dataclass(frozen=True, slots=True)
class LimitReached:
    """The job has run into a limit."""

    job_id: JobId
    limit: TimeLimit


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A worker has joined."""

    worker_id: WorkerId
    offer: Offer
    cancels: bool


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """A worker has gone, or must be taken as gone."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseResult:
    """What a worker reports about a lease.

    ``outcome`` is the whole answer, if it is complete.  ``verdict`` is about the
    receipt in the event, and ``output_hash`` the SHA-256 of the output in hexadecimal;
    empty if the job gets no receipt.
    """

    worker_id: WorkerId
    event: Completed | Rejected | Failed
    outcome: Outcome = NO_OUTCOME
    verdict: Verdict = Verdict.UNSIGNED
    output_hash: str = ""


@dataclass(frozen=True, slots=True)
class ReceiptVerified:
    """A receipt that came after the answer was verified."""

    worker_id: WorkerId
    job_id: JobId
    verdict: Verdict
    receipt: SignedReceipt


@dataclass(frozen=True, slots=True)
class AnswerDisputed:
    """A worker gave another answer than others to the same question."""

    worker_id: WorkerId
    reason: str
    about: JobId


@dataclass(frozen=True, slots=True)
class WorkerPaired:
    """A user lets private jobs go to a worker."""

    owner: str
    user: str
    public_key: str


@dataclass(frozen=True, slots=True)
class DrainAnnounced:
    """A worker takes nothing new."""

    worker_id: WorkerId
    event: Draining


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A worker can take more than before, or less."""

    worker_id: WorkerId
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class AccountTopUp:
    """Someone tops up an account, by so many micro-dollars."""

    account: str
    amount: int
    by: str


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """Someone says how far below zero an account may go; None: as far as it likes."""

    account: str
    budget: int | None
    by: str


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
    | AccountTopUp
    | BudgetSet
)
