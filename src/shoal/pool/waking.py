"""Machines that were lost without a word, and may be woken when they are needed.

A machine that sleeps says nothing: its connection falls silent.  One whose worker was
stopped has said that it leaves, so it is not woken.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.domain.facts import MachineCalled
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import Offer
from shoal.pool.worker import Worker

if TYPE_CHECKING:
    from shoal.pool.state import PoolState

WAKE_TIMEOUT = 180.0  # seconds for a machine to join again after it was called
CALL_INTERVAL = 60.0  # seconds between two calls: it may have slept in again
CALLS_MAX = 3  # without an answer; then it counts as absent
CALLERS_MAX = 3  # machines that call one
SLEEPERS_MAX = 256  # workers; the oldest are forgotten


@dataclass(slots=True)
class Sleeper:
    """A worker that was lost, and how often its machine was called since."""

    offer: Offer
    calls: int = 0
    called_at: float = -math.inf


@dataclass(slots=True)
class Sleepers:
    """The workers whose machines may be woken, the last one that was lost last."""

    by_id: dict[WorkerId, Sleeper] = field(default_factory=dict)

    def add(self, worker: Worker, reason: str) -> None:
        """Note a worker that has left, unless it had said that it would."""
        if worker.offer.wake and not (reason or worker.dismissed):
            self.by_id[worker.id] = Sleeper(worker.offer)
            if len(self.by_id) > SLEEPERS_MAX:
                del self.by_id[next(iter(self.by_id))]

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker that is here again."""
        self.by_id.pop(worker_id, None)

    def knows_model(self, model: str) -> bool:
        """Return whether a machine that may be woken has a model."""
        return any(True for _ in self._with(model))

    def awaited_until(self, model: str) -> float:
        """Return until when a machine that was called is expected with a model."""
        called = (each.called_at for each in self._with(model))
        return max(called, default=-math.inf) + WAKE_TIMEOUT

    def _with(self, model: str) -> Iterator[Sleeper]:
        for each in self.by_id.values():
            if model in _models_of(each.offer):
                yield each


def _models_of(offer: Offer) -> frozenset[str]:
    """Return the models that a worker has, or can load."""
    loadable = () if offer.library is None else offer.library.models
    return offer.models | {each.name for each in loadable}


def calls(pool: "PoolState", now: float) -> Iterator[MachineCalled]:
    """Yield the machines to call now: those with a model that is missing.

    The caller applies each fact before it takes the next.
    """
    for worker_id, sleeper in [*pool.sleepers.by_id.items()]:
        due = next_call(sleeper)
        if due is None or due > now or not _is_needed(pool, sleeper.offer):
            continue
        if callers := _callers(pool, worker_id):
            yield MachineCalled(worker_id, sleeper.offer.wake, callers)


def next_call(sleeper: Sleeper) -> float | None:
    """Return when a machine may be called again; None: not any more."""
    return sleeper.called_at + CALL_INTERVAL if sleeper.calls < CALLS_MAX else None


def next_due(pool: "PoolState", now: float) -> float | None:
    """Return when to look again for machines to call."""
    due = (
        next_call(each)
        for each in pool.sleepers.by_id.values()
        if each.calls and _is_needed(pool, each.offer)
    )
    return min((each for each in due if each is not None and each > now), default=None)


def _is_needed(pool: "PoolState", offer: Offer) -> bool:
    """Return whether jobs or a deployment want a model that no worker has."""
    return any(
        (model in pool.queues or model in pool.deployments)
        and not (model in pool.roster.with_model or pool.roster.has_files(model))
        for model in _models_of(offer)
    )


def _callers(pool: "PoolState", sleeper: WorkerId) -> tuple[WorkerId, ...]:
    """Return a worker of each of some machines, that may call another.

    Those know nothing of networks: a call that does not reach the machine is lost.
    """
    by_machine = {
        peer_of(each.id): each.id
        for each in pool.workers.values()
        if each.offer.wake and peer_of(each.id) != peer_of(sleeper)
    }
    return tuple([*by_machine.values()][:CALLERS_MAX])
