"""The workers that operators paused, drained or removed, until they resume them.

An order names a worker, or a machine: the part of the names of its workers before the
slash.  It outlives their connections.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.domain.facts import WorkerResumed, WorkerSuspended
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import Suspension

SUSPENDED: Mapping[Suspension, str] = {
    Suspension.PAUSED: "paused by an operator",
    Suspension.DRAINING: "drained by an operator",
    Suspension.REMOVED: "removed by an operator",
}
"""Descriptions of suspended workers, for users."""

LEAVING = frozenset({Suspension.DRAINING, Suspension.REMOVED})
"""The suspensions whose workers are disconnected when they are idle."""

_STRICTNESS = {each: rank for rank, each in enumerate(Suspension)}


@dataclass(slots=True)
class SuspensionOrder:
    """An operator's order.

    ``due`` is when the jobs of a drain are handed over, and ``workers`` are the
    connected workers that it is about.
    """

    name: str
    how: Suspension
    by: str
    due: float = math.inf
    workers: set[WorkerId] = field(default_factory=set)

    def covers(self, worker_id: WorkerId) -> bool:
        """Return whether it is about a worker."""
        return self.name in (worker_id, peer_of(worker_id))

    def may_disconnect(self, worker_id: WorkerId, *, shared: bool) -> bool:
        """Return whether it disconnects a worker.

        The connection that is ``shared`` by the models of a machine stays, unless the
        order is about the machine.
        """
        about_machine = self.name == peer_of(worker_id)
        return self.how in LEAVING and (about_machine or not shared)


@dataclass(slots=True)
class Suspensions:
    """The orders in force, by name: at most two are about one worker."""

    _orders: dict[str, SuspensionOrder] = field(default_factory=dict)
    _limited: dict[str, SuspensionOrder] = field(default_factory=dict)
    """The drains with a limit."""

    _first_due: float = math.inf  # of these; there may be thousands

    def __iter__(self) -> Iterator[SuspensionOrder]:
        return iter(self._orders.values())

    def get(self, name: str) -> SuspensionOrder | None:
        """Return the order that names a worker or a machine so."""
        return self._orders.get(name)

    def about(self, worker_id: WorkerId) -> list[SuspensionOrder]:
        """Return the orders about a worker."""
        names = dict.fromkeys((worker_id, peer_of(worker_id)))
        found = (self._orders.get(name) for name in names)
        return [order for order in found if order is not None]

    def of(self, worker_id: WorkerId) -> Suspension | None:
        """Return the strictest suspension of a worker."""
        orders = self.about(worker_id)
        ways = [order.how for order in orders]
        return max(ways, key=_STRICTNESS.__getitem__, default=None)

    def refusal(self, name: str) -> str | None:
        """Return why a worker, or the peer with all its workers, may not join."""
        for order in self.about(WorkerId(name)):
            if order.how in LEAVING:
                return refusal_of(order)
        return None

    def ended_by(self, name: str) -> list[SuspensionOrder]:
        """Return the orders that a resume of ``name`` ends."""
        return [
            order
            for order in self._orders.values()
            if name in (order.name, peer_of(WorkerId(order.name)))
        ]

    def expired(self, now: float) -> list[SuspensionOrder]:
        """Return the drains that have reached their limits."""
        if now < self._first_due:
            return []
        return [order for order in self._limited.values() if order.due <= now]

    @property
    def next_due(self) -> float | None:
        """When the next drain reaches its limit."""
        return self._first_due if self._limited else None

    # For the pool.

    def suspend(
        self, fact: WorkerSuspended, connected: Iterable[WorkerId], now: float
    ) -> SuspensionOrder:
        """Replace the order of a name; ``connected`` are all workers."""
        due = math.inf
        if fact.how is Suspension.DRAINING and fact.within is not None:
            due = now + fact.within
        order = SuspensionOrder(fact.name, fact.how, fact.by, due)
        order.workers.update(each for each in connected if order.covers(each))
        self._orders[fact.name] = order
        self._set_limit(order)
        return order

    def resume(self, fact: WorkerResumed) -> set[WorkerId]:
        """End the orders of a name; return the connected workers."""
        workers: set[WorkerId] = set()
        for order in self.ended_by(fact.name):
            workers |= order.workers
            del self._orders[order.name]
            order.due = math.inf
            self._set_limit(order)
        return workers

    def join(self, worker_id: WorkerId) -> None:
        """Add a worker that joined to the orders about it."""
        for order in self.about(worker_id):
            order.workers.add(worker_id)

    def leave(self, worker_id: WorkerId) -> list[SuspensionOrder]:
        """Remove a worker that left; return the orders about it."""
        orders = self.about(worker_id)
        for order in orders:
            order.workers.discard(worker_id)
        return orders

    def _set_limit(self, order: SuspensionOrder) -> None:
        before = self._limited.pop(order.name, None)
        if order.due < math.inf:
            self._limited[order.name] = order
        if before is not None or order.due < self._first_due:
            dues = (each.due for each in self._limited.values())
            self._first_due = min(dues, default=math.inf)


def refusal_of(order: SuspensionOrder) -> str:
    """Return the reason that a worker is disconnected or refused for."""
    return (
        f"{SUSPENDED[order.how]}; `shoal workers resume {order.name}` at the "
        "coordinator admits it again"
    )
