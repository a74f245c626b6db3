"""Taking up, after a start, what the last coordinator has left in the store."""

from shoal.domain.facts import JobRequeued
from shoal.pool.lifecycle import JobState
from shoal.pool.state import MARK_MEMORY, Pool
from shoal.runtime.clock import Clock
from shoal.store.port import Store, StoredJob

MODELS_SINCE = 86_400.0  # seconds: models of the last day may come back after a restart
RESTART_GRACE = 120.0  # seconds for workers to come back after a restart


async def restore(pool: Pool, store: Store, clock: Clock) -> list[StoredJob]:
    """Fill ``pool`` with what the store knows; return the jobs that are open.

    Raises StoreError.
    """
    stored = await store.open_jobs()
    given_out = [
        JobRequeued(each.job.id, each.lease, "the coordinator restarted")
        for each in stored
        if each.state is not JobState.QUEUED
    ]
    now, at = clock.now(), clock.wall()
    await store.append(given_out, at)
    for model in await store.models(at - MODELS_SINCE):
        pool.roster.expect(model, now)
    for trusted in await store.trusted():
        pool.apply(trusted, now)
    for marked in await store.marked(at - MARK_MEMORY):
        pool.apply(marked.fact, now - (at - marked.at))
    for each in stored:
        pool.reopen(each.job, each.lease, now + RESTART_GRACE)
    return stored
