"""Gives jobs to hosted providers that no machine of the pool takes in time."""

from collections.abc import Callable, Iterator
from itertools import islice

from shoal.domain.facts import JobLeased
from shoal.domain.ids import LeaseNumber
from shoal.domain.worker import TokenPrices
from shoal.pool.eligibility import (
    LAST_RESORT,
    WORKERS_EXAMINED_MAX,
    hosted_for,
    ineligibility,
    passed_over,
    suitable_for,
)
from shoal.pool.open_job import CHARACTERS_PER_TOKEN, OpenJob
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

JOBS_EXAMINED_MAX = 256  # that wait for one model, at a time
ANSWER_GUESS = 1024  # tokens of an answer without a limit


def last_resorts(
    pool: PoolState, now: float, can_pay: Callable[[OpenJob, Worker], bool]
) -> Iterator[JobLeased]:
    """Lease jobs that have waited as long as their keys say, to hosted providers.

    ``can_pay``: whether a job's payer can pay for it at a worker.  The caller applies
    each lease before it asks for the next.
    """
    unpaid: set[str] = set()  # owners: at most one job of each is looked at in vain
    for job in _waiting(pool):
        if due_at(pool, job, now) > now or job.job.owner in unpaid:
            continue
        free = [each for each in hosted_for(pool, job) if not ineligibility(job, each)]
        if not free:
            continue
        free = [each for each in free if can_pay(job, each)]
        if not free:
            unpaid.add(job.job.owner)
            continue
        worker = min(free, key=lambda each: (_estimate_at(job, each), each.busy_slots))
        yield JobLeased(
            *(job.job.id, worker.id, LeaseNumber(job.last_lease + 1)),
            f"no machine of the pool could take it for {now - job.queued_at:.0f} s: a "
            f"hosted provider does, for {worker.offer.last_resort}",
            tuple(
                group for group in passed_over(pool, job) if group.reason != LAST_RESORT
            ),
            worker.keeps_jobs and job.can_resume,
        )


def next_resort(pool: PoolState, now: float) -> float | None:
    """Return when another job will have waited long enough."""
    times = (due_at(pool, job, now) for job in _waiting(pool))
    return min((due for due in times if due > now), default=None)


def due_at(pool: PoolState, job: OpenJob, now: float) -> float:
    """Return when a waiting job may go to a hosted provider.

    At once if no machine of the pool has its model, or could load it; but after a
    restart these come back first.
    """
    after = job.job.terms.hosted_after
    assert after is not None, f"{job.job.id} is for the pool's machines only"
    due = job.queued_at + after
    machines = pool.roster.with_model.get(job.model, ())
    if suitable_for(pool, job).workers or len(machines) > WORKERS_EXAMINED_MAX:
        return due
    if job.model in pool.roster.loadable:
        return due
    return min(due, max(job.queued_at, job.grace_until))


def estimated_cost(job: OpenJob, prices: TokenPrices) -> int:
    """Estimate what a job costs at a hosted provider."""
    wanted = getattr(job.job.work, "max_tokens", None) or ANSWER_GUESS
    return prices.cost(job.characters // CHARACTERS_PER_TOKEN, wanted)


def _estimate_at(job: OpenJob, worker: Worker) -> int:
    prices = worker.offer.last_resort
    assert prices is not None, f"{worker.id} is a machine of the pool"
    return estimated_cost(job, prices)


def _waiting(pool: PoolState) -> Iterator[OpenJob]:
    """Yield the first waiting jobs of each model that a hosted provider has free.

    An answer that has begun goes on at a machine of the pool.
    """
    for model, jobs in [*pool.resorting.items()]:
        workers = pool.roster.hosted.get(model, {})
        if not any(each.free_slots > 0 for each in workers.values()):
            continue
        for job in [*islice(jobs.values(), JOBS_EXAMINED_MAX)]:
            if not job.started:
                yield job
