"""Measures how late the event loop is."""

from collections.abc import Iterator

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal.domain.histogram import SECONDS_SHORT, Histogram
from shoal.gateway.metrics.families import histograms
from shoal.transports.clock import Clock, Timer

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
        self._late.observe(max(0.0, self._clock.now() - self._due))
        self.start()

    def collect(self) -> Iterator[Metric]:
        yield histograms(
            "shoal_loop_lag_seconds",
            "By how much a timer of the event loop fires late, once a second",
            (),
            {(): self._late},
        )
