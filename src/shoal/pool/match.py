"""Why a worker cannot take a job, and which of those that can is best."""

from collections import defaultdict
from itertools import islice

from shoal.domain.facts import PassedOver
from shoal.domain.ids import WorkerId
from shoal.domain.work import Feature
from shoal.pool.state import OpenJob, Pool, Worker

NAMED_MAX = 8  # workers named in an explanation; the others are counted
LOOKED_AT_MAX = 64  # workers asked one by one why they cannot take a job
LOAD_SLOTS_MAX = 256  # more slots than this say nothing about a worker's speed


def why_not(job: OpenJob, worker: Worker) -> str | None:
    """Say why ``worker`` cannot take ``job`` now, or None if it can.

    The wording reaches users: a 503 and ``explain`` show it.
    """
    offer = worker.offer
    if worker.draining:
        return "draining"
    if job.job.kind not in offer.kinds:
        return f"does not run {job.job.kind.value} jobs"
    if job.job.model not in offer.models:
        return f"does not have {job.job.model}"
    if missing := job.job.work.needs - offer.features:
        names = ", ".join(sorted(feature.value for feature in missing))
        return f"cannot do: {names}"
    if worker.id in job.refused_by:
        return f"refused it: {job.refused_by[worker.id]}"
    if offer.slots <= 0:
        return (
            f"offers no slots ({offer.remark})" if offer.remark else "offers no slots"
        )
    if worker.free_slots <= 0:
        return "all slots busy"
    return None


def load(worker: Worker, taken: int = 0) -> float:
    """Return the share of the worker's slots that are in use."""
    slots = min(worker.offer.slots, LOAD_SLOTS_MAX)
    return (len(worker.leases) + taken) / slots


def rank(
    job: OpenJob, worker: Worker, taken: int = 0
) -> tuple[bool, float, int, WorkerId]:
    """Return what to compare able workers by; the lowest is best.

    ``taken`` counts slots promised in the plan being made.  A job whose answer has
    begun goes first to one that can continue it; among equals the one that has had
    the fewest jobs takes its turn.
    """
    can_continue = Feature.CONTINUE in worker.offer.features
    starts_over = job.started and not can_continue
    return starts_over, load(worker, taken), worker.served + taken, worker.id


def passed_over(
    pool: Pool, job: OpenJob, chosen: WorkerId | None = None
) -> tuple[PassedOver, ...]:
    """Group the workers that did not get ``job`` by reason.

    In a large pool, only the first workers with the model are looked at one by one.
    """
    with_model = pool.with_model.get(job.job.model, {})
    reasons: dict[str, list[WorkerId]] = defaultdict(list)
    for worker in islice(with_model.values(), LOOKED_AT_MAX):
        if worker.id != chosen:
            reasons[why_not(job, worker) or "another was less busy"].append(worker.id)
    groups = [
        PassedOver(reason, len(ids), tuple(ids[:NAMED_MAX]))
        for reason, ids in reasons.items()
    ]
    if (unseen := len(with_model) - LOOKED_AT_MAX) > 0:
        groups.append(PassedOver("not looked at one by one", unseen))
    if others := len(pool.workers) - len(with_model):
        groups.append(PassedOver(f"does not have {job.job.model}", others))
    return tuple(groups)


def refusal(pool: Pool, job: OpenJob) -> str:
    """Say in one line why nobody can take ``job`` now."""
    if not pool.workers:
        return f"no worker for {job.job.model}: no worker is connected"
    groups = passed_over(pool, job)
    reasons = ", ".join(f"{group.reason} ({group.count})" for group in groups)
    return f"no worker for {job.job.model}: {reasons}"
