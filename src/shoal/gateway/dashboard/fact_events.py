"""Facts as events: a fact with its job, its worker and a plain line."""

from collections.abc import Iterable
from typing import NamedTuple

from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
    ReceiptPresented,
    WorkerApproved,
    WorkerDisapproved,
    WorkerDismissed,
    WorkerDistrusted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
    WorkerMarked,
    WorkerResumed,
    WorkerSuspended,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.pool.explanation import explain_fact
from shoal.store.port import RecordedFact

TEXT_MAX = 300  # characters; reasons and errors come from workers


class FactSubject(NamedTuple):
    """What a fact is about; None where it names none.

    ``worker`` is the name in operators' orders, which may be that of a machine.
    """

    job: JobId | None
    lease: LeaseNumber | None
    worker: str | None


class LeaseHolders:
    """Remembers which worker has which lease, for the facts that name only the lease.

    Of each job until its end, so memory is bounded by the number of open jobs.
    """

    def __init__(self) -> None:
        self._workers: dict[JobId, dict[LeaseNumber, WorkerId]] = {}

    def subject_of(self, fact: Fact) -> FactSubject:
        """Return what a fact is about.  Call it with the facts in their order."""
        match fact:
            case JobLeased(job, worker, lease) | JobHedged(job, worker, lease):
                self._workers.setdefault(job, {})[lease] = worker
                return FactSubject(job, lease, worker)
            case JobStarted(job, lease) | JobUnhedged(job, lease):
                return FactSubject(job, lease, self._holder(job, lease))
            case JobCompleted(job, lease):
                subject = FactSubject(job, lease, self._holder(job, lease))
                self._workers.pop(job, None)
                return subject
            case JobRequeued(job, lease, refused_by=refused_by):
                return FactSubject(job, lease, refused_by or self._holder(job, lease))
            case JobSubmitted():
                return FactSubject(fact.job_id, None, None)
            case JobFailed(job) | JobCancelled(job) | JobExpired(job):
                self._workers.pop(job, None)
                return FactSubject(job, None, None)
            case LateResult(job, lease, worker):
                return FactSubject(job, lease, worker)
            case ReceiptPresented(job, worker):
                return FactSubject(job, None, worker)
            case WorkerMarked(worker, about=job):
                return FactSubject(job, None, worker)
            case (
                WorkerJoined(worker)
                | WorkerDraining(worker)
                | WorkerLeft(worker)
                | WorkerDismissed(worker)
                | WorkerLoadChanged(worker)
            ):
                return FactSubject(None, None, worker)
            case (
                WorkerSuspended(name)
                | WorkerResumed(name)
                | WorkerApproved(name)
                | WorkerDisapproved(name)
            ):
                return FactSubject(None, None, name)
            case (
                WorkerTrusted()
                | WorkerDistrusted()
                | AccountCredited()
                | AccountLimited()
            ):
                return FactSubject(None, None, None)

    def _holder(self, job_id: JobId, lease: LeaseNumber) -> WorkerId | None:
        return self._workers.get(job_id, {}).get(lease)


def line_of(fact: Fact) -> str:
    """Return a fact as a plain line of bounded length."""
    text = explain_fact(fact)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def subjects(history: Iterable[RecordedFact]) -> list[FactSubject]:
    """Return what each fact of a job's history is about."""
    holders = LeaseHolders()
    return [holders.subject_of(each.fact) for each in history]
