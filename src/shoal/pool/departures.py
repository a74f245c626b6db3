"""What operators' orders and approvals mean for workers, their jobs and connections."""

from collections import defaultdict
from collections.abc import Collection

from shoal.domain import facts
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.domain.worker import Suspension
from shoal.pool.inputs import WorkerApproval, WorkerSuspension
from shoal.pool.state import PoolState


def suspension_facts(pool: PoolState, request: WorkerSuspension) -> list[facts.Fact]:
    """Return the facts of an operator's order.

    A removal hands over jobs at once.  It ends approvals, too: otherwise the machine
    could come back under another name.
    """
    name, how = request.name, request.how
    withdrawn: list[facts.Fact] = []
    if how is Suspension.REMOVED:
        keys = _proven_keys(pool, name) if name == peer_of(WorkerId(name)) else ()
        withdrawn += pool.approvals.ended_by(name, request.by, keys)
    known = pool.suspensions.get(name)
    if known is not None and known.how is how and request.within is None:
        return withdrawn
    suspended = facts.WorkerSuspended(name, how, request.by, request.within)
    if how is not Suspension.REMOVED:
        return [suspended]
    workers = pool.workers_named(name)
    return [*withdrawn, suspended, *_hand_over(pool, workers, "removed")]


def approval_facts(pool: PoolState, request: WorkerApproval) -> list[facts.Fact]:
    """Return the facts of an operator's approval; none if it is in force."""
    keys = _proven_keys(pool, request.name)
    if not keys and request.peer_key is not None:
        keys = {request.peer_key}
    return [*pool.approvals.missing(request.name, request.by, keys)]


def overdue_drains(pool: PoolState, now: float) -> list[facts.Fact]:
    """Return the facts of drains that have reached their limits: none has one then."""
    if not (expired := pool.suspensions.expired(now)):
        return []
    limitless = [
        facts.WorkerSuspended(order.name, order.how, order.by) for order in expired
    ]
    # Together: two orders may be about one worker, or about both workers of a job.
    workers = {worker_id for order in expired for worker_id in order.workers}
    return [*limitless, *_hand_over(pool, workers, "drained")]


def departures(pool: PoolState) -> list[facts.WorkerDismissed]:
    """Return the dismissals of removed workers."""
    if not pool.leaving:
        return []
    return [
        facts.WorkerDismissed(worker_id, reason)
        for worker_id, reason in pool.leaving.items()
    ]


def _proven_keys(pool: PoolState, name: str) -> set[str]:
    workers = (pool.workers[each] for each in pool.workers_named(name))
    return {worker.offer.proven_key for worker in workers}


def _hand_over(
    pool: PoolState, workers: Collection[WorkerId], done: str
) -> list[facts.Fact]:
    """Requeue the jobs of workers, which cancel them where the wire can say so.

    It does not count as a lost worker: a job is not to fail for an operator's orders.
    """
    leases: defaultdict[JobId, list[LeaseNumber]] = defaultdict(list)
    for worker_id in workers:
        for job, lease in pool.leases_of(worker_id):
            leases[job.job.id].append(lease)
    found: list[facts.Fact] = []
    reason = f"handed over: the worker was {done} by an operator"
    for job_id, held in leases.items():
        opened = pool.jobs[job_id]
        last = None if len(held) < len(list(opened.holders)) else held.pop()
        found += [facts.JobUnhedged(job_id, lease, reason, cut=True) for lease in held]
        if last is not None:
            found.append(facts.JobRequeued(job_id, last, reason, handed_over=True))
    return found
