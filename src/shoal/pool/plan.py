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

    Changes nothing: the caller applies the leases.  Examines only the queues with a
    free worker, and of each only the owners that are served: the time depends on the
    leases, and hardly on the jobs and owners that wait.
    """
    leases: list[JobLeased] = []
    if not pool.roster.matched:
        return leases
    promised = PromisedSlots()
    for model in sorted(pool.roster.matched, key=lambda each: pool.queues[each].number):
        free = FreeWorkers(pool, model, promised)
        for turn in pool.queues[model].in_order() if free else ():
            if (choice := free.assign(turn.job)) is not None:
                turn.served = True
                leases.append(_lease(pool, turn.job, *choice))
            else:
                turn.only_for = free.owners_served(turn.job)
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
