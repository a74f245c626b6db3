"""What follows from what happened: stimuli in, facts out, nothing changed."""

from typing import TypeAlias

from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    ReceiptPresented,
    WorkerConditioned,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Failed,
    Rejected,
)
from shoal.domain.work import Job, Kind, Limit, Privacy
from shoal.pool.match import refusal
from shoal.pool.open_job import OpenJob
from shoal.pool.state import Pool
from shoal.pool.stimuli import (
    Accused,
    Altered,
    Answered,
    Arrived,
    Began,
    Bounded,
    Departed,
    Funded,
    Overdue,
    Paired,
    Proved,
    Retiring,
    Spoiled,
    Stimulus,
    Submitted,
    Withdrawn,
)

NO_TRUSTED_WORKER = "no_trusted_worker"
"""How the error of a private job begins that no worker may have."""

HONEST = frozenset({Verdict.VALID, Verdict.UNSIGNED, Verdict.MISSING})
"""Verdicts that speak against nobody."""

UNPROVEN = 1  # points against a worker whose receipt proves nothing
DIFFERENT = 3  # and against one that answered otherwise than two others
WORKERS_LOST_MAX = 3  # a job that takes this many workers down with it is to blame


Recall: TypeAlias = tuple[WorkerId, CancelJob]


def react(pool: Pool, stimulus: Stimulus) -> list[Fact]:
    """Decide what ``stimulus`` means for the pool as it is.

    What refers to a job that has ended, or to a lease that is over, is never an
    error: messages cross on the way.
    """
    match stimulus:
        case Submitted(job):
            if (hindrance := nobody_trusted(pool, job)) is not None:
                return [JobSubmitted(job), JobFailed(job.id, hindrance)]
            return [JobSubmitted(job)]
        case Withdrawn(job_id, reason):
            return [JobCancelled(job_id, reason)] if job_id in pool.jobs else []
        case Began(job_id, lease):
            begun = pool.jobs.get(job_id)
            if begun is None or all(lease != held for _, held in begun.holders):
                return []
            return [*_first_was(begun, lease), JobStarted(job_id, lease)]
        case Spoiled(job_id, error, lost, cut):
            known = job_id in pool.jobs
            return [JobFailed(job_id, error, lost, cut)] if known else []
        case Overdue(job_id, limit):
            due = pool.jobs.get(job_id)
            return [] if due is None else [_expired(pool, due, limit)]
        case Arrived(worker_id, offer, cancels):
            # Of two with one identity the newer is the living one.
            older = (
                _lost(pool, worker_id, "replaced by a newer connection")
                if worker_id in pool.workers
                else []
            )
            return [*older, WorkerJoined(worker_id, offer, cancels)]
        case Departed(worker_id, reason):
            return _lost(pool, worker_id, reason) if worker_id in pool.workers else []
        case Retiring(worker_id, event):
            known = worker_id in pool.workers
            return [WorkerDraining(worker_id, event.reason)] if known else []
        case Altered(worker_id, condition):
            altered = pool.workers.get(worker_id)
            if altered is None or altered.condition == condition:
                return []
            turned = altered.condition.unfit != condition.unfit
            return [WorkerConditioned(worker_id, condition, turned)]
        case Answered():
            return _answered(pool, stimulus)
        case Proved(worker_id, job_id, verdict):
            presented = ReceiptPresented(job_id, worker_id, verdict)
            return [presented, *_marked(pool, worker_id, job_id, verdict)]
        case Accused(worker_id, reason, about):
            return [_mark(pool, worker_id, DIFFERENT, reason, about)]
        case Paired(owner, user, public_key):
            known = public_key in pool.trusted.get((owner, user), ())
            return [] if known else [WorkerTrusted(owner, user, public_key)]
        case Funded(account, amount, by):
            return [AccountCredited(account, amount, by)]
        case Bounded(account, budget, by):
            return [AccountLimited(account, budget, by)]


def recalls(pool: Pool, fact: Fact) -> list[Recall]:
    """Say who is to stop working because of ``fact``, which is not applied yet."""
    match fact:
        case JobUnhedged(job_id, lease, cut=True):
            over = [lease]
        case JobFailed(job_id, cut=True) | JobCancelled(job_id) | JobExpired(job_id):
            over = [held for _, held in pool.jobs[job_id].holders]
        case _:
            return []
    holders = pool.jobs[job_id].holders
    return [(who, CancelJob(job_id, held)) for who, held in holders if held in over]


def nobody_trusted(pool: Pool, job: Job) -> str | None:
    """Say why a private job cannot be done, though it might wait; None if it can."""
    if job.terms.privacy is not Privacy.PRIVATE:
        return None
    trusted = pool.trusted.get((job.owner, job.terms.user), set())
    workers = pool.roster.with_model.get(job.model, {}).values()
    offers = [each.offer for each in workers if each.offer.public_key in trusted]
    if any(offer.proven for offer in offers):
        return None
    why = (
        "those that are there have not proved their key"
        if offers
        else "none of those is there"
        if trusted
        else "no worker is paired"
    )
    return f"{NO_TRUSTED_WORKER}: only paired workers may have a private job, and {why}"


def _marked(
    pool: Pool, worker_id: WorkerId, job_id: JobId, verdict: Verdict
) -> list[Fact]:
    """Hold a receipt that proves nothing against the worker that gave it."""
    if verdict in HONEST:
        return []
    reason = f"a receipt that proves nothing: {verdict.value}"
    return [_mark(pool, worker_id, UNPROVEN, reason, job_id)]


def _mark(
    pool: Pool, worker_id: WorkerId, points: int, reason: str, about: JobId
) -> WorkerMarked:
    worker = pool.workers.get(worker_id)
    proven = worker is not None and worker.offer.proven
    key = worker.offer.public_key if worker is not None and proven else ""
    return WorkerMarked(worker_id, points, reason, about, key)


def _answered(pool: Pool, answered: Answered) -> list[Fact]:
    worker_id, event = answered.worker_id, answered.event
    outcome, verdict = answered.outcome, answered.verdict
    job = pool.jobs.get(event.job_id)
    if job is None or (worker_id, event.lease) not in job.holders:
        what = type(event).__name__.lower()
        return [CameLate(event.job_id, event.lease, worker_id, what)]
    match event:
        case Completed(job_id, lease):
            return [
                *_first_was(job, lease),
                JobCompleted(job_id, lease, outcome, verdict),
                *_marked(pool, worker_id, job_id, verdict),
            ]
        case Rejected(job_id, lease, reason) if job.hedge is not None:
            return [JobUnhedged(job_id, lease, f"refused it: {reason}")]
        case Rejected(job_id, lease, reason):
            return [JobRequeued(job_id, lease, reason, refused_by=worker_id)]
        case Failed(job_id, lease, error) if job.hedge is not None:
            return [JobUnhedged(job_id, lease, f"failed: {error}")]
        case Failed(job_id, _, error, fault):
            return [JobFailed(job_id, error, fault=fault)]


def _first_was(job: OpenJob, lease: LeaseNumber) -> list[Fact]:
    """Decide that of a job's two workers, if it has two, the other one is to stop."""
    if job.hedge is None:
        return []
    (other,) = (held for _, held in job.holders if held != lease)
    return [JobUnhedged(job.job.id, other, "the other was quicker", cut=True)]


def _lost(pool: Pool, worker_id: WorkerId, reason: str) -> list[Fact]:
    facts: list[Fact] = []
    for job, lease in pool.held_by(worker_id):
        lost = f"worker lost: {reason}"
        if job.kind is Kind.LANE:
            # Whoever holds it has calls that did not return, and opens another.
            facts.append(JobFailed(job.job.id, lost, lost=True))
        elif job.hedge is not None:
            facts.append(JobUnhedged(job.job.id, lease, lost, lost=True))
        elif job.lost + 1 >= WORKERS_LOST_MAX:
            error = f"lost {WORKERS_LOST_MAX} workers, the last one: {reason}"
            facts.append(JobFailed(job.job.id, error, lost=True))
        else:
            facts.append(JobRequeued(job.job.id, lease, lost))
    return [*facts, WorkerLost(worker_id, reason)]


def _expired(pool: Pool, job: OpenJob, limit: Limit) -> JobExpired:
    seconds = {
        Limit.QUEUE: job.job.limits.queue,
        Limit.FIRST_OUTPUT: job.job.limits.first_output,
        Limit.SILENCE: job.job.limits.silence,
        Limit.TOTAL: job.job.limits.total,
    }[limit]
    error = f"{limit.value}: over the limit of {seconds:g} s"
    if limit is Limit.QUEUE:
        error = f"{refusal(pool, job)} ({error})"
    return JobExpired(job.job.id, limit, error)


def overdue(job: OpenJob, now: float, last_output: float | None) -> Limit | float:
    """Return the limit that ``job`` is over, or else when to look again.

    ``last_output`` is when the present lease brought text last, if it has.
    """
    limits = job.job.limits
    if job.worker_id is None:
        due, limit = job.queued_at + limits.queue, Limit.QUEUE
    elif last_output is None:
        due, limit = job.since + limits.first_output, Limit.FIRST_OUTPUT
    else:
        due, limit = last_output + limits.silence, Limit.SILENCE
    in_all = job.submitted_at + limits.total
    if in_all <= due:
        due, limit = in_all, Limit.TOTAL
    return limit if now >= due else due
