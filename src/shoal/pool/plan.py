"""Which waiting job goes to which worker: a function of the pool."""

from shoal.domain.facts import JobLeased
from shoal.domain.ids import LeaseNumber
from shoal.pool.free import Free, Promised
from shoal.pool.match import passed_over
from shoal.pool.open_job import OpenJob
from shoal.pool.state import Pool
from shoal.pool.worker import Worker


def plan(pool: Pool) -> list[JobLeased]:
    """Match waiting jobs, each owner's in turn, to the worker that costs least.

    Changes nothing: the caller applies the leases.
    """
    leases: list[JobLeased] = []
    promised = Promised()
    for model, queue in pool.queues.items():
        free = Free(pool, model, promised)
        for job, served in queue.in_turn(pool.running) if free else ():
            if (choice := free.take(job)) is not None:
                served()
                leases.append(_lease(pool, job, *choice))
            if not free:
                break
    return leases


def _lease(pool: Pool, job: OpenJob, worker: Worker, reason: str) -> JobLeased:
    return JobLeased(
        job.job.id,
        worker.id,
        LeaseNumber(job.given + 1),
        reason,
        passed_over(pool, job, worker.id),
    )
