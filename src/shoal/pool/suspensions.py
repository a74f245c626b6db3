"""What operators decided about workers: suspensions, and approvals of new ones.

Both outlive connections.  An order names a worker, or a machine: the part of the names
of its workers before the slash.  It suspends them until a resume.

An approval, on coordinators that require it, is of the key that a worker has proved,
whatever its name; of the name, where it proves none.  An approval of a name without a
connected worker waits for the first to connect, which decides.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.domain import facts
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import Offer, Suspension

SUSPENDED: Mapping[Suspension, str] = {
    Suspension.PENDING: "not approved by an operator yet",
    Suspension.PAUSED: "paused by an operator",
    Suspension.DRAINING: "drained by an operator",
    Suspension.REMOVED: "removed by an operator",
}
"""Descriptions of suspended workers, for users."""

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

    def disconnects(self, worker_id: WorkerId, *, shared: bool) -> bool:
        """Return whether it disconnects a worker.

        The connection that is ``shared`` by the models of a machine stays, unless the
        order is about the machine.
        """
        about_machine = self.name == peer_of(worker_id)
        return self.how is Suspension.REMOVED and (about_machine or not shared)


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
        found = (self._orders.get(name) for name in _names(worker_id))
        return [order for order in found if order is not None]

    def of(self, worker_id: WorkerId) -> Suspension | None:
        """Return the strictest suspension of a worker."""
        orders = self.about(worker_id)
        ways = [order.how for order in orders]
        return max(ways, key=_STRICTNESS.__getitem__, default=None)

    def refusal(self, name: str) -> str | None:
        """Return why a worker, or the peer with all its workers, may not join."""
        for order in self.about(WorkerId(name)):
            if order.how is Suspension.REMOVED:
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
        self, fact: facts.WorkerSuspended, connected: Iterable[WorkerId], now: float
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

    def resume(self, fact: facts.WorkerResumed) -> set[WorkerId]:
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

    def leave(self, worker_id: WorkerId) -> None:
        """Remove a worker that left from the orders about it."""
        for order in self.about(worker_id):
            order.workers.discard(worker_id)

    def _set_limit(self, order: SuspensionOrder) -> None:
        before = self._limited.pop(order.name, None)
        if order.due < math.inf:
            self._limited[order.name] = order
        if before is not None or order.due < self._first_due:
            dues = (each.due for each in self._limited.values())
            self._first_due = min(dues, default=math.inf)


@dataclass(slots=True)
class Approvals:
    """The approvals in force.  Without ``required``, they are kept but not needed."""

    required: bool = False
    _approved: dict[str, dict[str | None, str]] = field(default_factory=dict)
    """By name: the keys, as in ``WorkerApproved``, each with who approved it."""

    _keys: Counter[str] = field(default_factory=Counter)
    """Proven keys, each with the number of names that it is approved under."""

    def is_pending(self, name: str, proven_key: str) -> bool:
        """Return whether a worker, or a peer with all its workers, is not approved.

        ``proven_key`` is as in ``Offer``.
        """
        if not self.required or self._covers(name, proven_key):
            return False
        return all(None not in self._approved.get(each, ()) for each in _names(name))

    def of(self, name: str) -> list[str]:
        """Return what is approved of a name: public keys, or the name itself."""
        return sorted(key or name for key in self._approved.get(name, ()))

    def missing(
        self, name: str, by: str, proven_keys: Collection[str]
    ) -> list[facts.WorkerApproved]:
        """Return the approvals of a name that are not in force.

        ``proven_keys`` are those of its connected workers, each as in ``Offer``.  If
        one of them proved a key, others without are not approved with it: they may be
        another machine, which uses its name.
        """
        if not proven_keys:
            return [] if name in self._approved else [facts.WorkerApproved(name, by)]
        return [
            facts.WorkerApproved(name, by, key)
            for key in sorted({*proven_keys} - {""} or {""})
            if not self._covers(name, key)
        ]

    def decided_by(
        self, worker_id: WorkerId, offer: Offer
    ) -> list[facts.WorkerApproved]:
        """Return what a worker that connects makes of approvals that waited for it."""
        return [
            facts.WorkerApproved(name, self._approved[name][None], offer.proven_key)
            for name in _names(worker_id)
            if None in self._approved.get(name, ())
        ]

    def ended_by(
        self, name: str, by: str, proven_keys: Collection[str]
    ) -> list[facts.WorkerDisapproved]:
        """Return the ends of all approvals of a name, and of ``proven_keys``.

        A key that is approved under the name loses its other approvals as well, or it
        would still be approved.
        """
        found = [(each, key) for each, keys in self._approved.items() for key in keys]
        ended = {key for each, key in found if name in _names(each)}
        ended = {*ended, *proven_keys} - {"", None}
        return [
            facts.WorkerDisapproved(each, by, key)
            for each, key in found
            if name in _names(each) or key in ended
        ]

    # For the pool.

    def approve(self, fact: facts.WorkerApproved) -> None:
        """Add an approval; one of a name that waited for a worker is replaced."""
        keys = self._approved.setdefault(fact.name, {})
        keys.pop(None, None)
        if fact.public_key and fact.public_key not in keys:
            self._keys[fact.public_key] += 1
        keys[fact.public_key] = fact.by

    def disapprove(self, fact: facts.WorkerDisapproved) -> None:
        """End an approval."""
        keys = self._approved[fact.name]
        del keys[fact.public_key]
        if not keys:
            del self._approved[fact.name]
        if fact.public_key:
            self._keys[fact.public_key] -= 1
            if not self._keys[fact.public_key]:
                del self._keys[fact.public_key]

    def _covers(self, name: str, proven_key: str) -> bool:
        if proven_key:
            return proven_key in self._keys
        return any("" in self._approved.get(each, ()) for each in _names(name))


def refusal_of(order: SuspensionOrder) -> str:
    """Return the reason that a worker is disconnected or refused for."""
    return (
        f"{SUSPENDED[order.how]}; `shoal nodes resume {order.name}` at the "
        "coordinator admits it again"
    )


def _names(name: str) -> Iterable[str]:
    """Return the names of a worker in orders and approvals: its own, its machine's."""
    return dict.fromkeys((name, peer_of(WorkerId(name))))
