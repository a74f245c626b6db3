"""Which waiting job goes to which worker: a function of the pool."""

from collections import defaultdict
from typing import TypeAlias

from shoal.domain.facts import JobLeased
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.work import Feature
from shoal.pool.match import passed_over, why_not
from shoal.pool.state import OpenJob, Pool, Worker

Promised: TypeAlias = defaultdict[WorkerId, int]  # slots given away in the plan so far


def plan(pool: Pool) -> list[JobLeased]:
    """Match waiting jobs, oldest first, to the least loaded worker that can take each.

    Changes nothing: the caller applies the leases.
    """
    leases: list[JobLeased] = []
    promised: Promised = defaultdict(int)
    for model, queue in pool.queues.items():
        free = _Free(pool, model, promised)
        for job in queue:
            if not free:
                break
            if (worker := free.take(job)) is not None:
                leases.append(_lease(pool, job, worker, promised[worker.id] - 1))
    return leases


class _Free:
    """The workers with a free slot for one model, as the plan goes on.

    A worker moves to a higher load with each slot it is promised for, so the first
    that can take a job, from the lowest load on, is the best.
    """

    def __init__(self, pool: Pool, model: str, promised: Promised) -> None:
        self._promised = promised
        self._by_load: dict[float, list[Worker]] = {}
        busier: list[Worker] = []
        for load, workers in pool.available.get(model, {}).items():
            # A worker with several models may have been promised to a job of another.
            self._by_load[load] = [w for w in workers.values() if w.id not in promised]
            busier += [w for w in workers.values() if w.id in promised]
        for worker in busier:
            self._put(worker)

    def __bool__(self) -> bool:
        return any(self._by_load.values())

    def take(self, job: OpenJob) -> Worker | None:
        """Promise a slot of the best worker for ``job``.

        A job whose answer has begun goes first to a worker that can continue it.
        """
        worker = self._find(job, Feature.CONTINUE) if job.started else None
        worker = worker or self._find(job)
        if worker is not None:
            self._promised[worker.id] += 1
            self._put(worker)
        return worker

    def _find(self, job: OpenJob, wished: Feature | None = None) -> Worker | None:
        for load in sorted(self._by_load):
            workers = self._by_load[load]
            for index, worker in enumerate(workers):
                if wished is not None and wished not in worker.offer.features:
                    continue
                if why_not(job, worker) is None:
                    return workers.pop(index)
        return None

    def _put(self, worker: Worker) -> None:
        promised = self._promised[worker.id]
        if worker.free_slots > promised:
            self._by_load.setdefault(worker.load(promised), []).append(worker)


def _lease(pool: Pool, job: OpenJob, worker: Worker, promised: int) -> JobLeased:
    return JobLeased(
        job.job.id,
        worker.id,
        LeaseNumber(job.lease + 1),
        f"least busy: {worker.load(promised):.0%} of its slots in use",
        passed_over(pool, job, worker.id),
    )
