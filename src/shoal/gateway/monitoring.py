"""Monitoring endpoints: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz``.

Metric names follow OpenTelemetry's conventions for generative AI and HTTP where these
have one, in Prometheus' spelling.  All labels are bounded: text from a client becomes
a label only if the pool knows it.
"""

from collections.abc import Collection, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from shoal import __version__
from shoal.calls.durable import DurableCalls
from shoal.coordinator.admission import WorkerAdmission
from shoal.domain.facts import FACT_NAMES, Fact
from shoal.domain.work import JobKind
from shoal.domain.worker import Suspension
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.authentication import is_local
from shoal.gateway.http.request_record import RequestRecord
from shoal.pool.state import PoolState

MODELS_MAX = 200  # models with a label of their own
OTHER = "other"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER_METHOD = "_OTHER"  # OpenTelemetry's value for unknown methods

# As OpenTelemetry proposes them.
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48,
           40.96, 81.92)  # fmt: skip
TOKENS = tuple(4**power for power in range(14))
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
             0.5, 0.75, 1.0, 2.5)  # fmt: skip


class PrometheusMetrics:
    """The metrics of one coordinator."""

    def __init__(self, pool: PoolState, durable: DurableCalls) -> None:
        self.registry = CollectorRegistry()
        self._models: set[str] = set()
        asked = ("gen_ai_operation_name", "gen_ai_request_model")
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request to the end of its answer",
            (*asked, "error_type"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._first_output = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request to the first output of its answer",
            asked,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, of streamed answers",
            asked,
            buckets=PER_TOKEN,
            registry=self.registry,
        )
        self._tokens = Histogram(
            "gen_ai_client_token_usage",
            "Tokens read and written for a request",
            (*asked, "gen_ai_token_type"),
            buckets=TOKENS,
            registry=self.registry,
        )
        self._requests = Histogram(
            "http_server_request_duration_seconds",
            "Time from a request to the end of its answer, by route",
            ("http_request_method", "http_route", "http_response_status_code"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._facts = Counter(
            "shoal_facts",
            "What happened to jobs and workers",
            ("fact",),
            registry=self.registry,
        )
        calls = Counter(
            "shoal_calls",
            "Calls of functions that have ended",
            ("kept",),
            registry=self.registry,
        )
        self._calls = {kept: calls.labels(str(kept).lower()) for kept in (True, False)}
        self._facts_seen: dict[str, Counter] = {}  # cached: labels() is slow
        self.registry.register(_PoolCollector(pool, durable))

    def count_fact(self, fact: Fact) -> None:
        """Count a fact."""
        name = FACT_NAMES[type(fact)]
        if (counter := self._facts_seen.get(name)) is None:
            counter = self._facts_seen[name] = self._facts.labels(name)
        counter.inc()

    def count_calls(self, kept: bool, count: int) -> None:
        """Count ended calls: the durable (``kept``) ones, or the others."""
        self._calls[kept].inc(count)

    def observe_request(
        self,
        request: web.Request,
        record: RequestRecord,
        status: int,
        now: float,
        known: Collection[str],
    ) -> None:
        """Record a request that has ended; ``known`` are the models of the pool."""
        seconds = now - record.started_at
        method = request.method if request.method in METHODS else OTHER_METHOD
        self._requests.labels(method, _route_label(request), status).observe(seconds)
        if record.kind is None:
            return
        asked = (_operation_name(record.kind), self._model(record.model, known))
        self._duration.labels(*asked, record.error).observe(seconds)
        if record.first_output is not None:
            self._first_output.labels(*asked).observe(
                record.first_output - record.started_at
            )
        if record.usage is None:
            return
        read, written = record.usage.prompt_tokens, record.usage.completion_tokens
        self._tokens.labels(*asked, "input").observe(read)
        self._tokens.labels(*asked, "output").observe(written)
        if record.first_output is not None and written > 1:
            each = (now - record.first_output) / (written - 1)
            self._per_token.labels(*asked).observe(each)

    def _model(self, model: str, known: Collection[str]) -> str:
        if model not in self._models:
            if model not in known or len(self._models) >= MODELS_MAX:
                return OTHER
            self._models.add(model)
        return model


METRICS = web.AppKey("metrics", PrometheusMetrics)


class _PoolCollector(Collector):
    """Collects the pool's state at each scrape."""

    def __init__(self, pool: PoolState, calls: DurableCalls) -> None:
        self._pool = pool
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        pool = self._pool
        workers = pool.workers.values()
        busy = sum(worker.used_slots for worker in workers)
        offered = sum(worker.offer.slots for worker in workers)
        draining = sum(bool(worker.draining) for worker in workers)
        serving = sum(worker.accepts_jobs for worker in workers)
        staying = [worker.suspension for worker in workers if not worker.draining]
        pending = staying.count(Suspension.PENDING)
        suspended = len(staying) - staying.count(None) - pending
        yield _gauge(
            "shoal_jobs",
            "Open jobs",
            {"queued": pool.queued, "running": len(pool.jobs) - pool.queued},
        )
        yield _gauge(
            "shoal_workers",
            "Workers that are connected",
            {
                "serving": serving,
                "draining": draining,
                "suspended": suspended,
                "pending": pending,
                "unfit": len(pool.workers) - serving - draining - suspended - pending,
            },
        )
        yield _gauge(
            "shoal_slots",
            "Jobs that workers can take at a time",
            {"busy": busy, "free": max(0, offered - busy)},
        )
        yield GaugeMetricFamily(
            "shoal_models",
            "Models that workers have",
            value=len(pool.roster.models),
        )
        yield GaugeMetricFamily(
            "shoal_durable_calls",
            "Durable calls of functions that have not ended",
            value=self._calls.open_count,
        )


async def show_metrics(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    body = generate_latest(request.app[METRICS].registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _gauge(name: str, text: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family


def _route_label(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return OTHER if resource is None else resource.canonical


async def healthz(gateway: Gateway, request: web.Request) -> web.Response:
    # Workers recognise a Shoal coordinator by ``shoal``, and find the ports of
    # protocols without HTTP in ``direct``.
    health = gateway.hub.store_health
    if health.is_broken:
        return web.json_response(
            {"status": "failed", "reason": str(health.failure)}, status=503
        )
    direct = (
        gateway.admission.ports if _can_reach_ports(gateway.admission, request) else {}
    )
    return web.json_response({"status": "ok", "shoal": __version__, "direct": direct})


def _can_reach_ports(admission: WorkerAdmission, request: web.Request) -> bool:
    """Say whether the client can connect to the other ports: not through a proxy."""
    return not admission.loopback_only or is_local(
        request.remote or "", request.headers
    )


async def readyz(gateway: Gateway, request: web.Request) -> web.Response:
    reason = gateway.hub.unavailable_reason
    if reason is None:
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "not ready", "reason": reason}, status=503)


def _operation_name(kind: JobKind) -> str:
    """Return the value of the label ``operation`` for jobs of a kind."""
    match kind:
        case JobKind.CHAT:
            return "chat"
        case JobKind.COMPLETION:
            return "text_completion"
        case JobKind.EMBEDDING:
            return "embeddings"
        case JobKind.RERANK:
            return "rerank"
        case JobKind.TRANSCRIPTION:
            return "transcription"
        case JobKind.TASK:
            return "task"
        case JobKind.CALL:
            return "call"
        case JobKind.CALL_STREAM:
            return "lane"
