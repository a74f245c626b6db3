"""Monitoring endpoints: ``/metrics`` for Prometheus, and the probes."""

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from shoal import __version__
from shoal.coordinator.admission import WorkerAdmission
from shoal.domain.credentials import Scope
from shoal.domain.errors import NotReady
from shoal.domain.histogram import SECONDS_SHORT, Histogram, observe
from shoal.gateway.context import Gateway, HealthGateway
from shoal.gateway.http.authentication import is_local
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import TEXT_TYPE
from shoal.gateway.metrics.families import exposition, histograms
from shoal.gateway.metrics.jobs import JobMetrics
from shoal.gateway.metrics.pool import PoolMetrics
from shoal.gateway.metrics.requests import ModelLabels, RequestMetrics, WorkerLabels
from shoal.protocols.seam.endpoints import ListenerTls
from shoal.transports.clock import Clock, Timer

api = Operations()


class PrometheusMetrics:
    """The metrics of one coordinator."""

    def __init__(self, gateway: Gateway) -> None:
        models, workers = ModelLabels(), WorkerLabels()
        pool, clock = gateway.hub.pool, gateway.clock
        known = pool.roster.with_model
        self.requests = RequestMetrics(lambda model: models.label(model, known))
        self.jobs = JobMetrics(pool, clock.now, models, workers)
        self.loop_lag = LoopLag(clock)
        self.registry = CollectorRegistry()
        self.registry.register(self.requests)
        self.registry.register(self.jobs)
        self.registry.register(PoolMetrics(gateway, workers, self.jobs))
        self.registry.register(self.loop_lag)
        ProcessCollector(registry=self.registry)  # Linux only; nothing elsewhere


METRICS = web.AppKey("metrics", PrometheusMetrics)


@api.get("/metrics", "Metrics for Prometheus", Scope.MONITOR, media=TEXT_TYPE)
async def show_metrics(request: web.Request) -> web.Response:
    body = await exposition(request.app[METRICS].registry.collect())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


UNNAMED = frozenset(each.value for each in ListenerTls)


@api.get("/healthz", "Check that the coordinator is running")
async def healthz(gateway: HealthGateway, request: web.Request) -> web.Response:
    # Workers recognise a Shoal coordinator by ``shoal``, and find in ``direct`` the
    # ports of wires that name them: only there do Shoal's workers join by a port.
    health = gateway.hub.store_health
    if health.is_broken:
        return web.json_response(
            {"status": "failed", "reason": str(health.failure)}, status=503
        )
    direct = {}
    if _can_reach_ports(gateway.admission, request):
        direct = {
            wire: ports
            for wire, ports in gateway.admission.ports.items()
            if not ports.keys() <= UNNAMED
        }
    return web.json_response({"status": "ok", "shoal": __version__, "direct": direct})


def _can_reach_ports(admission: WorkerAdmission, request: web.Request) -> bool:
    """Say whether the client can connect to the other ports: not through a proxy."""
    return not admission.loopback_only or is_local(
        request.remote or "", request.headers
    )


@api.get("/health", "Check whether a model can answer")
async def health(gateway: HealthGateway) -> web.Response:
    """Say whether a model can answer, in the form of llama-server.

    vLLM and SGLang have the same path, and clients ask for it before they begin.

    Raises NotReady if none can.
    """
    reason = gateway.hub.unavailable_reason
    roster = gateway.hub.pool.roster
    if reason is None and not (roster.models or roster.loadable):
        reason = "no worker offers a model yet"
    if reason is not None:
        raise NotReady(reason)
    return web.json_response({"status": "ok"})


@api.get("/readyz", "Check whether it accepts jobs")
async def readyz(gateway: HealthGateway) -> web.Response:
    reason = gateway.hub.unavailable_reason
    if reason is None:
        degraded = gateway.hub.degraded_reason
        if degraded is not None:
            return web.json_response({"status": "degraded", "reason": degraded})
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "not ready", "reason": reason}, status=503)


INTERVAL = 1.0  # seconds between measurements


class LoopLag(Collector):
    """Sets a timer each second, and counts by how much it fires late.

    A loop that is late answers every client late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late = Histogram(SECONDS_SHORT)
        self._timer: Timer | None = None
        self._due = 0.0

    def start(self) -> None:
        """Measure until ``stop``."""
        self._due = self._clock.now() + INTERVAL
        self._timer = self._clock.call_at(self._due, self._tick)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    async def on_startup(self, app: web.Application) -> None:
        """Start with an application."""
        self.start()

    async def on_cleanup(self, app: web.Application) -> None:
        """Stop with an application."""
        self.stop()

    def _tick(self) -> None:
        observe((self._late, max(0.0, self._clock.now() - self._due)))
        self.start()

    def collect(self) -> Iterator[Metric]:
        yield histograms(
            "shoal_loop_lag_seconds",
            "Delay of a timer of the event loop, measured once a second",
            (),
            {(): self._late},
        )
