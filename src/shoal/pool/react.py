"""Decides which facts follow from an input of the hub; changes nothing."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain import facts
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Fault
from shoal.domain.receipts import Verdict
from shoal.domain.server_refusals import stated_context
from shoal.domain.work import (
    ANY_MODEL,
    INDIVISIBLE_FEATURES,
    Feature,
    JobKind,
    is_repeatable,
)
from shoal.domain.worker import HANDED_OVER
from shoal.pool import eligibility, inputs
from shoal.pool.context_limits import least_known, overcount
from shoal.pool.departures import approval_facts, suspension_facts
from shoal.pool.functions import no_call_result
from shoal.pool.gangs.rules import gang_ends, gang_rejection, waiting_reason
from shoal.pool.job_admission import retry_after
from shoal.pool.lifecycle import JobState
from shoal.pool.models.aliases import alias_facts
from shoal.pool.open_job import FUNCTION_KINDS, OpenJob
from shoal.pool.state import PoolState
from shoal.pool.trust import trust_rejection
from shoal.pool.worker import Worker

HARMLESS_VERDICTS = frozenset({Verdict.VALID, Verdict.UNSIGNED, Verdict.MISSING})
"""Verdicts that cost the worker no points."""

INVALID_RECEIPT_POINTS = 1  # points against a worker for an invalid receipt
WRONG_COUNT_POINTS = 1  # points for a count of tokens that cannot be
WRONG_ANSWER_POINTS = 3  # points for an answer that two others contradict
STILL_RUNS = "it has come back, and still runs the job"  # why it was leased
UNPLACED_RETRY = 60  # seconds until a client may try again what cannot be loaded
GRACE_LOOK = 5.0  # seconds: a worker may have come back since
LENGTH_REFUSALS_MAX = 16  # workers that are asked to read a long request
WORKERS_LOST_MAX = 3  # a job fails after losing this many workers
CALL_WORKERS_LOST_MAX = 2  # the same for a call, whose function may end its worker
MEMBER_LOSS_EARNED = (
    3600.0  # seconds that a gang's member ran, for one more lost worker
)

RESULT_NAMES: Mapping[type[words.Completed | words.Rejected | words.Failed], str] = {
    words.Completed: "completed",
    words.Rejected: "rejected",
    words.Failed: "failed",
}
"""What ``LateResult.what`` stores of each result."""

Revocation: TypeAlias = tuple[WorkerId, words.CancelJob]


def react(pool: PoolState, hub_input: inputs.HubInput) -> list[facts.Fact]:
    """Return the facts that follow from ``hub_input`` in the present pool.

    An input about a job or lease that has ended is never an error: messages cross on
    the way.
    """
    found = _react(pool, hub_input)
    return [*found, *gang_ends(pool, found)] if pool.gangs.by_id else found


def _react(pool: PoolState, hub_input: inputs.HubInput) -> list[facts.Fact]:
    match hub_input:
        case inputs.Submission(job):
            if (reason := trust_rejection(pool, job)) is not None:
                return [facts.JobSubmitted(job), facts.JobFailed(job.id, reason)]
            if (reason := gang_rejection(pool, job)) is not None:
                refused = facts.JobFailed(job.id, reason, fault=Fault.REQUEST)
                return [facts.JobSubmitted(job), refused]
            return [facts.JobSubmitted(job)]
        case inputs.Cancellation(job_id, reason):
            return [facts.JobCancelled(job_id, reason)] if job_id in pool.jobs else []
        case inputs.FirstOutput(job_id, lease):
            begun = pool.jobs.get(job_id)
            if begun is None or all(lease != held for _, held in begun.holders):
                return []
            return [*_first_output(begun, lease), facts.JobStarted(job_id, lease)]
        case inputs.AnswerRejected(job_id, error, lost, cut):
            known = job_id in pool.jobs
            return [facts.JobFailed(job_id, error, lost, cut)] if known else []
        case inputs.LimitReached(job_id, limit):
            due = pool.jobs.get(job_id)
            return [] if due is None else _limit_reached(pool, due, limit)
        case inputs.WorkerConnected(worker_id, offer, cancels, shared, running):
            # A newer connection with the same identity replaces the older.
            older = (
                _worker_left(pool, worker_id, "replaced by a newer connection")
                if worker_id in pool.workers
                else []
            )
            keeps = running is not None
            joined = facts.WorkerJoined(worker_id, offer, cancels, shared, keeps)
            return [
                *older,
                *pool.approvals.decided_by(worker_id, offer),
                joined,
                *_resumed(pool, joined, dict(running or ()), older),
            ]
        case inputs.WorkerDisconnected(worker_id, reason):
            return (
                _worker_left(pool, worker_id, reason)
                if worker_id in pool.workers
                else []
            )
        case inputs.DrainAnnounced(worker_id, event):
            known = worker_id in pool.workers
            return [facts.WorkerDraining(worker_id, event.reason)] if known else []
        case inputs.LoadReported(worker_id, condition):
            altered = pool.workers.get(worker_id)
            if altered is None or altered.load == condition:
                return []
            turned = altered.load.unfit != condition.unfit
            return [facts.WorkerLoadChanged(worker_id, condition, turned)]
        case inputs.LeaseResult():
            return _on_result(pool, hub_input)
        case inputs.ReceiptVerified(worker_id, job_id, verdict, receipt):
            presented = facts.ReceiptPresented(job_id, worker_id, verdict, receipt)
            return [presented, *_receipt_marks(pool, worker_id, job_id, verdict)]
        case inputs.AnswerDisputed(worker_id, reason, about):
            return [_mark(pool, worker_id, WRONG_ANSWER_POINTS, reason, about)]
        case inputs.WorkerPaired(owner, user, public_key):
            known = public_key in pool.trusted_keys.get((owner, user), ())
            return [] if known else [facts.WorkerTrusted(owner, user, public_key)]
        case inputs.WorkerUnpaired(owner, user, public_key):
            known = public_key in pool.trusted_keys.get((owner, user), ())
            return [facts.WorkerDistrusted(owner, user, public_key)] if known else []
        case inputs.WorkerSuspension():
            return suspension_facts(pool, hub_input)
        case inputs.WorkerResumption(name, by):
            return (
                [facts.WorkerResumed(name, by)]
                if pool.suspensions.ended_by(name)
                else []
            )
        case inputs.WorkerApproval():
            return approval_facts(pool, hub_input)
        case inputs.AccountTopUp(account, amount, by):
            return [facts.AccountCredited(account, amount, by)]
        case inputs.BudgetSet(account, budget, by):
            return [facts.AccountLimited(account, budget, by)]
        case inputs.AliasOrder(name, models, by):
            return [*alias_facts(pool, name, models, by)]
        case inputs.DeploymentOrder(name, deployment, by):
            if deployment is not None:
                known = pool.deployments.get(name) == deployment
                return [] if known else [deployment]
            removed = facts.DeploymentRemoved(name, by)
            return [removed] if name in pool.deployments else []
        case inputs.ModelUnplaced(model, reason):
            return _unplaced(pool, model, reason)


REVOKING = (
    facts.JobUnhedged,
    facts.JobFailed,
    facts.JobCancelled,
    facts.JobExpired,
    facts.JobRequeued,
)
"""The facts that may require cancellations."""


def revocations(pool: PoolState, fact: facts.Fact) -> list[Revocation]:
    """Return the cancellations that ``fact``, not yet applied, requires."""
    match fact:
        case facts.JobUnhedged(job_id, lease, cut=True):
            over = [lease]
        case (
            facts.JobFailed(job_id, cut=True)
            | facts.JobCancelled(job_id)
            | facts.JobExpired(job_id)
            | facts.JobRequeued(job_id, handed_over=True)
        ):
            over = [held for _, held in pool.jobs[job_id].holders]
        case _:
            return []
    holders = pool.jobs[job_id].holders
    return [
        (who, words.CancelJob(job_id, held)) for who, held in holders if held in over
    ]


def _receipt_marks(
    pool: PoolState, worker_id: WorkerId, job_id: JobId, verdict: Verdict
) -> list[facts.Fact]:
    """Mark the worker that presented an invalid receipt."""
    if verdict in HARMLESS_VERDICTS:
        return []
    reason = f"an invalid receipt: {verdict.value}"
    return [_mark(pool, worker_id, INVALID_RECEIPT_POINTS, reason, job_id)]


def _mark(
    pool: PoolState, worker_id: WorkerId, points: int, reason: str, about: JobId
) -> facts.WorkerMarked:
    worker = pool.workers.get(worker_id)
    key = "" if worker is None else worker.offer.proven_key
    return facts.WorkerMarked(worker_id, points, reason, about, key)


def _on_result(pool: PoolState, answered: inputs.LeaseResult) -> list[facts.Fact]:
    worker_id, event = answered.worker_id, answered.event
    outcome, verdict = answered.outcome, answered.verdict
    job = pool.jobs.get(event.job_id)
    if job is None or (worker_id, event.lease) not in job.holders:
        return [
            facts.LateResult(
                event.job_id, event.lease, worker_id, RESULT_NAMES[type(event)]
            )
        ]
    match event:
        case words.Completed(job_id, lease, receipt=receipt):
            output_hash = answered.output_hash
            marks = _receipt_marks(pool, worker_id, job_id, verdict)
            if (over := overcount(job.job.work, outcome)) is not None:
                # As if it had reported none, which is then estimated.
                outcome = replace(outcome, usage=None)
                if over.wrong:
                    points = WRONG_COUNT_POINTS
                    marks.append(_mark(pool, worker_id, points, over.reason, job_id))
            return [
                *_first_output(job, lease),
                facts.JobCompleted(
                    *(job_id, lease, outcome, verdict, output_hash, receipt),
                    first_output=answered.first_output,
                ),
                *marks,
            ]
        case words.Rejected(job_id, lease, reason) if job.hedge is not None:
            return [facts.JobUnhedged(job_id, lease, f"refused it: {reason}")]
        case words.Rejected(_, _, reason) if job.state is JobState.STREAMING:
            return [_gave_up(job, worker_id, reason)]
        case words.Rejected(job_id, lease, reason):
            return [facts.JobRequeued(job_id, lease, reason, refused_by=worker_id)]
        case words.Failed(job_id, lease, error, fault) if job.hedge is not None:
            too_long, failed = fault is Fault.CONTEXT, job.is_of_engine(fault)
            why = error if failed else f"failed: {error}"
            ended = facts.JobUnhedged(
                job_id, lease, why, too_long=too_long, failed=failed
            )
            return [ended]
        case words.Failed(fault=Fault.CONTEXT) if job.state is JobState.LEASED:
            return [_too_long(pool, job, pool.workers[worker_id], event.error)]
        case words.Failed(job_id, _, error, fault, exception):
            if _may_help_again(pool, job, worker_id, event):
                return [
                    facts.JobRequeued(job_id, job.lease, error, worker_id, failed=True)
                ]
            return [facts.JobFailed(job_id, error, fault=fault, exception=exception)]


def _may_help_again(
    pool: PoolState, job: OpenJob, worker_id: WorkerId, event: words.Failed
) -> bool:
    """Return whether a job goes on although an engine failed at it.

    Only if none has failed with these words before: two engines that say the same fail
    again.  It goes on where the engine may recover, or at another worker; an answer
    that has begun only at one that can continue it.
    """
    if not job.is_of_engine(event.fault):
        return False
    failures = max(job.lost, len(job.failures)) + 1
    earlier = {_words(error) for _, error in job.failures}
    if failures >= WORKERS_LOST_MAX or _words(event.error) in earlier:
        return False
    if event.fault is Fault.ENGINE:
        return True
    begun = job.state is JobState.STREAMING
    found = eligibility.suitable_workers(pool, job)
    return found is None or any(
        each.id != worker_id and (not begun or Feature.CONTINUE in each.offer.features)
        for each in found
    )


def _words(error: str) -> str:
    """Return an error without its numbers, which name a request or a time."""
    return re.sub(r"\d+", "", error)


def _too_long(pool: PoolState, job: OpenJob, worker: Worker, error: str) -> facts.Fact:
    """Give a job that a worker refused for its length to one that may read more."""
    key = job.context_key
    longest = least_known(worker.context_of(key), stated_context(error))
    tokens = max(job.tokens_min, longest + 1)
    found = eligibility.suitable_workers(pool, job)
    others = [each for each in found or () if each is not worker]
    left = found is None or any(
        eligibility.length_refusal(job, each, tokens) is None for each in others
    )
    if left and len(job.too_long_for) + 1 < LENGTH_REFUSALS_MAX:
        return facts.JobRequeued(job.job.id, job.lease, error, worker.id, too_long=True)
    longest = max([longest, *(each.context_of(key) for each in others)])
    if longest and re.search(rf"\b{longest}\b", error) is None:
        # In words that ``stated_context`` does not read as this worker's.
        error = f"{error} (the longest context here: {longest} tokens)"
    return facts.JobFailed(job.job.id, error, fault=Fault.CONTEXT)


def _gave_up(job: OpenJob, worker_id: WorkerId, reason: str) -> facts.Fact:
    """Requeue a job whose worker stopped in the middle of the answer.

    Counted like a lost worker, so that an answer that no worker finishes has an end:
    unless the worker hands it over because its owner needs the machine.
    """
    if reason.startswith(HANDED_OVER):
        return facts.JobRequeued(
            job.job.id, job.lease, reason, refused_by=worker_id, handed_over=True
        )
    limit = WORKERS_LOST_MAX if job.gang is None else _workers_lost_max(job)
    if job.lost + 1 >= limit:
        error = f"lost {job.lost + 1} workers, the last one: {reason}"
        return facts.JobFailed(job.job.id, error, lost=True)
    return facts.JobRequeued(job.job.id, job.lease, reason, refused_by=worker_id)


def _first_output(job: OpenJob, lease: LeaseNumber) -> list[facts.Fact]:
    """End the other lease of a hedged job: its first output decides the race."""
    if job.hedge is None:
        return []
    (other,) = (held for _, held in job.holders if held != lease)
    return [facts.JobUnhedged(job.job.id, other, "the other one was faster", cut=True)]


def _worker_left(pool: PoolState, worker_id: WorkerId, reason: str) -> list[facts.Fact]:
    found: list[facts.Fact] = []
    for job, lease in pool.leases_of(worker_id):
        lost = f"worker lost: {reason}"
        worker = pool.workers[worker_id]
        if job.kind is JobKind.CALL_STREAM and not worker.keeps_jobs:
            # Its holder has calls that did not return, and opens another stream.
            found.append(facts.JobFailed(job.job.id, lost, lost=True))
        elif job.hedge is not None:
            found.append(facts.JobUnhedged(job.job.id, lease, lost, lost=True))
        elif job.lost + 1 >= _workers_lost_max(job):
            error = f"lost {job.lost + 1} workers, the last one: {reason}"
            found.append(facts.JobFailed(job.job.id, error, lost=True))
        else:
            awaited = _only_it_goes_on(pool, job, worker)
            found.append(facts.JobRequeued(job.job.id, lease, lost, awaited=awaited))
    return [*found, facts.WorkerLeft(worker_id, reason)]


def _only_it_goes_on(pool: PoolState, job: OpenJob, lost: Worker) -> bool:
    """Return whether no worker but the lost one can go on with a job.

    It may come back with the rest of an answer, which has been read in part, and with a
    function, which may have done what must not be done twice.
    """
    if not (lost.keeps_jobs and job.can_resume) or lost.dismissed:
        return False
    if job.kind in FUNCTION_KINDS:
        return True
    if not job.started or is_repeatable(job.job.work):
        return False
    if job.needs & INDIVISIBLE_FEATURES:
        return True
    found = eligibility.suitable_workers(pool, job)
    return found is not None and not any(
        each is not lost and Feature.CONTINUE in each.offer.features for each in found
    )


def _resumed(
    pool: PoolState,
    joined: facts.WorkerJoined,
    running: Mapping[JobId, LeaseNumber],
    older: Sequence[facts.Fact],
) -> list[facts.Fact]:
    """Lease to a worker that has come back what it still runs, and nobody else.

    ``older`` is what
    follows from the loss of its earlier connection, if that was not noticed before.
    """
    if not running:
        return []
    requeued = {each.job_id for each in older if isinstance(each, facts.JobRequeued)}
    worker = Worker(joined.worker_id, joined.offer, joined.cancels)
    found: list[facts.Fact] = []
    for job_id, lease in running.items():
        job = pool.jobs.get(job_id)
        if job is None or not job.can_resume:
            continue
        still_its = job_id in requeued and job.lease == lease
        unrecorded = job.worker_id is None and job.may_have(lease)
        if not (still_its or unrecorded or job.was_run_by(worker.id, lease)):
            continue
        if eligibility.unsuitability(job, worker) is None:
            next_lease = LeaseNumber(max(job.last_lease, lease) + 1)
            given = (job_id, worker.id, next_lease, STILL_RUNS)
            found.append(facts.JobLeased(*given, kept=True, resumes=lease))
    return found


def _workers_lost_max(job: OpenJob) -> int:
    if job.gang is not None:
        return WORKERS_LOST_MAX + int(job.ran / MEMBER_LOSS_EARNED)
    is_call = job.kind is JobKind.CALL
    return CALL_WORKERS_LOST_MAX if is_call else WORKERS_LOST_MAX


def _limit_reached(pool: PoolState, job: OpenJob, limit: TimeLimit) -> list[facts.Fact]:
    seconds = {
        TimeLimit.QUEUE: job.job.limits.queue,
        TimeLimit.FIRST_OUTPUT: job.job.limits.first_output,
        TimeLimit.SILENCE: job.job.limits.silence,
        TimeLimit.TOTAL: job.job.limits.total,
    }[limit]
    error = f"{limit.value}: over the limit of {seconds:g} s"
    if limit is TimeLimit.QUEUE and job.gang is not None:
        if job.worker_id is not None:
            return []  # leased meanwhile: its gang has begun
        error = f"{waiting_reason(pool, job.gang)} ({error})"
        waiting = job.gang.waiting.values()
        expired = [job.job.id] if job.gang.formed else waiting
        return [facts.JobExpired(each, limit, error) for each in expired]
    if limit is TimeLimit.QUEUE:
        if not eligibility.has_suitable_worker(pool, job):
            seconds = min(seconds, job.job.limits.without_worker)
            error = f"{limit.value}: over the limit of {seconds:g} s"
        error = f"{eligibility.no_worker_reason(pool, job)} ({error})"
        return [
            facts.JobExpired(job.job.id, limit, error, 0, retry_after(pool, job.job))
        ]
    if limit is TimeLimit.FIRST_OUTPUT and job.kind is JobKind.CALL:
        error = no_call_result(seconds)
    return [facts.JobExpired(job.job.id, limit, error)]


def _unplaced(pool: PoolState, model: str, reason: str) -> list[facts.Fact]:
    """End the jobs that wait for a model which no machine can load."""
    if not eligibility.awaits_load(pool, model) or pool.model_orders.concern(model):
        return []  # it was loaded by now, or is, or a machine makes room for it
    error = f"{model} cannot be loaded: {reason}"
    jobs = [turn.job.job for turn in pool.queues[model].in_order()]
    return [
        facts.JobExpired(job.id, TimeLimit.QUEUE, error, 0, UNPLACED_RETRY)
        for job in jobs
    ]


def _may_get_worker(pool: PoolState, job: OpenJob) -> bool:
    """Return whether a worker could take a job, or any model that does is loaded."""
    if eligibility.has_suitable_worker(pool, job):
        return True
    return job.model == ANY_MODEL and pool.model_orders.is_loading


def next_limit(
    pool: PoolState, job: OpenJob, now: float, last_output: float | None
) -> TimeLimit | float:
    """Return the limit that ``job`` exceeds, or else when to check again.

    ``last_output`` is the time of the present lease's last output, if any.
    """
    limits = job.job.limits
    if job.worker_id is None:
        due, limit = job.queued_at + limits.queue, TimeLimit.QUEUE
        if due <= now < job.grace_until and not eligibility.has_suitable_worker(
            pool, job
        ):
            due = min(job.grace_until, now + GRACE_LOOK)
        look = max(now, job.queued_at + limits.without_worker, job.grace_until)
        look = max(look, pool.sleepers.awaited_until(job.model))
        if look < due and not eligibility.awaits_load(pool, job.model):
            if now == look and not _may_get_worker(pool, job):
                return limit
            # A busy worker may leave: look again after a while.
            due = look if now < look else min(due, now + limits.without_worker)
    elif last_output is None:
        due, limit = job.since + limits.first_output, TimeLimit.FIRST_OUTPUT
    else:
        due, limit = last_output + limits.silence, TimeLimit.SILENCE
    in_all = job.submitted_at + limits.total
    if in_all <= due:
        due, limit = in_all, TimeLimit.TOTAL
    return limit if now >= due else due
