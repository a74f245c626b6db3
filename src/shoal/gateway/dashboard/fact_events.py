"""Facts as events: a fact with its job, its worker and a plain line."""

from collections.abc import Iterable
from typing import NamedTuple

from shoal.domain.facts import (
    JOB_ENDS,
    Fact,
    JobHedged,
    JobLeased,
    JobRequeued,
    WorkerApproved,
    WorkerDisapproved,
    WorkerMarked,
    WorkerResumed,
    WorkerSuspended,
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
        job: JobId | None = getattr(fact, "job_id", None)
        lease: LeaseNumber | None = getattr(fact, "lease", None)
        worker: str | None = getattr(fact, "worker_id", None)
        match fact:
            case JobLeased() | JobHedged():
                self._workers.setdefault(fact.job_id, {})[fact.lease] = fact.worker_id
            case JobRequeued(refused_by=refused_by) if refused_by is not None:
                worker = refused_by
            case (
                WorkerSuspended(name)
                | WorkerResumed(name)
                | WorkerApproved(name)
                | WorkerDisapproved(name)
            ):
                worker = name
            case WorkerMarked(about=about):
                job = about
            case _:  # the others name what they are about
                pass
        if worker is None and job is not None and lease is not None:
            worker = self._workers.get(job, {}).get(lease)
        if isinstance(fact, JOB_ENDS):
            self._workers.pop(fact.job_id, None)
        return FactSubject(job, lease, worker)


def line_of(fact: Fact) -> str:
    """Return a fact as a plain line of bounded length."""
    text = explain_fact(fact)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def subjects(history: Iterable[RecordedFact]) -> list[FactSubject]:
    """Return what each fact of a job's history is about."""
    holders = LeaseHolders()
    return [holders.subject_of(each.fact) for each in history]
