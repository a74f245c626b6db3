"""Which waiting job goes to which worker: a function of the pool."""

from collections import defaultdict
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

from shoal.domain.facts import JobLeased
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.pool.match import load, passed_over, rank, why_not
from shoal.pool.state import OpenJob, Pool, Worker

Taken: TypeAlias = defaultdict[WorkerId, int]  # slots promised in the plan so far
Candidates: TypeAlias = list[tuple[tuple[bool, float, int, WorkerId], Worker]]


def plan(pool: Pool) -> list[JobLeased]:
    """Match waiting jobs, oldest first, to the best worker that can take each.

    Changes nothing: the caller applies the leases.  Costs one look at each worker
    with a free slot and the right model, and little for each job that gets one.
    """
    leases: list[JobLeased] = []
    taken: Taken = defaultdict(int)
    for model, queue in pool.queues.items():
        able = list(pool.available.get(model, {}).values())
        free = sum(worker.free_slots - taken[worker.id] for worker in able)
        heaps: dict[object, Candidates] = {}  # by what the jobs ask for
        for job in queue:
            if free <= 0:
                break
            asks = (job.started, job.job.work.needs, frozenset(job.refused_by))
            if asks not in heaps:
                heaps[asks] = _candidates(job, able, taken)
            if (best := _best(job, heaps[asks], taken)) is not None:
                leases.append(_lease(pool, job, best, taken[best.id]))
                taken[best.id] += 1
                free -= 1
    return leases


def _candidates(job: OpenJob, able: list[Worker], taken: Taken) -> Candidates:
    found = [
        (rank(job, worker, taken[worker.id]), worker)
        for worker in able
        if why_not(job, worker) is None
    ]
    heapify(found)
    return found


def _best(job: OpenJob, candidates: Candidates, taken: Taken) -> Worker | None:
    # Promises only ever worsen a rank, so one that is out of date is put right when
    # it comes to the top.
    while candidates:
        known, worker = candidates[0]
        promised = taken[worker.id]
        current = rank(job, worker, promised)
        if worker.free_slots <= promised:
            heappop(candidates)
        elif current != known:
            heapreplace(candidates, (current, worker))
        else:
            return worker
    return None


def _lease(pool: Pool, job: OpenJob, best: Worker, taken: int) -> JobLeased:
    return JobLeased(
        job.job.id,
        best.id,
        LeaseNumber(job.lease + 1),
        f"least busy: {load(best, taken):.0%} of its slots in use",
        passed_over(pool, job, best.id),
    )
