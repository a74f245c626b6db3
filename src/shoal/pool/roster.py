"""Indexes workers by model, and the free ones by cost."""

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from shoal.domain.facts import PassedOver
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.money import Micros
from shoal.domain.work import (
    ANY_MODEL,
    CALL_QUEUE,
    MODEL_QUEUE,
    TASK_QUEUE,
    Feature,
    HubModel,
)
from shoal.domain.worker import DeviceKind, LoadableModel, Offer, Suspension, WorkerLoad
from shoal.pool.context_limits import ContextKey, KnownContexts, RequestLength
from shoal.pool.worker import CostLevel, EngineWorkers, Worker

MODEL_MEMORY = 600.0  # seconds that a model stays known without workers
SEEN_MAX = 16_384  # names without workers that are remembered

FINDINGS_MAX = 1000  # kept of each kind: clients choose what they ask for
SUGGESTED_MAX = 5  # names that are suggested if none is similar
COMPARED_MAX = 100  # names compared, which takes time

SPECIAL_QUEUES = frozenset({ANY_MODEL, CALL_QUEUE, TASK_QUEUE, MODEL_QUEUE})
"""Queue names that are not models."""

Key = TypeVar("Key")
Found = TypeVar("Found")


class SuitableWorkers(NamedTuple):
    """The workers that take jobs of one model and need, and why others do not.

    ``alike``: a job of at most ``context`` tokens that no worker has refused may go to
    any of them with a free slot, from any owner.
    """

    workers: tuple[Worker, ...]
    others: tuple[PassedOver, ...]
    alike: bool
    context: float


@dataclass(slots=True)
class Findings:
    """What was found about all workers of a model, to be used for each of its jobs.

    It does not depend on their free slots, and is forgotten when anything else changes.
    """

    suitable: dict[Hashable, SuitableWorkers] = field(default_factory=dict)
    """By model and need: see ``eligibility.suitable_for``."""

    accepted: dict[Hashable, float] = field(default_factory=dict)
    """The tokens up to which a job is accepted: see ``permanent_rejection``."""

    named: dict[Hashable, list[Offer]] = field(default_factory=dict)
    """The offers with a task, by its name: see ``functions.task_rejection``."""

    machines: dict[Hashable, dict[str, list[Worker]]] = field(default_factory=dict)
    """The workers for members of gangs, by need and owner: see ``gangs.places``."""

    def clear(self) -> None:
        """Forget everything."""
        for each in (self.suitable, self.accepted, self.named, self.machines):
            each.clear()


def remember(found: dict[Key, Found], key: Key, value: Found) -> Found:
    """Add a finding, and return it."""
    if len(found) >= FINDINGS_MAX:
        found.clear()
    found[key] = value
    return value


@dataclass(slots=True)
class Roster:
    """The workers by model and cost level."""

    with_model: dict[str, dict[WorkerId, Worker]] = field(default_factory=dict)
    """All workers, by model, and by what stands for one (``Offer.queues``)."""

    slots: Counter[str] = field(default_factory=Counter)
    """Slots of all workers that take new jobs, by model; those of an engine once."""

    loadable: dict[str, dict[WorkerId, LoadableModel]] = field(default_factory=dict)
    """The models that machines can load, by the workers with these libraries.

    Those that copy models can also load what deployments have from the hub.
    """

    from_hub: dict[str, LoadableModel] = field(default_factory=dict)
    """The models that deployments have from the hub: no disk may have them yet."""

    fetching: dict[WorkerId, Worker] = field(default_factory=dict)
    """The workers whose machines copy models before they load them."""

    hosted: dict[str, dict[WorkerId, Worker]] = field(default_factory=dict)
    """The workers of last resort, by model; nothing else here has them."""

    devices: Counter[DeviceKind | None] = field(default_factory=Counter)
    """The number of workers of each kind of device."""

    asks: Counter[Micros] = field(default_factory=Counter)
    """The number of workers that ask for each price."""

    available: dict[str, dict[CostLevel, dict[WorkerId, Worker]]] = field(
        default_factory=dict
    )
    """The workers with a free slot, by model and level.

    Among equals the one that has been so the longest comes first, so that idle workers
    take turns.
    """

    wanted: set[str] = field(default_factory=set)
    """The models that jobs wait for."""

    matched: set[str] = field(default_factory=set)
    """Of these, the models that a worker with a free slot has."""

    version: int = 0
    """Counts changes of what workers offer, and of whether they take new jobs."""

    findings: Findings = field(default_factory=Findings)

    refused_lengths: Counter[str] = field(default_factory=Counter)
    """The number of workers that refused a request for its length, by model."""

    models_last_seen: dict[str, float] = field(default_factory=dict)
    """When the last worker with a model left, or when the model was first expected."""

    functions_last_seen: dict[str, float] = field(default_factory=dict)
    """When a worker with a task or function last left."""

    _engines: dict[tuple[str, str], EngineWorkers] = field(default_factory=dict)
    """By machine, and by what its workers call the engine."""

    @property
    def models(self) -> set[str]:
        """The models that workers offer."""
        return self.with_model.keys() - SPECIAL_QUEUES

    @property
    def names(self) -> set[str]:
        """The models that workers offer, and those that machines can load."""
        return self.models | self.loadable.keys()

    def __contains__(self, model: str) -> bool:
        """Return whether a worker has a model, or a machine can load it."""
        return model in self.with_model or model in self.loadable

    def has_to_load(self, model: str) -> bool:
        """Return whether no worker has a model, but a machine can load it."""
        return model not in self.with_model and model in self.loadable

    def has_files(self, model: str) -> bool:
        """Return whether a machine has the files of a model."""
        unread = self.from_hub.get(model)
        return any(each is not unread for each in self.loadable.get(model, {}).values())

    def knows_model(self, model: str, now: float) -> bool:
        """Return whether a worker has a model, had it lately, or may load it."""
        if model in self:
            return True
        last = self.models_last_seen.get(model)
        return last is not None and now - last < MODEL_MEMORY

    def knows_function(self, task: str, now: float) -> bool:
        """Return whether a worker that had a function left a short while ago."""
        last = self.functions_last_seen.get(task)
        return last is not None and now - last < MODEL_MEMORY

    def expect(
        self, models: Iterable[str], functions: Iterable[str], now: float
    ) -> None:
        """Mark models and functions as known before a worker offers them."""
        for model in models:
            self.models_last_seen.setdefault(model, now)
        for function in functions:
            self.functions_last_seen.setdefault(function, now)

    def deploy(self, model: str, hub: HubModel | None, now: float) -> None:
        """Note where a deployment has a model from; None: from the pool's disks.

        Until a machine has read its files, it may do whatever is asked of it.
        """
        if hub is None and model not in self.from_hub:
            return
        self.on_change()
        for worker in self.fetching.values():
            self._end_loadable(worker, now)
        self.from_hub.pop(model, None)
        if hub is not None:
            anything = frozenset(Feature)
            self.from_hub[model] = LoadableModel(
                model, hub.size, INFERENCE_KINDS, anything, hub=hub
            )
        for worker in self.fetching.values():
            self._set_loadable(worker)

    def on_change(self) -> None:
        """Forget what depended on workers that are not what they were."""
        self.version += 1
        self.findings.clear()

    def add(self, worker: Worker) -> None:
        """Add a worker."""
        self.on_change()
        if worker.offer.engine:
            key = _engine_of(worker)
            worker.engine = self._engines.setdefault(key, EngineWorkers())
            worker.engine.workers[worker.id] = worker
        if worker.offer.last_resort is not None:
            for model in worker.offer.models:
                self.hosted.setdefault(model, {})[worker.id] = worker
            return
        self.devices[worker.offer.device] += 1
        if (ask := worker.offer.ask) is not None:
            self.asks[ask] += 1
        for model in worker.queues:
            self.with_model.setdefault(model, {})[worker.id] = worker
        library = worker.offer.library
        if library is not None and library.fetches:
            self.fetching[worker.id] = worker
        self._set_loadable(worker)
        self._count_slots(worker, before=False)
        self.index(worker)

    def index(self, worker: Worker) -> None:
        """Index a worker, and those that share its slots, by their cost levels."""
        if (engine := worker.engine) is None:
            self._index(worker)
            return
        sharing = engine.workers.values()
        engine.used = 0
        for each in sharing:
            engine.used += len(each.leases) + each.extra_slots
        for each in sharing:
            self._index(each)

    def _index(self, worker: Worker) -> None:
        """Index a worker by its cost level, or remove it if it has no free slot."""
        worker.count_slots()
        if worker.offer.last_resort is not None:
            return
        before = worker.indexed_as
        free = worker.free_slots > 0 and worker.accepts_jobs
        worker.indexed_as = worker.cost_level() if free else None
        for model in worker.queues:
            levels = self.available.setdefault(model, {})
            if before is not None:
                del levels[before][worker.id]
                if not levels[before]:
                    del levels[before]
            if worker.indexed_as is not None:
                levels.setdefault(worker.indexed_as, {})[worker.id] = worker
            if not levels:
                del self.available[model]
                self.matched.discard(model)
            elif model in self.wanted:
                self.matched.add(model)

    def want(self, model: str) -> None:
        """Note that jobs wait for a model."""
        self.wanted.add(model)
        if model in self.available:
            self.matched.add(model)

    def end_want(self, model: str) -> None:
        """Note that no job waits for a model any more."""
        self.wanted.discard(model)
        self.matched.discard(model)

    def drain(self, worker: Worker, reason: str) -> None:
        """Give a worker no new jobs."""
        served = worker.accepts_jobs
        worker.draining = reason
        self._count(worker, served)
        self.on_change()

    def suspend(self, worker: Worker, suspension: Suspension | None) -> None:
        """Set or end the suspension of a worker by an operator."""
        served = worker.accepts_jobs
        worker.suspension = suspension
        self._count(worker, served)
        self.on_change()

    def rest(self, worker: Worker, reason: str) -> None:
        """Give a worker whose engine fails no jobs for a while; end it if empty."""
        served = worker.accepts_jobs
        worker.resting = reason
        self._count(worker, served)
        self.on_change()

    def set_load(self, worker: Worker, condition: WorkerLoad) -> None:
        """Set the load that a worker reported."""
        served = worker.accepts_jobs
        if worker.load.unfit != condition.unfit:
            self.on_change()
        worker.load = condition
        self._count(worker, served)

    def learn_context(
        self, worker: Worker, key: ContextKey, length: RequestLength, reason: str
    ) -> None:
        """Note that a worker refused a request for its length."""
        known = worker.contexts = worker.contexts or KnownContexts()
        before = known.models
        self.on_change()
        known.learn(key, length, reason)
        if worker.offer.last_resort is None:
            self.refused_lengths.update(known.models - before)

    def remove(self, worker: Worker, now: float) -> list[str]:
        """Remove a worker; return the models that no other worker offers."""
        self.drain(worker, "lost")
        if worker.engine is not None:
            del worker.engine.workers[worker.id]
            if others := [*worker.sharing]:
                self.index(others[0])
            else:
                del self._engines[_engine_of(worker)]
        if worker.offer.last_resort is not None:
            for model in worker.offer.models:
                del self.hosted[model][worker.id]
                if not self.hosted[model]:
                    del self.hosted[model]
            return []
        self.devices[worker.offer.device] -= 1
        if (ask := worker.offer.ask) is not None:
            self.asks[ask] -= 1
            if not self.asks[ask]:
                del self.asks[ask]  # workers choose them
        if worker.contexts is not None:
            for model in worker.contexts.models:
                self.refused_lengths[model] -= 1
                if not self.refused_lengths[model]:
                    del self.refused_lengths[model]
        removed = []
        for model in worker.queues:
            del self.with_model[model][worker.id]
            if not self.with_model[model]:
                del self.with_model[model]
                del self.slots[model]
                if model in SPECIAL_QUEUES:
                    continue
                # Put at the end again, so that the oldest stays in front.
                self.models_last_seen.pop(model, None)
                self.models_last_seen[model] = now
                removed.append(model)
        self._end_loadable(worker, now)
        self.fetching.pop(worker.id, None)
        for task in worker.offer.tasks:
            self.functions_last_seen.pop(task, None)
            self.functions_last_seen[task] = now
        # A worker chooses these names: without this, they would pile up.
        _forget(self.models_last_seen, now)
        _forget(self.functions_last_seen, now)
        return removed

    def _set_loadable(self, worker: Worker) -> None:
        """Add what a machine can load; of its own files, it knows more."""
        if (library := worker.offer.library) is None:
            return
        unread = self.from_hub.values() if library.fetches else ()
        for each in (*unread, *library.models):
            self.loadable.setdefault(each.name, {})[worker.id] = each

    def _end_loadable(self, worker: Worker, now: float) -> None:
        """Remove what a machine can load."""
        if (library := worker.offer.library) is None:
            return
        unread = self.from_hub if library.fetches else ()
        for name in dict.fromkeys([*unread, *(each.name for each in library.models)]):
            del self.loadable[name][worker.id]
            if not self.loadable[name]:
                del self.loadable[name]
                self.models_last_seen.pop(name, None)
                self.models_last_seen[name] = now

    def _count(self, worker: Worker, served: bool) -> None:
        """Update the slot counts and the index; ``served``: it accepted jobs before."""
        self._count_slots(worker, before=served)
        self.index(worker)

    def _count_slots(self, worker: Worker, *, before: bool) -> None:
        """Update the slots by model; ``before``: whether it accepted jobs."""
        now, slots = worker.accepts_jobs, worker.offer.slots
        if worker.offer.last_resort is not None:
            return
        for model in worker.queues if now != before else ():
            counted = (
                each.offer.slots
                for each in worker.sharing
                if each is not worker and each.accepts_jobs and model in each.queues
            )
            others = max(counted, default=0)
            self.slots[model] += max(others, now * slots) - max(others, before * slots)


def suggest_names(name: str, known: Iterable[str], listing: str) -> str | None:
    """Suggest similar names, or list some; None if no name is known.

    ``listing`` says where to find all of them.
    """
    names = sorted(islice(known, COMPARED_MAX))
    if not names:
        return None
    if similar := similar_names(name, names):
        return similar
    more = f"; {listing}" if len(names) > SUGGESTED_MAX else ""
    return f"the pool has {', '.join(names[:SUGGESTED_MAX])}{more}"


def similar_names(name: str, known: Iterable[str]) -> str | None:
    """Ask whether one of the known names was meant; None if none is similar."""
    similar = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(similar)}?" if similar else None


def _engine_of(worker: Worker) -> tuple[str, str]:
    return peer_of(worker.id), worker.offer.engine


def _forget(seen: dict[str, float], now: float) -> None:
    """Drop names without workers for longer than MODEL_MEMORY, the oldest first.

    Sooner if there are many: a library names hundreds, and can change all the time.
    """
    while seen:
        oldest, at = next(iter(seen.items()))
        if now - at <= MODEL_MEMORY and len(seen) <= SEEN_MAX:
            return
        del seen[oldest]
