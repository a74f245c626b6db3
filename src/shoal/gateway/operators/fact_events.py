"""Facts as events: a fact with its job, its worker and a plain line."""

from collections.abc import Iterable
from typing import NamedTuple

from shoal.domain import facts
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

    def subject_of(self, fact: facts.Fact) -> FactSubject:
        """Return what a fact is about.  Call it with the facts in their order."""
        # Of each fact of each job: patterns that capture nothing are twice as fast.
        match fact:
            case facts.JobLeased() | facts.JobHedged():
                job, lease, worker = fact.job_id, fact.lease, fact.worker_id
                self._workers.setdefault(job, {})[lease] = worker
                return FactSubject(job, lease, worker)
            case facts.JobStarted() | facts.JobUnhedged():
                return self._under_lease(fact.job_id, fact.lease)
            case facts.JobSubmitted():
                return FactSubject(fact.job_id, None, None)
            case facts.JobCompleted():
                subject = self._under_lease(fact.job_id, fact.lease)
                self._workers.pop(fact.job_id, None)
                return subject
            case facts.JobFailed() | facts.JobCancelled() | facts.JobExpired():
                self._workers.pop(fact.job_id, None)
                return FactSubject(fact.job_id, None, None)
            case facts.JobRequeued():
                if fact.refused_by is None:
                    return self._under_lease(fact.job_id, fact.lease)
                return FactSubject(fact.job_id, fact.lease, fact.refused_by)
            case facts.LateResult():
                return FactSubject(fact.job_id, fact.lease, fact.worker_id)
            case facts.ReceiptPresented():
                return FactSubject(fact.job_id, None, fact.worker_id)
            case facts.WorkerMarked():
                return FactSubject(fact.about, None, fact.worker_id)
            case (
                facts.WorkerJoined()
                | facts.WorkerDraining()
                | facts.WorkerLeft()
                | facts.WorkerDismissed()
                | facts.WorkerLoadChanged()
            ):
                return FactSubject(None, None, fact.worker_id)
            case (
                facts.WorkerSuspended()
                | facts.WorkerResumed()
                | facts.WorkerApproved()
                | facts.WorkerDisapproved()
            ):
                return FactSubject(None, None, fact.name)
            case (
                facts.WorkerTrusted()
                | facts.WorkerDistrusted()
                | facts.AccountCredited()
                | facts.AccountLimited()
            ):
                return FactSubject(None, None, None)

    def _under_lease(self, job: JobId, lease: LeaseNumber) -> FactSubject:
        held = self._workers.get(job)
        return FactSubject(job, lease, None if held is None else held.get(lease))


def line_of(fact: facts.Fact) -> str:
    """Return a fact as a plain line of bounded length."""
    text = explain_fact(fact)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def subjects(history: Iterable[RecordedFact]) -> list[FactSubject]:
    """Return what each fact of a job's history is about."""
    holders = LeaseHolders()
    return [holders.subject_of(each.fact) for each in history]
