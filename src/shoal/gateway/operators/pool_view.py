"""The pool as the dashboard sees it: a snapshot, and the changes since the last one.

A worker that has not changed costs one comparison; only changed workers are described
again.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

import shoal
from shoal.coordinator.answer import Answer
from shoal.domain import facts
from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.operators.status import (
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
from shoal.gateway.operators.workers import StoredOrder, order_infos, suspension_state
from shoal.pool.open_job import CHARACTERS_PER_TOKEN
from shoal.pool.worker import Worker

JOBS_SHOWN = 20  # of one worker
ORDERS = (
    facts.WorkerSuspended,
    facts.WorkerResumed,
    facts.WorkerApproved,
    facts.WorkerDisapproved,
)


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
    """The last snapshot.  ``orders`` are operators' orders in the store."""

    def __init__(
        self, gateway: OperatorsGateway, orders: Sequence[StoredOrder]
    ) -> None:
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

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Note facts."""
        for fact in batch:
            self._rates.on_fact(fact)
            if isinstance(fact, ORDERS):
                self.orders_changed = True

    def snapshot(self) -> PoolSnapshot:
        """Return the state at the last snapshot."""
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
        workers = gateway.hub.pool.serving
        changed: dict[WorkerId, WorkerStatus | None] = {}
        for worker_id, worker in workers.items():
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
        if len(seen) > len(workers):
            for worker_id in seen.keys() - workers.keys():
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
            suspension_state(hub.pool, worker),
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
            "degraded": hub.degraded_reason or "",
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
            self._models = version, sorted(self._gateway.hub.pool.roster.models)
        return self._models[1]

    def _look_at_peers(self) -> list[PeerStatus]:
        directory, pool = self._gateway.directory, self._gateway.hub.pool
        peers: dict[str, _SeenPeer] = {}
        for peer, joined in directory.connected.items():
            pending = pool.approvals.is_pending(peer, joined.public_key)
            profile, loan = directory.profile_of(peer), pool.loan_of(peer)
            made_of = (joined, profile, pending, loan)
            known = self._peers.get(peer)
            if known is None or known.made_of != made_of:
                status = peer_status(peer, directory, pool)
                known = _SeenPeer(made_of, status)
            peers[peer] = known
        self._peers = peers
        return [each.status for each in peers.values()]

    def _look_at_activity(self) -> None:
        gateway = self._gateway
        workers = gateway.hub.pool.serving
        tokens, jobs = self._rates.sample(workers.values(), gateway.clock.now())
        self._activity = {
            worker_id: WorkerActivity(
                [*islice(worker.leases, JOBS_SHOWN)], tokens.get(worker_id, 0.0)
            )
            for worker_id, worker in workers.items()
            if worker.leases or worker_id in tokens
        }
        self._rate = PoolRate(round(sum(tokens.values()), 1), jobs)


class TokenRates:
    """The tokens of each worker since the last sample, estimated.

    The characters of open answers are sampled: nothing is counted while tokens pass.  A
    token is taken for four characters, and the tokens that a worker reports at the end
    of an answer correct the estimate for the rest of it.

    ``answers`` are those of all open jobs.
    """

    def __init__(self, answers: Mapping[JobId, Answer], now: float) -> None:
        self._answers = answers
        self._sampled_at = now
        # Characters at the last sample.  What open answers have by now took longer than
        # the time until the first sample.
        self._sizes = {job_id: answer.size for job_id, answer in answers.items()}
        self._tokens: dict[WorkerId, float] = defaultdict(float)  # since then
        self._completed = 0  # jobs since then

    def on_fact(self, fact: facts.Fact) -> None:
        """Count what a job wrote between the last sample and its end."""
        if not isinstance(fact, facts.JobCompleted):
            return
        self._completed += 1
        answer = self._answers.get(fact.job_id)
        if answer is None or answer.worker_id is None:
            return
        tokens = answer.size / CHARACTERS_PER_TOKEN
        if (usage := fact.outcome.usage) is not None:
            tokens = float(usage.completion_tokens)
        if answer.size:
            tokens *= _growth(self._sizes, answer) / answer.size
        self._tokens[answer.worker_id] += tokens

    def sample(
        self, workers: Iterable[Worker], now: float
    ) -> tuple[dict[WorkerId, float], float]:
        """Return the tokens a second of each worker that wrote, and the jobs a second.

        Both are of the time since the last sample.
        """
        seconds = now - self._sampled_at
        tokens, completed = self._tokens, self._completed
        sizes: dict[JobId, int] = {}
        answers, before = self._answers, self._sizes
        for worker in workers:
            for job_id in worker.leases:
                answer = answers.get(job_id)
                if answer is None or not answer.size or answer.worker_id != worker.id:
                    continue
                sizes[job_id] = answer.size
                if grown := _growth(before, answer):
                    tokens[worker.id] += grown / CHARACTERS_PER_TOKEN
        self._sampled_at = now
        self._sizes, self._tokens, self._completed = sizes, defaultdict(float), 0
        if seconds <= 0:
            return {}, 0.0
        return (
            {worker: round(count / seconds, 1) for worker, count in tokens.items()},
            round(completed / seconds, 1),
        )


def _growth(before: Mapping[JobId, int], answer: Answer) -> int:
    """Return the characters that an answer has grown by."""
    # A successor that starts over makes it shorter.
    return max(0, answer.size - before.get(answer.job_id, 0))
