"""Restores the pool from the store after a start."""

from shoal.coordinator.call_grants import CallGrants, LeasedCall
from shoal.domain.facts import JobHedged, JobLeased, JobRequeued, JobStarted
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.pool.lifecycle import JobState
from shoal.pool.open_job import NO_LEASE
from shoal.pool.state import PENALTY_SECONDS, PoolState
from shoal.store.port import CommitId, RecordedFact, Store, StoredJob
from shoal.transports.clock import Clock

OFFERED_SINCE = 86_400.0  # seconds: what was offered then may come back after a restart
RETURN_GRACE = 5.0  # seconds that jobs wait for the workers which still run them
CLAIM_GRACE = 2.0  # seconds for workers to name calls that they had got just before
RESTART_GRACE = 120.0  # seconds for workers to come back after a restart
RESTARTED = "the coordinator restarted"  # why a job was requeued


async def restore_pool(
    pool: PoolState,
    store: Store,
    clock: Clock,
    commit: CommitId,
    grants: CallGrants,
    *,
    clients_return: bool = False,
) -> list[StoredJob]:
    """Restore ``pool`` from the store; return the open jobs.

    What follows from the restart is recorded in ``commit``.  If ``clients_return``,
    they may have text of each job that a worker had.

    Raises StoreError.
    """
    stored = await store.open_jobs()
    requeued = [
        JobRequeued(each.job.id, each.lease, RESTARTED)
        for each in stored
        if each.state is not JobState.QUEUED
    ]
    now, at = clock.now(), clock.wall()
    await store.append(requeued, at, commit=commit)
    models = await store.models_since(at - OFFERED_SINCE)
    functions = await store.functions_since(at - OFFERED_SINCE)
    pool.roster.expect(models, functions, now)
    for trusted in await store.trusted_workers():
        pool.apply(trusted, now)
    for suspended, _ in await store.suspensions():
        pool.apply(suspended, now)
    for approved in await store.approvals():
        pool.apply(approved, now)
    for alias in await store.aliases():
        pool.apply(alias, now)
    for deployment in await store.deployments():
        pool.apply(deployment, now)
        pool.roster.expect([deployment.name], (), now)
    for marked in await store.penalties_since(at - PENALTY_SECONDS):
        pool.apply(marked.fact, now - (at - marked.at))
    begun = [each.job.id for each in stored if each.lease]
    runs = dict(zip(begun, await store.runs(begun), strict=True))
    for each in stored:
        history = runs[each.job.id].facts if each.lease else []
        leases = [e.fact for e in history if isinstance(e.fact, JobLeased)]
        for leased in leases:
            if leased.carrier is not None:
                call = LeasedCall(leased.job_id, leased.lease, 0)
                grants.move(LeasedCall(*leased.carrier), call)
        may_have = not leases or any(leased.kept for leased in leases)
        pool.restore(
            each.job,
            each.lease,
            now - max(0.0, at - _queued_at(each, history)),
            *_last_worker(each, history),
            submitted_at=now - max(0.0, at - each.submitted_at),
            grace_until=now + RESTART_GRACE,
            return_until=now + RETURN_GRACE,
            claim_until=now + CLAIM_GRACE if may_have else 0.0,
            started=clients_return and each.lease > 0,
        )
    gangs = [each.submitted_at for each in stored if each.job.terms.gang is not None]
    if gangs:
        for member, state in await store.ended_members(min(gangs)):
            pool.gangs.restore_end(member, state)
    return stored


def _queued_at(stored: StoredJob, history: list[RecordedFact]) -> float:
    """Return the Unix time at which a job began to wait; a refusal does not reset it.

    So a coordinator that restarts in a loop does not renew the limit of its queue.
    """
    queued_at, begun = stored.submitted_at, False
    for each in history:
        match each.fact:
            case JobLeased():
                begun = False
            case JobStarted():
                begun = True
            case JobRequeued(refused_by=refused_by) if begun or refused_by is None:
                queued_at = each.at
    return queued_at


def _last_worker(
    stored: StoredJob, history: list[RecordedFact]
) -> tuple[WorkerId | None, LeaseNumber]:
    """Return the worker that may still run a job, and the lease since which it does."""
    last: WorkerId | None = None
    since = NO_LEASE
    for each in history:
        match each.fact:
            case JobLeased(_, worker_id, lease, kept=kept, resumes=resumes):
                last = worker_id if kept or stored.job.terms.gang is not None else None
                since = since if resumes else lease
            case JobHedged():
                last = None  # the two are no longer told apart
            case JobRequeued(refused_by=refused_by, handed_over=handed_over):
                # One that was lost just before the restart may come back, too.
                gave_up = refused_by is not None or handed_over
                if gave_up and stored.job.terms.gang is None:
                    last = None
            case _:
                pass
    return last, since
