"""Metrics of the pool's state, read at each scrape."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal import __version__
from shoal.domain.worker import Suspension
from shoal.gateway.context import Gateway
from shoal.gateway.metrics.families import counters, gauge, gauges, histograms
from shoal.gateway.metrics.jobs import JobMetrics
from shoal.gateway.metrics.requests import OTHER, WorkerLabels
from shoal.pool.worker import Worker

STATES = ("serving", "draining", "suspended", "pending", "unfit")


def state_of(worker: Worker) -> str:
    """Return whether a worker gets jobs, and if not, why."""
    if worker.draining:
        return "draining"
    if worker.accepts_jobs:
        return "serving"
    if worker.suspension is None:
        return "unfit"
    return "pending" if worker.suspension is Suspension.PENDING else "suspended"


class PoolMetrics(Collector):
    """Reads the pool, the store and the webhooks."""

    def __init__(
        self, gateway: Gateway, workers: WorkerLabels, jobs: JobMetrics
    ) -> None:
        self._gateway = gateway
        self._workers = workers
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        hub, pool = gateway.hub, gateway.hub.pool
        yield gauges(
            "shoal_build_info",
            "The version of the coordinator",
            ("version",),
            {(__version__,): 1},
        )
        yield gauge(
            "shoal_ready",
            "Whether the coordinator accepts jobs",
            hub.unavailable_reason is None,
        )
        yield gauges(
            "shoal_jobs",
            "Open jobs",
            ("state",),
            {
                ("queued",): pool.queued,
                ("running",): len(pool.jobs) - pool.queued,
            },
        )
        yield gauge(
            "shoal_models", "Models that workers offer", len(pool.roster.models)
        )
        yield gauge(
            "shoal_durable_calls",
            "Durable function calls that have not ended",
            gateway.calls.open_count,
        )
        yield from self._collect_workers()
        yield gauge(
            "shoal_store_failing_seconds",
            "Time for which the store has been failing; 0: it works",
            hub.store_health.failing_for,
        )
        yield histograms(
            "shoal_store_commit_seconds",
            "Duration of commits to the database, retries included",
            (),
            {(): hub.commit_seconds},
        )
        yield counters(
            "shoal_webhook_attempts",
            "Webhook delivery attempts, by result",
            ("result",),
            {
                ("delivered",): gateway.webhook_results.delivered,
                ("failed",): gateway.webhook_results.failed,
                ("given_up",): gateway.webhook_results.given_up,
            },
        )

    def _collect_workers(self) -> Iterator[Metric]:
        """Yield the metrics of all workers together, and of each with a label."""
        gateway, now = self._gateway, self._gateway.clock.now()
        workers, health = gateway.hub.pool.serving, gateway.hub.health
        for lost in self._workers.update(workers, now):
            self._jobs.forget_worker(lost)
        by_state = dict.fromkeys(STATES, 0)
        by_wire: Counter[tuple[str, ...]] = Counter()
        slots: Counter[tuple[str, ...]] = Counter()
        measured: dict[str, dict[tuple[str, ...], float]] = {
            "cpu": {}, "memory": {}, "temperature": {}, "pace": {}
        }  # fmt: skip
        busy = offered = 0
        for worker_id, worker in workers.items():
            state = state_of(worker)
            by_state[state] += 1
            by_wire[worker_id.partition(":")[0], state] += 1
            used = worker.used_slots
            busy += used
            offered += worker.counted_slots
            label = (self._workers.label(worker_id, now),)
            slots[*label, "busy"] += used
            slots[*label, "free"] += max(0, worker.offer.slots - worker.busy_slots)
            if label == (OTHER,):
                continue  # no average of several machines
            if worker.pace is not None:
                measured["pace"][label] = worker.pace
            machine = health.get(worker_id)
            if machine is None:
                continue
            for name, value, unit in (
                ("cpu", machine.cpu, 100),
                ("memory", machine.memory, 100),
                ("temperature", machine.temperature, 1),
            ):
                if value is not None:
                    measured[name][label] = value / unit
        yield gauges(
            "shoal_workers",
            "Connected workers",
            ("state",),
            {(state,): count for state, count in by_state.items()},
        )
        yield gauges(
            "shoal_wire_workers",
            "Connected workers, by protocol",
            ("wire", "state"),
            by_wire,
        )
        yield gauges(
            "shoal_slots",
            "Concurrent jobs that all workers can run",
            ("state",),
            {("busy",): busy, ("free",): max(0, offered - busy)},
        )
        yield gauges(
            "shoal_worker_slots",
            "Concurrent jobs that a worker can run",
            ("worker", "state"),
            slots,
        )
        yield gauges(
            "shoal_worker_tokens_per_second",
            "Recent speed of a single answer of a worker",
            ("worker",),
            measured["pace"],
        )
        yield gauges(
            "shoal_worker_cpu_ratio",
            "The share of a worker's processors in use, as it reports it",
            ("worker",),
            measured["cpu"],
        )
        yield gauges(
            "shoal_worker_memory_ratio",
            "The share of a worker's memory in use, as it reports it",
            ("worker",),
            measured["memory"],
        )
        yield gauges(
            "shoal_worker_temperature_celsius",
            "The temperature of a worker's hottest processor or GPU",
            ("worker",),
            measured["temperature"],
        )
