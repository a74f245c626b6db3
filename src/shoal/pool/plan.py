"""Which waiting job goes to which worker: a function of the pool."""

from collections.abc import Iterator, Sequence

from shoal.domain.facts import JobLeased, PassedOver
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Priority
from shoal.pool.eligibility import passed_over
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.gangs.places import GangPlaces
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker


def plan(pool: PoolState) -> list[JobLeased]:
    """Match waiting jobs, each owner's in turn, to the worker that costs least.

    Gangs come before other jobs of their priority: these would take the machines for
    which a gang waits.

    Changes nothing: the caller applies the leases.  Examines only the queues with a
    free worker, and of each only the owners that are served: the time depends on the
    leases, and hardly on the jobs and owners that wait.
    """
    leases: dict[JobId, JobLeased] = {}
    if not pool.roster.matched:
        return []
    promised = PromisedSlots()
    if pool.gangs.waiting:
        for lease in _gang_leases(pool, promised, leases):
            leases[lease.job_id] = lease
    _serve(pool, promised, leases)
    return list(leases.values())


def _serve(
    pool: PoolState,
    promised: PromisedSlots,
    leases: dict[JobId, JobLeased],
    above: Priority | None = None,
) -> None:
    """Add leases of jobs that are in no gang; ``above`` is as in ``in_order``."""
    for model in sorted(pool.roster.matched, key=lambda each: pool.queues[each].number):
        free = FreeWorkers(pool, model, promised)
        for turn in pool.queues[model].in_order(above) if free else ():
            if turn.job.job.id in leases:
                turn.served = True
            elif turn.job.gang is not None:
                turn.only_for = frozenset()
            elif (choice := free.assign(turn.job)) is not None:
                turn.served = True
                worker, reason = choice
                others = passed_over(pool, turn.job, (worker.id,))
                leases[turn.job.job.id] = _lease(turn.job, worker, reason, others)
            else:
                turn.only_for = free.owners_served(turn.job)
            if not free:
                break


def _gang_leases(
    pool: PoolState, promised: PromisedSlots, leases: dict[JobId, JobLeased]
) -> Iterator[JobLeased]:
    """Yield leases of gangs' members, after the jobs that go before them."""
    places = GangPlaces(pool, promised)
    served: Priority | None = None
    for gang in pool.gangs.in_order():
        if not gang.formed and gang.priority is not served:
            served = gang.priority
            _serve(pool, promised, leases, above=served)
        chosen = places.assign(gang)
        if not chosen:
            continue
        others = passed_over(pool, chosen[0].job, [each.worker.id for each in chosen])
        for job, worker, reason in chosen:
            yield _lease(job, worker, reason, others)


def _lease(
    job: OpenJob, worker: Worker, reason: str, others: Sequence[PassedOver]
) -> JobLeased:
    lease = LeaseNumber(job.last_lease + 1)
    kept = worker.keeps_jobs and job.can_resume
    return JobLeased(job.job.id, worker.id, lease, reason, tuple(others), kept)
