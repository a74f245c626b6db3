"""Restores the pool from the store after a start."""

from shoal.domain.facts import JobRequeued
from shoal.pool.lifecycle import JobState
from shoal.pool.state import PENALTY_SECONDS, PoolState
from shoal.store.port import Store, StoredJob
from shoal.transports.clock import Clock

MODELS_SINCE = 86_400.0  # seconds: models of the last day may come back after a restart
RESTART_GRACE = 120.0  # seconds for workers to come back after a restart


async def restore_pool(pool: PoolState, store: Store, clock: Clock) -> list[StoredJob]:
    """Restore ``pool`` from the store; return the open jobs.

    Raises StoreError.
    """
    stored = await store.open_jobs()
    requeued = [
        JobRequeued(each.job.id, each.lease, "the coordinator restarted")
        for each in stored
        if each.state is not JobState.QUEUED
    ]
    now, at = clock.now(), clock.wall()
    await store.append(requeued, at)
    for model in await store.models_since(at - MODELS_SINCE):
        pool.roster.expect(model, now)
    for trusted in await store.trusted_workers():
        pool.apply(trusted, now)
    for suspended, _ in await store.suspensions():
        pool.apply(suspended, now)
    for marked in await store.penalties_since(at - PENALTY_SECONDS):
        pool.apply(marked.fact, now - (at - marked.at))
    for each in stored:
        pool.restore(each.job, each.lease, now + RESTART_GRACE)
    return stored
