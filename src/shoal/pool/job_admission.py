"""Rejects jobs at once that could never run, or would expire in the queue."""

import math
from collections.abc import Collection, Sequence, Set
from itertools import islice

from shoal.domain.errors import (
    CannotDo,
    ContextExceeded,
    Forbidden,
    InvalidRequest,
    QueueFull,
    ShoalError,
    UnknownModel,
)
from shoal.domain.ids import peer_of
from shoal.domain.job import Job
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.options import OPTIONS, unknown_options
from shoal.domain.work import (
    CALL_QUEUE,
    TASK_QUEUE,
    Chat,
    Completion,
    Feature,
    JobKind,
    Work,
)
from shoal.pool.context_limits import length_of
from shoal.pool.eligibility import hosted_for, no_worker_reason
from shoal.pool.functions import call_rejection, task_rejection
from shoal.pool.gangs.rules import gang_rejection
from shoal.pool.models.aliases import unknown_alias
from shoal.pool.open_job import CHARACTERS_PER_TOKEN_MAX, OpenJob, has_question, size_of
from shoal.pool.roster import SPECIAL_QUEUES, remember, suggest_names
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

WORKERS_EXAMINED_MAX = 256  # workers examined
MODELS_EXAMINED_MAX = 256  # to suggest some of them
WORKERS_OF_MODEL_MAX = 4
SIZE_MAX = 256 << 20  # characters of all open jobs, which take a few bytes each
RESERVE_SHARE = 8  # an eighth of both is reserved for owners with few jobs
RETRY_MAX = 60  # seconds: a longer estimate would be unreliable
RETRY_UNKNOWN = 5.0  # seconds of a job's duration before the first measurement

FEATURE_FIELDS = {
    **{each.needs: each.name for each in OPTIONS if each.needs is not None},
    Feature.IMAGES: "messages",
    Feature.AUDIO: "messages",
}
"""The field of a request that asks for each feature."""


def permanent_rejection(pool: PoolState, job: Job, now: float) -> ShoalError | None:
    """Return the error if no worker of the pool can ever run ``job``, or None.

    A job may wait for a model that was offered a short while ago; a job without a model
    may wait for any worker.
    """
    rejection = _machines_rejection(pool, job, now)
    if rejection is None or job.terms.hosted_after is None:
        return rejection
    return None if hosted_for(pool, OpenJob(job, 0.0, 0.0, 0.0)) else rejection


def _machines_rejection(pool: PoolState, job: Job, now: float) -> ShoalError | None:
    gang = job.terms.gang
    if gang is not None and (reason := gang_rejection(pool, job)) is not None:
        return InvalidRequest(reason, "gang")
    if job.model == CALL_QUEUE:
        return call_rejection(pool, job, now)
    if job.model == TASK_QUEUE:
        return task_rejection(pool, job, now)
    if job.model in SPECIAL_QUEUES:
        return None
    known = pool.roster.knows_model(job.model, now)
    if not (known or pool.sleepers.knows_model(job.model)):
        reason = unknown_alias(pool, job.terms.alias) if job.terms.alias else None
        return UnknownModel(reason or unknown_model(pool.roster.names, job.model))
    workers = pool.roster.with_model.get(job.model, {})
    if not workers:
        return _load_rejection(pool, job)
    if len(workers) > WORKERS_EXAMINED_MAX:
        return None
    peer, needs = job.terms.peer, job.work.needs
    accepted = pool.roster.findings.accepted
    asks = has_question(job.work)
    alike = (job.model, job.kind, needs, peer, job.terms.near, job.owner, asks)
    if _tokens_min(job) <= accepted.get(alike, -1):
        return None
    found = [each for each in workers.values() if not peer or peer_of(each.id) != peer]
    if not found:
        return UnknownModel(f"only the peer that requests {job.model} has it")
    if job.terms.near:
        found = [each for each in found if not each.offer.neighbour]
        if not found:
            return UnknownModel(
                f"only other pools have {job.model}, and the job came from one"
            )
    capable = [each.offer for each in found if job.kind in each.offer.kinds]
    if not capable:
        offered = {kind for each in found for kind in each.offer.kinds}
        offered &= INFERENCE_KINDS
        kinds = " and ".join(sorted(kind.value for kind in offered))
        return CannotDo(
            f"{job.model} supports {kinds} here, but not {job.kind.value}; "
            + _models_that_do(pool, job, frozenset()),
            "model",
        )
    if all(offer.only_for and job.owner not in offer.only_for for offer in capable):
        return Forbidden(f"the workers with {job.model} work for other keys only")
    for feature in sorted(needs, key=lambda each: each.value):
        if not any(feature in offer.features for offer in capable):
            field = _field_of(job, feature)
            remedy = " (see `shoal join --fields`)" if feature is Feature.FIELDS else ""
            return CannotDo(
                f"{field}: none of the workers with {job.model} can do this "
                f"({feature.value}){remedy}; {_models_that_do(pool, job, {feature})}",
                field,
            )
    if not any(needs <= offer.features for offer in capable):
        fields = sorted(_field_of(job, feature) for feature in needs)
        return CannotDo(
            f"no worker with {job.model} can do all of {', '.join(fields)} together; "
            + _models_that_do(pool, job, needs),
            fields[0],
        )
    if not asks and all(offer.needs_question for offer in capable):
        return CannotDo(
            f"messages: {job.model} needs a message other than the system's here",
            "messages",
        )
    if (too_long := _length_rejection(pool, job, found)) is None:
        # Without the loops, up to the longest context.
        contexts = [
            each.offer.context or math.inf
            for each in found
            if job.kind in each.offer.kinds
            and needs <= each.offer.features
            and (not each.offer.only_for or job.owner in each.offer.only_for)
            and (asks or not each.offer.needs_question)
            and each.contexts is None
        ]
        remember(accepted, alike, max(contexts, default=-1))
    return too_long


def _load_rejection(pool: PoolState, job: Job) -> ShoalError | None:
    """Return the error if no machine can load the model for ``job``; None if not."""
    found = pool.roster.loadable.get(job.model)
    if not found:
        return None  # a worker had it a short while ago
    owners = [pool.workers[each].offer.only_for for each in found]
    if all(each and job.owner not in each for each in owners):
        return Forbidden(f"the machines with {job.model} work for other keys only")
    kinds = frozenset[JobKind]().union(*(each.kinds for each in found.values()))
    if job.kind not in kinds:
        does = " and ".join(sorted(kind.value for kind in kinds))
        return CannotDo(
            f"{job.model} supports {does} here, but not {job.kind.value}; "
            + _models_that_do(pool, job, frozenset()),
            "model",
        )
    features = frozenset[Feature]().union(*(each.features for each in found.values()))
    if missing := sorted(job.work.needs - features, key=lambda each: each.value):
        field = _field_of(job, missing[0])
        return CannotDo(
            f"{field}: {job.model} can be loaded here, but cannot do this "
            f"({missing[0].value}); {_models_that_do(pool, job, {missing[0]})}",
            field,
        )
    return None


def _tokens_min(job: Job) -> int:
    """Return the fewest tokens that the prompt of a job can have."""
    return len(job.work.text) // CHARACTERS_PER_TOKEN_MAX


def _field_of(job: Job, feature: Feature) -> str:
    """Return the field of a request that asks for a feature."""
    if feature is Feature.FIELDS and isinstance(job.work, Chat | Completion):
        return unknown_options(job.work.options)[0]
    return FEATURE_FIELDS.get(feature, "model")


def _length_rejection(
    pool: PoolState, job: Job, found: Sequence[Worker]
) -> ContextExceeded | None:
    """Return the error if ``job`` is too long for all workers that can do it."""
    key, model, needs = (job.model, job.kind), job.model, job.work.needs
    workers = [
        each
        for each in found
        if job.kind in each.offer.kinds
        and needs <= each.offer.features
        and (not each.offer.only_for or job.owner in each.offer.only_for)
    ]
    if not workers:
        return None
    tokens = _tokens_min(job)
    contexts = [each.context_of(key) for each in workers]
    if all(0 < context < tokens for context in contexts):
        return ContextExceeded(
            f"the request has more than {tokens} tokens, {model} reads {max(contexts)} "
            "here",
            "messages",
        )
    if model not in pool.roster.refused_lengths:
        return None
    length = length_of(job.work)
    for worker, context in zip(workers, contexts, strict=True):
        known = worker.contexts is not None and worker.contexts.exclude(key, length)
        if not (known or 0 < context < tokens):
            return None
    most = max(contexts)
    longest = f"; the longest context here: {most} tokens" if most else ""
    return ContextExceeded(
        f"the request is too long: all workers with {model} refused one that is no "
        f"longer{longest}",
        "messages",
    )


def without_tools(pool: PoolState, work: Work, owner: str) -> Work:
    """Return a chat without its tools if no worker can call them for ``owner``.

    Other work is returned as it is, and a chat whose model must call one.
    """
    if not isinstance(work, Chat) or Feature.TOOLS not in work.needs:
        return work
    if work.options.get("tool_choice", "auto") not in ("auto", "none"):
        return work
    workers = pool.roster.with_model.get(work.model, {})
    if not workers or len(workers) > WORKERS_EXAMINED_MAX:
        return work
    for worker in workers.values():
        offer = worker.offer
        mine = not offer.only_for or owner in offer.only_for
        if mine and work.kind in offer.kinds and Feature.TOOLS in offer.features:
            return work
    return work.without_tools()


def queue_rejection(pool: PoolState, job: Job, queue_max: int) -> ShoalError | None:
    """Return the error if ``job`` should not join the queue, or None.

    ``queue_max`` is how many jobs may wait in total.  Without a worker for the model,
    the wait cannot be estimated: the job is queued, and may expire there.
    """
    if pool.queued >= queue_max:
        waiting = f"{_jobs(pool.queued, 'waiting')} already"
        return QueueFull(waiting, retry_after(pool, job))
    mine = pool.queued_by_owner.get(job.owner, 0)
    if mine >= _owner_share(queue_max):
        return QueueFull(
            f"{_jobs(mine, 'waiting', ' of this key')} already; the rest of the queue "
            "is kept for other keys",
            retry_after(pool, job),
        )
    if (full := _memory_rejection(pool, job)) is not None:
        return QueueFull(full, retry_after(pool, job))
    if job.terms.gang is not None:
        return None  # it does not wait behind other jobs
    queue = pool.queues.get(job.model)
    seconds = pool.speeds.job_seconds.get(job.model)
    slots = pool.roster.slots[job.model]
    if not queue or seconds is None or slots <= 0:
        return None
    if pool.queued * seconds <= job.limits.queue * slots:
        return None  # soon enough even behind all others
    ahead = queue.ahead_of(job.owner, job.priority)
    expected = ahead * seconds / slots
    opened = OpenJob(job, 0.0, 0.0, 0.0)
    if expected <= job.limits.queue or hosted_for(pool, opened):
        return None
    why = no_worker_reason(pool, opened)
    return QueueFull(
        f"{why}; {_jobs(ahead, 'to be done')} first, which takes about {expected:.0f} "
        f"s: more than the {job.limits.queue:g} s that this job may wait",
        min(RETRY_MAX, math.ceil(expected - job.limits.queue)),
    )


def queue_room(pool: PoolState, owner: str, queue_max: int) -> int:
    """Return how many more jobs of an owner the queue takes; 0 or less: none."""
    mine = _owner_share(queue_max) - pool.queued_by_owner.get(owner, 0)
    return min(queue_max - pool.queued, mine)


def _owner_share(queue_max: int) -> int:
    """Return how many jobs of one owner may wait."""
    return queue_max - queue_max // RESERVE_SHARE


def _jobs(count: int, doing: str, whose: str = "") -> str:
    """Return a phrase with the number of jobs that are ``doing`` something."""
    jobs, are = ("job", "is") if count == 1 else ("jobs", "are")
    return f"{count} {jobs}{whose} {are} {doing}"


def _memory_rejection(pool: PoolState, job: Job) -> str | None:
    """Describe how the job's content exceeds the memory limit; None if not."""
    size, mine, in_all = (
        size_of(job),
        pool.sizes_by_owner.get(job.owner, 0),
        pool.size,
    )
    if in_all + size > SIZE_MAX:
        return f"the open jobs have {in_all} characters, and this one {size} more"
    if mine + size > SIZE_MAX - SIZE_MAX // RESERVE_SHARE:
        return (
            f"the open jobs of this key have {mine} characters, and this one {size} "
            "more; the rest of the space is kept for other keys"
        )
    return None


def unknown_model(models: Collection[str], model: str) -> str:
    """Return an error text for an unknown model, with suggestions."""
    suggestion = suggest_names(model, models, "GET /v1/models lists all")
    none = "the pool has no model yet; `shoal join` offers those of a machine"
    return f"no worker has the model {model}: {suggestion or none}"


def _models_that_do(pool: PoolState, job: Job, features: Set[Feature]) -> str:
    """Name up to three models that do jobs of this kind and owner, with features."""
    known = islice(pool.roster.with_model.items(), MODELS_EXAMINED_MAX)
    found = (
        model
        for model, workers in known
        if model not in SPECIAL_QUEUES
        and any(
            job.kind in each.offer.kinds
            and features <= each.offer.features
            and (not each.offer.only_for or job.owner in each.offer.only_for)
            for each in islice(workers.values(), WORKERS_OF_MODEL_MAX)
        )
    )
    names = [*islice(found, 3)]
    does = "models that do" if len(names) > 1 else "a model that does"
    return f"{does}: {', '.join(names)}" if names else f"no worker has {does}"


def retry_after(pool: PoolState, job: Job) -> int:
    """Estimate the seconds until a worker is free for ``job``, if it came now."""
    queue = pool.queues.get(job.model)
    ahead = queue.ahead_of(job.owner, job.priority) if queue else 0
    seconds = pool.speeds.job_seconds.get(job.model, RETRY_UNKNOWN)
    expected = (ahead + 1) * seconds / max(1, pool.roster.slots[job.model])
    return max(1, min(RETRY_MAX, math.ceil(expected)))
