"""Which workers there are for each model, and which of them are free."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.domain.ids import WorkerId
from shoal.domain.work import ANY_MODEL, CALL_QUEUE, TASK_QUEUE
from shoal.domain.worker import DeviceKind, WorkerLoad
from shoal.pool.worker import CostLevel, Worker

MODEL_MEMORY = 600.0  # seconds for which a model without workers is still expected back

SPECIAL_QUEUES = frozenset({ANY_MODEL, CALL_QUEUE, TASK_QUEUE})
"""What workers are looked for under that is no model."""

Key = TypeVar("Key", str, CostLevel)


@dataclass(slots=True)
class Roster:
    """The workers by what they have and how busy they are."""

    with_model: dict[str, dict[WorkerId, Worker]] = field(default_factory=dict)
    """All workers, by model, and by what stands for one (``Offer.queues``)."""

    slots: Counter[str] = field(default_factory=Counter)
    """Slots of all workers that take new jobs, by model."""

    devices: Counter[DeviceKind | None] = field(default_factory=Counter)
    """How many workers are what sort of machine."""

    available: dict[str, dict[CostLevel, dict[WorkerId, Worker]]] = field(
        default_factory=dict
    )
    """The workers with a free slot, by model and level.

    Among equals the one that has been so the longest comes first, so that idle workers
    take turns.
    """

    models_last_seen: dict[str, float] = field(default_factory=dict)
    """When the last worker with a model went, or when it was first expected."""

    functions_last_seen: dict[str, float] = field(default_factory=dict)
    """When a worker that does a task, or has a function, went last."""

    @property
    def models(self) -> set[str]:
        """The models that there are workers for."""
        return self.with_model.keys() - SPECIAL_QUEUES

    def knows_model(self, model: str, now: float) -> bool:
        """Say whether some worker has the model, or had it a short while ago."""
        if model in self.with_model:
            return True
        last = self.models_last_seen.get(model)
        return last is not None and now - last < MODEL_MEMORY

    def knows_function(self, task: str, now: float) -> bool:
        """Say whether a worker that had a function left a short while ago."""
        last = self.functions_last_seen.get(task)
        return last is not None and now - last < MODEL_MEMORY

    def expect(self, model: str, now: float) -> None:
        """Take a model for known, though no worker with it is there yet."""
        self.models_last_seen.setdefault(model, now)

    def add(self, worker: Worker) -> None:
        """Take a worker in."""
        self.devices[worker.offer.device] += 1
        for model in worker.queues:
            self.with_model.setdefault(model, {})[worker.id] = worker
            self.slots[model] += worker.offer.slots if worker.accepts_jobs else 0
        self.index(worker)

    def index(self, worker: Worker) -> None:
        """Put a worker where one of its level is looked for, or nowhere."""
        before = worker.indexed_as
        free = worker.free_slots > 0 and worker.accepts_jobs
        worker.indexed_as = worker.cost_level() if free else None
        for model in worker.queues:
            levels = self.available.setdefault(model, {})
            if before is not None:
                _remove(levels, before, worker.id)
            if worker.indexed_as is not None:
                levels.setdefault(worker.indexed_as, {})[worker.id] = worker
            if not levels:
                del self.available[model]

    def drain(self, worker: Worker, reason: str) -> None:
        """Look for a worker no more."""
        served = worker.accepts_jobs
        worker.draining = reason
        self._count(worker, served)

    def set_load(self, worker: Worker, condition: WorkerLoad) -> None:
        """Take note of how much a worker can take."""
        served = worker.accepts_jobs
        worker.load = condition
        self._count(worker, served)

    def remove(self, worker: Worker, now: float) -> list[str]:
        """Let a worker go; return the models that nobody else has."""
        self.drain(worker, "lost")
        self.devices[worker.offer.device] -= 1
        gone = []
        for model in worker.queues:
            _remove(self.with_model, model, worker.id)
            if model not in self.with_model:
                del self.slots[model]
                if model in SPECIAL_QUEUES:
                    continue
                # Put at the end again, so that the oldest stays in front.
                self.models_last_seen.pop(model, None)
                self.models_last_seen[model] = now
                gone.append(model)
        for task in worker.offer.tasks:
            self.functions_last_seen.pop(task, None)
            self.functions_last_seen[task] = now
        # A worker chooses these names: without this, they would pile up.
        _forget(self.models_last_seen, now)
        _forget(self.functions_last_seen, now)
        return gone

    def _count(self, worker: Worker, served: bool) -> None:
        """Put a worker where it belongs that may have ``served`` before."""
        if change := worker.offer.slots * (worker.accepts_jobs - served):
            for model in worker.queues:
                self.slots[model] += change
        self.index(worker)


def _forget(seen: dict[str, float], now: float) -> None:
    """Forget names that nobody has had for long; the oldest stand first."""
    while seen:
        oldest, at = next(iter(seen.items()))
        if now - at <= MODEL_MEMORY:
            return
        del seen[oldest]


def _remove(
    index: dict[Key, dict[WorkerId, Worker]], key: Key, worker_id: WorkerId
) -> None:
    del index[key][worker_id]
    if not index[key]:
        del index[key]
