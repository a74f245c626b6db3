"""The pool: workers, open jobs and the queue, changed by facts and nothing else."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.work import Job
from shoal.domain.worker import Offer
from shoal.pool.lifecycle import ENDED, JobState, after

Key = TypeVar("Key", str, float)

NO_LEASE = LeaseNumber(0)
LOAD_SLOTS_MAX = 256  # more slots than this say nothing about a worker's speed
REFUSAL_PAUSE = 2.0  # seconds before a worker that refused a job is asked again
MODEL_MEMORY = 600.0  # seconds for which a model without workers is still expected back


@dataclass(slots=True)
class Worker:
    """A worker that is there."""

    id: WorkerId
    offer: Offer
    cancels: bool
    leases: dict[JobId, LeaseNumber] = field(default_factory=dict)
    draining: str = ""  # why it takes nothing new
    indexed: float | None = None  # the load it stands under in ``Pool.available``

    @property
    def free_slots(self) -> int:
        return self.offer.slots - len(self.leases)

    def load(self, promised: int = 0) -> float:
        """Return the share of its slots in use, with ``promised`` more jobs."""
        slots = min(self.offer.slots, LOAD_SLOTS_MAX)
        return (len(self.leases) + promised) / slots


@dataclass(slots=True)
class OpenJob:
    """A job that has not ended."""

    job: Job
    submitted_at: float
    since: float  # when it came into its present state
    queued_at: float  # when it began to wait; a refusal does not begin it anew
    state: JobState = JobState.QUEUED
    worker_id: WorkerId | None = None
    lease: LeaseNumber = NO_LEASE  # the last one given
    started: bool = False  # whether text has ever reached the client
    lost: int = 0  # workers that went away with it
    refused_by: dict[WorkerId, str] = field(default_factory=dict)


@dataclass(slots=True)
class Queue:
    """Jobs that wait for workers with one model, the first to be served first.

    Those that had a worker before have waited their turn once and go first.
    """

    again: dict[JobId, OpenJob] = field(default_factory=dict)
    fresh: dict[JobId, OpenJob] = field(default_factory=dict)

    def __iter__(self) -> Iterator[OpenJob]:
        return chain(self.again.values(), self.fresh.values())

    def __bool__(self) -> bool:
        return bool(self.again or self.fresh)


@dataclass(slots=True)
class Pool:
    """Everything the coordinator decides by.  One writer, which calls ``apply``."""

    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    jobs: dict[JobId, OpenJob] = field(default_factory=dict)
    queues: dict[str, Queue] = field(default_factory=dict)
    """The jobs that wait, by model."""

    waiting: int = 0  # jobs in all queues
    refusals: deque[tuple[float, JobId, WorkerId]] = field(default_factory=deque)
    """Who refused what, with the time until which it is not asked again."""

    with_model: dict[str, dict[WorkerId, Worker]] = field(default_factory=dict)
    available: dict[str, dict[float, dict[WorkerId, Worker]]] = field(
        default_factory=dict
    )
    """The workers with a free slot, by model and load.

    Among equals the one that has been so the longest comes first, so that idle workers
    take turns.
    """

    model_last_seen: dict[str, float] = field(default_factory=dict)

    def knows(self, model: str, now: float) -> bool:
        """Say whether some worker has the model, or had it a short while ago."""
        if model in self.with_model:
            return True
        last = self.model_last_seen.get(model)
        return last is not None and now - last < MODEL_MEMORY

    def expect(self, model: str, now: float) -> None:
        """Take a model for known, though no worker with it is there yet."""
        self.model_last_seen.setdefault(model, now)

    def reopen(self, job: Job, lease: LeaseNumber, now: float) -> None:
        """Put a job from the store back into the queue.

        Nobody holds it, and none of its earlier leases is honoured any more.
        """
        opened = OpenJob(job, now, since=now, queued_at=now, lease=lease)
        self.jobs[job.id] = opened
        self._queue(opened)

    def forgive(self, now: float) -> float | None:
        """Let workers be asked again that refused a job a while ago.

        Returns when to call this next.
        """
        while self.refusals and self.refusals[0][0] <= now:
            _, job_id, worker_id = self.refusals.popleft()
            if job_id in self.jobs:
                self.jobs[job_id].refused_by.pop(worker_id, None)
        return self.refusals[0][0] if self.refusals else None

    def apply(self, fact: Fact, now: float) -> None:
        """Record that ``fact`` happened.

        Raises ImpossibleTransition if it cannot have.
        """
        match fact:
            case JobSubmitted(job):
                assert job.id not in self.jobs, f"{job.id} submitted twice"
                opened = OpenJob(job, now, since=now, queued_at=now)
                self.jobs[job.id] = opened
                self._queue(opened)
            case JobLeased() | JobStarted() | JobRequeued():
                self._advance(fact, now)
            case JobCompleted() | JobFailed() | JobCancelled() | JobExpired():
                self._end(fact, now)
            case CameLate(job_id=job_id, lease=lease, worker_id=worker_id):
                worker = self.workers.get(worker_id)
                if worker is not None and worker.leases.get(job_id) == lease:
                    self._release(worker, job_id)
            case WorkerJoined(worker_id, offer, cancels):
                assert worker_id not in self.workers, f"{worker_id} joined twice"
                worker = Worker(worker_id, offer, cancels)
                self.workers[worker_id] = worker
                for model in offer.models:
                    self.with_model.setdefault(model, {})[worker_id] = worker
                self._index(worker)
            case WorkerDraining(worker_id, reason):
                self.workers[worker_id].draining = reason or "draining"
                self._index(self.workers[worker_id])
            case WorkerLost(worker_id):
                self._forget(self.workers.pop(worker_id), now)

    def held_by(self, worker_id: WorkerId) -> Iterator[OpenJob]:
        """Yield the open jobs that the worker has a lease on."""
        for job_id in self.workers[worker_id].leases:
            job = self.jobs.get(job_id)
            if job is not None and job.worker_id == worker_id:
                yield job

    def _advance(self, fact: JobLeased | JobStarted | JobRequeued, now: float) -> None:
        job = self.jobs[fact.job_id]
        job.state = after(job.state, fact)
        job.since = now
        match fact:
            case JobLeased(worker_id=worker_id, lease=lease):
                worker = self.workers[worker_id]
                assert worker.free_slots > 0, f"{worker_id} has no free slot"
                self._unqueue(job)
                worker.leases[job.job.id] = lease
                job.worker_id = worker_id
                job.lease = lease
                self._index(worker)
            case JobStarted():
                job.started = True
            case JobRequeued(reason=reason, refused_by=refused_by):
                if refused_by is None:
                    job.lost += 1
                    job.queued_at = now
                else:
                    job.refused_by[refused_by] = reason
                    until = now + REFUSAL_PAUSE
                    self.refusals.append((until, job.job.id, refused_by))
                self._take_back(job)
                self._queue(job)

    def _end(
        self, fact: JobCompleted | JobFailed | JobCancelled | JobExpired, now: float
    ) -> None:
        job = self.jobs.pop(fact.job_id)
        job.state = after(job.state, fact)
        assert job.state in ENDED
        if job.worker_id is None:
            self._unqueue(job)
            return
        worker = self.workers[job.worker_id]
        cut = isinstance(fact, (JobCancelled, JobExpired)) or (
            isinstance(fact, JobFailed) and fact.cut
        )
        if cut and not worker.cancels:
            # Nobody can tell it to stop, so its slot is honestly taken until it is
            # done or gone.
            return
        self._release(worker, fact.job_id)

    def _queue(self, job: OpenJob) -> None:
        queue = self.queues.setdefault(job.job.model, Queue())
        (queue.again if job.lease else queue.fresh)[job.job.id] = job
        self.waiting += 1

    def _unqueue(self, job: OpenJob) -> None:
        queue = self.queues[job.job.model]
        if queue.again.pop(job.job.id, None) is None:
            del queue.fresh[job.job.id]
        if not queue:
            del self.queues[job.job.model]
        self.waiting -= 1

    def _take_back(self, job: OpenJob) -> None:
        assert job.worker_id is not None
        worker = self.workers.get(job.worker_id)
        if worker is not None:
            self._release(worker, job.job.id)
        job.worker_id = None

    def _release(self, worker: Worker, job_id: JobId) -> None:
        del worker.leases[job_id]
        self._index(worker)

    def _index(self, worker: Worker) -> None:
        """Put the worker where ``plan`` looks for one with its load, or nowhere."""
        before = worker.indexed
        free = worker.free_slots > 0 and not worker.draining
        worker.indexed = worker.load() if free else None
        for model in worker.offer.models:
            loads = self.available.setdefault(model, {})
            if before is not None:
                _remove(loads, before, worker.id)
            if worker.indexed is not None:
                loads.setdefault(worker.indexed, {})[worker.id] = worker
            if not loads:
                del self.available[model]

    def _forget(self, worker: Worker, now: float) -> None:
        worker.draining = "lost"
        self._index(worker)
        for model in worker.offer.models:
            _remove(self.with_model, model, worker.id)
            if model not in self.with_model:
                # Put at the end again, so that the oldest stays in front.
                self.model_last_seen.pop(model, None)
                self.model_last_seen[model] = now
                self._forget_models(now)

    def _forget_models(self, now: float) -> None:
        # A worker chooses its model's name: without this, names would pile up.
        while self.model_last_seen:
            oldest, at = next(iter(self.model_last_seen.items()))
            if now - at <= MODEL_MEMORY:
                return
            del self.model_last_seen[oldest]


def _remove(
    index: dict[Key, dict[WorkerId, Worker]], key: Key, worker_id: WorkerId
) -> None:
    del index[key][worker_id]
    if not index[key]:
        del index[key]
