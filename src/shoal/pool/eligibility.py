"""The reasons why a worker cannot take a job, worded for users."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from shoal.domain import work as works
from shoal.domain.facts import PassedOver
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.job_kinds import FUNCTION_KINDS
from shoal.domain.worker import Offer
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.lifecycle import JobState
from shoal.pool.open_job import OpenJob
from shoal.pool.roster import SuitableWorkers, remember
from shoal.pool.state import PoolState
from shoal.pool.suspensions import SUSPENDED
from shoal.pool.worker import Worker

LISTED_MAX = 8  # workers named in an explanation; the others are counted
POINTS_MAX = 3  # points at which a worker gets no more jobs
WORKERS_EXAMINED_MAX = 64  # for one explanation
SUITABLE_EXAMINED_MAX = 256  # workers that may read more than one that refused a job

ALL_BUSY = "all slots busy"
LAST_RESORT = "is a hosted provider, for jobs that no machine of the pool takes in time"
FEATURE_MESSAGES = {
    works.Feature.CODE: (
        "does not run functions sent by clients (`shoal join --trust-code` does)"
    ),
    works.Feature.VALUES: "accepts plain values only",
}
"""Descriptions of workers without a feature, where its name is not enough."""


def offers_task(offer: Offer, task: str) -> bool:
    """Return whether a worker runs a task or has a function.

    A worker that names none may have any; but Shoal's workers name all that they have.
    """
    if offer.tasks or works.Feature.VALUES in offer.features:
        return task in offer.tasks
    return True


def runs_python(offer: Offer, python: str) -> bool:
    """Return whether a worker runs code of a version of Python, as far as is known."""
    return not python or not offer.pythons or python in offer.pythons


def ineligibility(job: OpenJob, worker: Worker) -> str | None:
    """Return why ``worker`` cannot take ``job`` now, or None if it can.

    The wording reaches users: a 503 and ``explain`` show it.
    """
    return unsuitability(job, worker) or _refusal(job, worker)


def unsuitability(job: OpenJob, worker: Worker) -> str | None:
    """Return why ``worker`` can take no job now that needs what ``job`` does, or None.

    It depends on nothing of the job but its model and its need.
    """
    offer = worker.offer
    if worker.suspension is not None:
        return SUSPENDED[worker.suspension]
    if worker.draining:
        return "draining"
    if job.kind not in offer.kinds:
        if job.kind in FUNCTION_KINDS:
            return "cannot call functions"
        if job.kind is works.JobKind.MODEL:
            return "loads no models for the pool"
        return f"does not run {job.kind.value} jobs"
    if job.model not in worker.queues:
        return _missing_queue(job)
    if job.kind is works.JobKind.MODEL:
        return None if job.task == worker.id else "is another machine"
    if job.task is not None and not offers_task(offer, job.task):
        return f"does not have {works.describe_target(job.job.work)}"
    if job.trusted_keys is not None and offer.public_key not in job.trusted_keys:
        return "is not paired with the user, and the job is private"
    if job.trusted_keys is not None and not offer.proven:
        return "has not proved its key, and the job is private"
    if offer.last_resort is not None:
        if job.job.terms.hosted_after is None:
            return "is a hosted provider, and the job's key allows none (`--hosted`)"
        if job.trusted_keys is not None:
            return "is a hosted provider, and the job is private"
    if job.job.terms.near and offer.neighbour:
        return "is another pool, and the job came from one"
    if job.job.terms.peer and peer_of(worker.id) == job.job.terms.peer:
        return "submitted it"
    if worker.id in job.job.terms.avoid:
        return "ran the job that this one checks"
    if worker.points >= POINTS_MAX:
        return "is excluded because of penalty points"
    if not job.needs <= offer.features:
        return _missing_features(job.needs - offer.features)
    if not runs_python(offer, job.python):
        return f"runs code of Python {join_versions(offer.pythons)}, not {job.python}"
    if offer.needs_question and not job.has_question:
        return "needs a message other than the system's"
    if job.gang is not None:
        return _gang_unsuitability(job.gang, offer)
    return None


def length_refusal(job: OpenJob, worker: Worker, tokens: int) -> str | None:
    """Return why ``job`` is too long for ``worker``, or None if it may not be.

    ``tokens`` are the fewest that it can have.
    """
    if worker.id in job.too_long_for:
        return f"refused it for its length: {job.too_long_for[worker.id]}"
    if 0 < (context := worker.context_of(job.context_key)) < tokens:
        return f"reads {context} tokens, fewer than the request has"
    contexts = worker.contexts
    if contexts is not None and contexts.exclude(job.context_key, job.length):
        return "refused a request no longer than this one for its length"
    return None


def restriction(job: OpenJob, worker: Worker) -> str | None:
    """Return why ``worker`` works for others than the client of ``job``, or None."""
    offer = worker.offer
    if offer.only_for and job.job.owner not in offer.only_for:
        return "works for other keys only"
    if offer.privacy is not None and job.job.terms.privacy is not offer.privacy:
        return f"accepts {offer.privacy.value} jobs only"
    return None


def suitable_workers(pool: PoolState, job: OpenJob) -> Iterator[Worker] | None:
    """Yield the workers that could take ``job`` if it is not too long, free or not.

    None: there are too many to examine.
    """
    with_model = pool.roster.with_model.get(job.model, {})
    if len(with_model) > SUITABLE_EXAMINED_MAX:
        return None
    return (
        worker
        for worker in with_model.values()
        if unsuitability(job, worker) is None and restriction(job, worker) is None
    )


def has_suitable_worker(pool: PoolState, job: OpenJob) -> bool:
    """Return whether some worker could take ``job`` if it is not too long, or may."""
    found = suitable_workers(pool, job)
    return found is None or any(True for _ in found) or bool(hosted_for(pool, job))


def hosted_for(pool: PoolState, job: OpenJob) -> Sequence[Worker]:
    """Return the workers of last resort that could take ``job``, free or not."""
    if job.job.terms.hosted_after is None:
        return ()
    return [
        worker
        for worker in pool.roster.hosted.get(job.model, {}).values()
        if unsuitability(job, worker) is None
        and restriction(job, worker) is None
        and length_refusal(job, worker, job.tokens_min) is None
    ]


def awaits_load(pool: PoolState, model: str) -> bool:
    """Return whether jobs wait for a model that no worker has, but could load."""
    return pool.roster.has_to_load(model) and model in pool.queues


def waits_for_another(pool: PoolState, job: OpenJob, worker_id: WorkerId) -> bool:
    """Return whether a job at which a worker's engine failed waits for another worker.

    Its engine would most likely fail in the same words, which ends the job.  A worker
    that has just refused the job is not waited for: it may refuse it every time.
    """
    failed = {each for each, _ in job.failures}
    if worker_id not in failed or job.state is not JobState.QUEUED:
        return False
    found = suitable_workers(pool, job)
    return found is None or any(
        each.id not in failed
        and each.id not in job.refused_by
        and each.accepts_jobs
        and each.offer.slots > 0
        and length_refusal(job, each, job.tokens_min) is None
        for each in found
    )


def _gang_unsuitability(gang: OpenGang, offer: Offer) -> str | None:
    if offer.neighbour:
        return "is another pool, whose machines cannot reach this run"
    if offer.slots < gang.slots:
        return f"has {_slots(offer.slots)}, and each member needs {gang.slots}"
    return None


def _refusal(job: OpenJob, worker: Worker) -> str | None:
    """Return why a suitable worker cannot take this job now, or None if it can."""
    offer = worker.offer
    if (
        0 < offer.context < job.tokens_min
        or worker.contexts is not None
        or job.too_long_for
    ) and (too_long := length_refusal(job, worker, job.tokens_min)) is not None:
        return too_long
    if offer.is_restricted and (other := restriction(job, worker)) is not None:
        return other
    if worker.id in job.refused_by:
        return f"refused it: {job.refused_by[worker.id]}"
    if worker.unfit:
        return worker.unfit
    if offer.slots <= 0:
        return (
            f"offers no slots ({offer.remark})" if offer.remark else "offers no slots"
        )
    if job.gang is not None:
        busy = _gang_refusal(job.gang, worker)
    elif worker.free_slots <= 0 or (
        job.kind is not works.JobKind.CALL and worker.busy_slots >= worker.slots
    ):
        busy = ALL_BUSY  # except for calls, which may be prefetched
    else:
        busy = None
    if busy is None and job.job.id in worker.leases:
        return (
            "is already running it"  # perhaps under a lease that could not be cancelled
        )
    return busy


def _gang_refusal(gang: OpenGang, worker: Worker) -> str | None:
    machine = peer_of(worker.id)
    if machine in gang.machines:
        return f"runs rank {gang.machines[machine]} of the group"
    slots, used = worker.offer.slots, worker.busy_slots
    if gang.slots:
        free = max(0, slots - used)
        enough = free >= gang.slots
        return None if enough else f"{free} of its {_slots(slots)} free"
    if used:
        return f"{used} of its {_slots(slots)} busy, and each member needs all"
    if worker.load.queued:
        return f"has other jobs ({worker.load.queued}), and each member needs all"
    return None


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def passed_over(
    pool: PoolState,
    job: OpenJob,
    chosen: Collection[WorkerId] = (),
    otherwise: str = "another worker was expected to be faster",
) -> tuple[PassedOver, ...]:
    """Group the workers that did not get ``job`` by reason, without the ``chosen``.

    In a large pool, only the first workers with the model are examined.  ``otherwise``
    is the reason of those that could have got it.
    """
    found = suitable_for(pool, job)
    refused = job.refused_by or job.too_long_for or job.last_lease
    reasons: dict[str, list[WorkerId]] = {}
    if refused or job.gang or not found.alike or job.tokens_min > found.context:
        for worker in found.workers:
            if worker.id not in chosen:
                reason = _refusal(job, worker) or otherwise
                reasons.setdefault(reason, []).append(worker.id)
    else:
        # Without a call for each: a model may have many workers, and many jobs.
        prefetches = job.kind is works.JobKind.CALL
        taking: list[WorkerId] = []
        busy: list[WorkerId] = []
        for worker in found.workers:
            if worker.id not in chosen:
                room = worker.free_slots - (0 if prefetches else worker.prefetch)
                (taking if room > 0 else busy).append(worker.id)
        if taking:
            reasons[otherwise] = taking
        if busy:
            reasons[ALL_BUSY] = busy
    return *map(_group, reasons, reasons.values()), *found.others


def suitable_for(pool: PoolState, job: OpenJob) -> SuitableWorkers:
    """Find, once for all jobs with the model and need of ``job``, who takes them.

    Of a large pool, only the first workers with the model are examined.
    """
    known = pool.roster.findings.suitable
    if (found := known.get(job.requirement)) is not None:
        return found
    with_model = pool.roster.with_model.get(job.model, {})
    suitable: list[Worker] = []
    reasons: dict[str, list[WorkerId]] = {}
    for worker in islice(with_model.values(), WORKERS_EXAMINED_MAX):
        reason = unsuitability(job, worker)
        if reason is None:
            suitable.append(worker)
        else:
            reasons.setdefault(reason, []).append(worker.id)
    for worker in pool.roster.hosted.get(job.model, {}).values():
        reason = unsuitability(job, worker) or LAST_RESORT
        reasons.setdefault(reason, []).append(worker.id)
    others = [*map(_group, reasons, reasons.values())]
    if (unseen := len(with_model) - WORKERS_EXAMINED_MAX) > 0:
        others.append(PassedOver("not examined one by one", unseen))
    if without := len(pool.workers) - len(with_model) - pool.last_resorts:
        others.append(PassedOver(_missing_queue(job), without))
    alike = not any(
        each.offer.is_restricted
        or each.contexts is not None
        or each.unfit
        or each.offer.slots <= 0
        for each in suitable
    )
    context = min((each.offer.context or math.inf for each in suitable), default=0)
    return remember(
        known,
        job.requirement,
        SuitableWorkers(tuple(suitable), tuple(others), alike, context),
    )


def _group(reason: str, ids: Sequence[WorkerId]) -> PassedOver:
    return PassedOver(reason, len(ids), tuple(ids[:LISTED_MAX]))


def no_worker_reason(pool: PoolState, job: OpenJob) -> str:
    """Return in one line why no worker can take ``job`` now."""
    target = works.describe_target(job.job.work)
    if not pool.workers:
        return f"no worker for {target}: no worker is connected"
    reasons = ", ".join(_counted(job, group) for group in passed_over(pool, job))
    return f"no worker for {target}: {reasons}"


def _counted(job: OpenJob, group: PassedOver) -> str:
    """Return why the workers of a group cannot take ``job``, and how many they are."""
    one, count = group.count == 1, group.count
    if group.reason != ALL_BUSY:
        return f"{group.reason} ({'1 worker' if one else f'{count} workers'})"
    what = "one" if job.model == works.ANY_MODEL else "it"
    if one:
        return f"1 worker has {what} but is full"
    return f"{count} workers have {what} but are full"


def join_versions(pythons: Iterable[str]) -> str:
    """Return versions of Python in their order, for messages."""
    return ", ".join(sorted(pythons, key=lambda each: (len(each), each)))


def _missing_features(missing: frozenset[works.Feature]) -> str:
    for feature, words in FEATURE_MESSAGES.items():
        if feature in missing:
            return words
    names = ", ".join(sorted(feature.value for feature in missing))
    return f"cannot do: {names}"


def _missing_queue(job: OpenJob) -> str:
    lacks = {
        works.TASK_QUEUE: "cannot run tasks",
        works.CALL_QUEUE: "cannot call functions",
        works.MODEL_QUEUE: "loads no models for the pool",
        works.ANY_MODEL: "has no chat model",
    }
    return lacks.get(job.model, f"does not have {job.model}")
