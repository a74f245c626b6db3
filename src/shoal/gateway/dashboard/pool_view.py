"""The pool as the dashboard sees it: a snapshot, and what changed since the last look.

A look at a worker that has not changed costs a comparison; only changed workers are
described anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

import shoal
from shoal.domain.facts import (
    Fact,
    WorkerApproved,
    WorkerDisapproved,
    WorkerResumed,
    WorkerSuspended,
)
from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.gateway.admin.status import (
    CoordinatorStatus,
    PeerStatus,
    WorkerStatus,
    clock_offset,
    job_counts,
    node_statuses,
    peer_status,
    refused_peer_statuses,
    relay_statuses,
    worker_status,
)
from shoal.gateway.admin.workers import StoredOrder, order_infos
from shoal.gateway.context import Gateway
from shoal.gateway.dashboard.token_rates import TokenRates
from shoal.pool.worker import Worker

JOBS_SHOWN = 20  # of one worker
ORDERS = (WorkerSuspended, WorkerResumed, WorkerApproved, WorkerDisapproved)


class WorkerActivity(msgspec.Struct, frozen=True):
    """What a worker does.

    ``jobs`` are at most 20 of its jobs; ``tokens_per_second``, of all of them, is an
    estimate.
    """

    jobs: list[JobId]
    tokens_per_second: float


class PoolRate(msgspec.Struct, frozen=True):
    """What all workers do: tokens, an estimate, and jobs that were done."""

    tokens_per_second: float
    jobs_per_second: float


class PoolSnapshot(msgspec.Struct, frozen=True):
    """The whole state; ``at`` is in Unix seconds.

    ``activity`` has the workers that have jobs or wrote something in the last second.
    """

    at: float
    status: CoordinatorStatus
    activity: dict[WorkerId, WorkerActivity]
    rate: PoolRate


class PoolChanges(msgspec.Struct, frozen=True):
    """What has changed; null for a worker that left, or that does nothing any more.

    ``status`` has the changed fields of ``CoordinatorStatus``, but ``workers``.
    """

    at: float
    status: dict[str, Any]
    workers: dict[WorkerId, WorkerStatus | None]
    activity: dict[WorkerId, WorkerActivity | None]
    rate: PoolRate


@dataclass(slots=True)
class _SeenWorker:
    """A worker, what its status was made of, and the status."""

    worker: Worker
    made_of: tuple[object, ...]
    status: WorkerStatus


@dataclass(slots=True)
class _SeenPeer:
    made_of: tuple[object, ...]
    status: PeerStatus


class PoolView:
    """The state at the last look.  ``orders`` are operators' orders in the store."""

    def __init__(self, gateway: Gateway, orders: Sequence[StoredOrder]) -> None:
        self.orders = orders
        self.orders_changed = False  # whether they must be read again
        self._gateway = gateway
        self._offset = clock_offset(gateway.clock)
        self._rates = TokenRates(gateway.hub.answers, gateway.clock.now())
        self._workers: dict[WorkerId, _SeenWorker] = {}
        self._peers: dict[str, _SeenPeer] = {}
        self._models: tuple[int, list[str]] = (-1, [])  # version of the roster
        self._fields: dict[str, Any] = {}
        self._activity: dict[WorkerId, WorkerActivity] = {}
        self._rate = PoolRate(0.0, 0.0)
        self.look()

    def on_fact(self, fact: Fact) -> None:
        """Note a fact."""
        self._rates.on_fact(fact)
        if isinstance(fact, ORDERS):
            self.orders_changed = True

    def snapshot(self) -> PoolSnapshot:
        """Return the state at the last look."""
        gateway = self._gateway
        status = CoordinatorStatus(
            version=shoal.__version__,
            started_at=gateway.started_at,
            workers=[each.status for each in self._workers.values()],
            unencrypted=dict(gateway.unencrypted),
            **self._fields,
        )
        at = gateway.clock.wall()
        return PoolSnapshot(at, status, self._activity, self._rate)

    def look(self) -> PoolChanges | None:
        """Look at the pool; return what has changed, or None if nothing has."""
        workers = self._look_at_workers()
        fields = self._look_at_fields()
        changed = {
            name: value
            for name, value in fields.items()
            if name not in self._fields or self._fields[name] != value
        }
        self._fields = fields
        before, rate = self._activity, self._rate
        self._look_at_activity()
        activity: dict[WorkerId, WorkerActivity | None] = {
            worker_id: doing
            for worker_id, doing in self._activity.items()
            if before.get(worker_id) != doing
        }
        activity |= dict.fromkeys(before.keys() - self._activity.keys())
        if not (changed or workers or activity or rate != self._rate):
            return None
        at = self._gateway.clock.wall()
        return PoolChanges(at, changed, workers, activity, self._rate)

    def _look_at_workers(self) -> dict[WorkerId, WorkerStatus | None]:
        """Update the workers; return those that have changed or left."""
        gateway, seen = self._gateway, self._workers
        pool = gateway.hub.pool
        changed: dict[WorkerId, WorkerStatus | None] = {}
        for worker_id, worker in pool.workers.items():
            made_of = self._made_of(worker)
            known = seen.get(worker_id)
            if known is not None and known.worker is worker:
                if known.made_of == made_of:
                    continue
                known.made_of = made_of
                status = worker_status(gateway, worker, self._offset)
                if status == known.status:
                    continue
                known.status = status
            else:
                status = worker_status(gateway, worker, self._offset)
                seen[worker_id] = _SeenWorker(worker, made_of, status)
            changed[worker_id] = status
        if len(seen) > len(pool.workers):
            for worker_id in seen.keys() - pool.workers.keys():
                del seen[worker_id]
                changed[worker_id] = None
        return changed

    def _made_of(self, worker: Worker) -> tuple[object, ...]:
        """Return all that a worker's status is made of and that may change."""
        hub, directory = self._gateway.hub, self._gateway.directory
        route = hub.peer_route_of(worker.id)
        return (
            worker.used_slots,
            worker.load,
            worker.resting,
            hub.health.get(worker.id),
            worker.pace,
            worker.offer,
            worker.draining,
            worker.suspension,
            worker.points,
            route,
            None if route is None else directory.profile_of(peer_of(worker.id)).name,
            hub.connected_at(worker.id),
        )

    def _look_at_fields(self) -> dict[str, Any]:
        """Return the fields of the status that may change, but the workers."""
        gateway = self._gateway
        hub = gateway.hub
        why_not = hub.unavailable_reason
        return {
            "ready": why_not is None,
            "why_not": why_not or "",
            "models": self._look_at_models(),
            "jobs": job_counts(hub.pool),
            "nodes": node_statuses(gateway, self._offset),
            "peers": self._look_at_peers(),
            "refused": refused_peer_statuses(gateway.directory),
            "orders": order_infos(gateway, self.orders),
            "relays": relay_statuses(gateway),
        }

    def _look_at_models(self) -> list[str]:
        version = self._gateway.hub.pool.roster.version
        if self._models[0] != version:
            self._models = version, sorted(self._gateway.models)
        return self._models[1]

    def _look_at_peers(self) -> list[PeerStatus]:
        directory, pool = self._gateway.directory, self._gateway.hub.pool
        peers: dict[str, _SeenPeer] = {}
        for peer, joined in directory.connected.items():
            pending = pool.approvals.is_pending(peer, joined.public_key)
            made_of = (joined, directory.profile_of(peer), pending)
            known = self._peers.get(peer)
            if known is None or known.made_of != made_of:
                status = peer_status(peer, directory, pool.approvals)
                known = _SeenPeer(made_of, status)
            peers[peer] = known
        self._peers = peers
        return [each.status for each in peers.values()]

    def _look_at_activity(self) -> None:
        gateway = self._gateway
        workers: Mapping[WorkerId, Worker] = gateway.hub.pool.workers
        tokens, jobs = self._rates.sample(workers.values(), gateway.clock.now())
        self._activity = {
            worker_id: WorkerActivity(
                [*islice(worker.leases, JOBS_SHOWN)], tokens.get(worker_id, 0.0)
            )
            for worker_id, worker in workers.items()
            if worker.leases or worker_id in tokens
        }
        self._rate = PoolRate(round(sum(tokens.values()), 1), jobs)
