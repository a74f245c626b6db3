"""Restores the pool from the store after a start."""

from shoal.domain.facts import JobLeased, JobRequeued
from shoal.domain.ids import WorkerId
from shoal.pool.lifecycle import JobState
from shoal.pool.state import PENALTY_SECONDS, PoolState
from shoal.store.port import Store, StoredJob
from shoal.transports.clock import Clock

OFFERED_SINCE = 86_400.0  # seconds: what was offered then may come back after a restart
RESTART_GRACE = 120.0  # seconds for workers to come back after a restart
RESTARTED = "the coordinator restarted"  # why a job was requeued


async def restore_pool(pool: PoolState, store: Store, clock: Clock) -> list[StoredJob]:
    """Restore ``pool`` from the store; return the open jobs.

    Raises StoreError.
    """
    stored = await store.open_jobs()
    requeued = [
        JobRequeued(each.job.id, each.lease, RESTARTED)
        for each in stored
        if each.state is not JobState.QUEUED
    ]
    now, at = clock.now(), clock.wall()
    await store.append(requeued, at)
    models = await store.models_since(at - OFFERED_SINCE)
    functions = await store.functions_since(at - OFFERED_SINCE)
    pool.roster.expect(models, functions, now)
    for trusted in await store.trusted_workers():
        pool.apply(trusted, now)
    for suspended, _ in await store.suspensions():
        pool.apply(suspended, now)
    for approved in await store.approvals():
        pool.apply(approved, now)
    for marked in await store.penalties_since(at - PENALTY_SECONDS):
        pool.apply(marked.fact, now - (at - marked.at))
    for each in stored:
        submitted_at = now - max(0.0, at - each.submitted_at)
        is_new = each.state is JobState.QUEUED and not each.lease
        pool.restore(
            each.job,
            each.lease,
            submitted_at if is_new else now,
            await _last_worker(store, each),
            submitted_at=submitted_at,
            grace_until=now + RESTART_GRACE,
        )
    begun = [each.submitted_at for each in stored if each.job.terms.gang is not None]
    if begun:
        for member, state in await store.ended_members(min(begun)):
            pool.gangs.restore_end(member, state)
    return stored


async def _last_worker(store: Store, stored: StoredJob) -> WorkerId | None:
    """Return the worker that may still run a member of a gang.

    Raises StoreError.
    """
    if stored.job.terms.gang is None:
        return None
    history = [each.fact for each in await store.history(stored.job.id)]
    leases = [fact.worker_id for fact in history if isinstance(fact, JobLeased)]
    return leases[-1] if leases else None
