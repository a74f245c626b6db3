"""Which waiting job goes to which worker: a function of the pool."""

from shoal.domain.facts import JobLeased
from shoal.domain.ids import LeaseNumber
from shoal.pool.eligibility import passed_over
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker


def plan(pool: PoolState) -> list[JobLeased]:
    """Match waiting jobs, each owner's in turn, to the worker that costs least.

    Changes nothing: the caller applies the leases.
    """
    leases: list[JobLeased] = []
    promised = PromisedSlots()
    for model, queue in pool.queues.items():
        free = FreeWorkers(pool, model, promised)
        for job, served in queue.in_order(pool.running_by_owner) if free else ():
            if (choice := free.assign(job)) is not None:
                served()
                leases.append(_lease(pool, job, *choice))
            if not free:
                break
    return leases


def _lease(pool: PoolState, job: OpenJob, worker: Worker, reason: str) -> JobLeased:
    return JobLeased(
        job.job.id,
        worker.id,
        LeaseNumber(job.last_lease + 1),
        reason,
        passed_over(pool, job, worker.id),
    )
