"""Gives silent jobs to a second worker as well, against tail latency.

Source: Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013: hedged requests.
"""

from collections.abc import Iterator
from itertools import islice

from shoal.domain.facts import JobHedged
from shoal.domain.ids import LeaseNumber
from shoal.domain.job_kinds import TEXT_KINDS
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.gangs.places import GangPlaces
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState

HEDGED_SHARE = 10  # running jobs for each hedged job; one may always be hedged
JOBS_EXAMINED_MAX = 32  # in one plan


def hedges(pool: PoolState, now: float, after: float) -> list[JobHedged]:
    """Lease jobs that have been silent for ``after`` seconds to an idle worker, too.

    If the plan was applied before, this takes only slots that no waiting job needs.
    Changes nothing: the caller applies the facts.
    """
    room = max(1, (len(pool.jobs) - pool.queued) // HEDGED_SHARE) - pool.hedged
    found: list[JobHedged] = []
    promised = PromisedSlots()
    places = GangPlaces(pool, promised)
    for gang in pool.gangs.in_order() if pool.gangs.waiting else ():
        places.assign(gang)  # reserves their machines
    free: dict[str, FreeWorkers] = {}
    for job in islice(_hedgeable(pool, now, after), JOBS_EXAMINED_MAX):
        if len(found) >= room:
            break
        model = job.model
        if model not in free:
            free[model] = FreeWorkers(pool, model, promised)
        if (choice := free[model].assign_idle(job)) is not None:
            worker, state = choice
            waited = f"attempt {job.lease} silent for {now - job.leased_at:.1f} s"
            lease = LeaseNumber(job.last_lease + 1)
            found.append(JobHedged(job.job.id, worker.id, lease, f"{waited}; {state}"))
    return found


def next_hedge(pool: PoolState, now: float, after: float) -> float | None:
    """Return when another job will have been silent for ``after`` seconds."""
    times = (job.leased_at + after for job in pool.without_output.values())
    return next((due for due in times if due > now), None)


def _hedgeable(pool: PoolState, now: float, after: float) -> Iterator[OpenJob]:
    for job in pool.without_output.values():
        if job.leased_at + after > now:
            return
        # Silence has no meaning on a wire that does not stream answers.
        if (
            job.kind in TEXT_KINDS
            and job.model in pool.roster.available
            and job.worker_id is not None
            and pool.workers[job.worker_id].offer.streams
        ):
            yield job
