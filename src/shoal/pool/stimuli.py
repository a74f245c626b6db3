"""What the hub is told, and has to decide about."""

from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import (
    Completed,
    Draining,
    Failed,
    Rejected,
)
from shoal.domain.work import Job, Limit
from shoal.domain.worker import Condition, Offer

NOTHING = Outcome("")


@dataclass(frozen=True, slots=True)
class Submitted:
    """Someone wants this done."""

    job: Job


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody wants the job any more."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Began:
    """The first text of a lease has come."""

    job_id: JobId
    lease: LeaseNumber


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The answer cannot be made whole: the coordinator itself gives the job up."""

    job_id: JobId
    error: str
    lost: bool  # for it was a lost worker that began it
    cut: bool = True  # whether a worker is still at it


@dataclass(frozen=True, slots=True)
class Overdue:
    """The job has run into a limit."""

    job_id: JobId
    limit: Limit


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker has joined."""

    worker_id: WorkerId
    offer: Offer
    cancels: bool


@dataclass(frozen=True, slots=True)
class Departed:
    """A worker has gone, or must be taken as gone."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker's word on a job.

    ``outcome`` is the whole answer, if it is complete, and ``verdict`` on the receipt
    that came with it.
    """

    worker_id: WorkerId
    event: Completed | Rejected | Failed
    outcome: Outcome = NOTHING
    verdict: Verdict = Verdict.UNSIGNED


@dataclass(frozen=True, slots=True)
class Proved:
    """A worker's receipt came apart from the answer, and was looked at."""

    worker_id: WorkerId
    job_id: JobId
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Accused:
    """A worker gave another answer than others to the same question."""

    worker_id: WorkerId
    reason: str
    about: JobId


@dataclass(frozen=True, slots=True)
class Paired:
    """A user lets private jobs go to a worker."""

    owner: str
    user: str
    public_key: str


@dataclass(frozen=True, slots=True)
class Retiring:
    """A worker takes nothing new."""

    worker_id: WorkerId
    event: Draining


@dataclass(frozen=True, slots=True)
class Altered:
    """A worker can take more than before, or less."""

    worker_id: WorkerId
    condition: Condition


@dataclass(frozen=True, slots=True)
class Funded:
    """Someone tops up an account, by so many micro-dollars."""

    account: str
    amount: int
    by: str


@dataclass(frozen=True, slots=True)
class Bounded:
    """Someone says how far below zero an account may go; None: as far as it likes."""

    account: str
    budget: int | None
    by: str


Stimulus: TypeAlias = (
    Submitted
    | Withdrawn
    | Began
    | Spoiled
    | Overdue
    | Arrived
    | Departed
    | Answered
    | Retiring
    | Altered
    | Proved
    | Accused
    | Paired
    | Funded
    | Bounded
)
