"""Rate-limits workers' load reports."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.domain.ids import WorkerId
from shoal.domain.worker import WorkerLoad
from shoal.pool.inputs import LoadReported
from shoal.transports.clock import Clock, Timer

REPORT_INTERVAL = 0.25  # seconds from one change of a worker's condition to the next
SPEED_MIN = 0.01  # of full speed; a worker that is slower is hardly there
QUEUED_MAX = 10_000  # jobs of others that a worker is believed to have
UNFIT_MAX = 200  # characters of why a worker should get nothing


@dataclass(slots=True)
class _Report:
    """What a worker said last, and from when on it is heard again."""

    heard_from: float
    load: WorkerLoad
    timer: Timer | None = None


class LoadReports:
    """Passes a change on at once, and what comes too soon after it a little later.

    So a worker that changes its mind a thousand times a second does not keep everybody
    else from their work, and what it says last counts all the same.
    """

    def __init__(self, clock: Clock, post: Callable[[LoadReported], None]) -> None:
        self._clock = clock
        self._post = post
        self._said: dict[WorkerId, _Report] = {}

    def submit(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Take what a worker says."""
        load, now = _bounded(load), self._clock.now()
        said = self._said.get(worker_id)
        if said is None:
            said = self._said[worker_id] = _Report(now, load)
        said.load = load
        if now >= said.heard_from:
            self._pass_on(worker_id, said)
        elif said.timer is None:
            said.timer = self._clock.call_at(
                said.heard_from, lambda: self._pass_on(worker_id, said)
            )

    def forget(self, worker_id: WorkerId) -> None:
        """Forget what a worker said: it has gone."""
        said = self._said.pop(worker_id, None)
        if said is not None and said.timer is not None:
            said.timer.cancel()

    def _pass_on(self, worker_id: WorkerId, said: _Report) -> None:
        if said.timer is not None:
            said.timer.cancel()
            said.timer = None
        said.heard_from = self._clock.now() + REPORT_INTERVAL
        self._post(LoadReported(worker_id, said.load))


def _bounded(condition: WorkerLoad) -> WorkerLoad:
    """Return a condition that can be reckoned with, whatever its worker said."""
    speed = condition.speed if math.isfinite(condition.speed) else 1.0
    return replace(
        condition,
        unfit=condition.unfit[:UNFIT_MAX],
        queued=min(max(condition.queued, 0), QUEUED_MAX),
        speed=min(max(speed, SPEED_MIN), 1.0),
    )
