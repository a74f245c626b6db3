"""Rate-limits workers' load reports."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.domain.ids import WorkerId
from shoal.domain.worker import THROTTLE_MAX, WorkerLoad
from shoal.pool.inputs import LoadReported
from shoal.transports.clock import Clock, Timer

REPORT_INTERVAL = 0.25  # seconds between reports of one worker
SPEED_MIN = 0.01  # of full speed
QUEUED_MAX = 10_000  # jobs of other pools that a worker may report
LENT_MAX = 1024  # slots that tasks of a worker lend
UNFIT_MAX = 200  # characters of the reason why a worker gets no jobs


@dataclass(slots=True)
class _Report:
    """A worker's last report, and when the next one may be passed on."""

    pass_on_from: float
    load: WorkerLoad
    timer: Timer | None = None


class LoadReports:
    """Passes a report on at once, and the latest of those that follow soon after later.

    A worker that reports a thousand times a second does not slow the hub down, and its
    last report still counts.
    """

    def __init__(self, clock: Clock, post: Callable[[LoadReported], None]) -> None:
        self._clock = clock
        self._post = post
        self._reports: dict[WorkerId, _Report] = {}

    def submit(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Accept a report."""
        load, now = _bounded(load), self._clock.now()
        report = self._reports.get(worker_id)
        if report is None:
            report = self._reports[worker_id] = _Report(now, load)
        report.load = load
        if now >= report.pass_on_from:
            self._pass_on(worker_id, report)
        elif report.timer is None:
            report.timer = self._clock.call_at(
                report.pass_on_from, lambda: self._pass_on(worker_id, report)
            )

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker that disconnected."""
        report = self._reports.pop(worker_id, None)
        if report is not None and report.timer is not None:
            report.timer.cancel()

    def _pass_on(self, worker_id: WorkerId, report: _Report) -> None:
        if report.timer is not None:
            report.timer.cancel()
            report.timer = None
        report.pass_on_from = self._clock.now() + REPORT_INTERVAL
        self._post(LoadReported(worker_id, report.load))


def _bounded(load: WorkerLoad) -> WorkerLoad:
    """Return the load within limits, whatever the worker reported."""
    speed = load.speed if math.isfinite(load.speed) else 1.0
    return replace(
        load,
        unfit=load.unfit[:UNFIT_MAX],
        queued=min(max(load.queued, 0), QUEUED_MAX),
        speed=min(max(speed, SPEED_MIN), 1.0),
        lent=min(max(load.lent, 0), LENT_MAX),
        throttle=min(max(load.throttle, 0), THROTTLE_MAX),
    )
