"""What workers say of how much they can take, as often as is good for the pool."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.domain.ids import WorkerId
from shoal.domain.worker import Condition
from shoal.pool.stimuli import Altered
from shoal.runtime.clock import Clock, Timer

ALTERED_EVERY = 0.25  # seconds from one change of a worker's condition to the next
SPEED_MIN = 0.01  # of full speed; a worker that is slower is hardly there
QUEUED_MAX = 10_000  # jobs of others that a worker is believed to have
UNFIT_MAX = 200  # characters of why a worker should get nothing


@dataclass(slots=True)
class _Said:
    """What a worker said last, and from when on it is heard again."""

    heard_from: float
    condition: Condition
    timer: Timer | None = None


class Conditions:
    """Passes a change on at once, and what comes too soon after it a little later.

    So a worker that changes its mind a thousand times a second does not keep everybody
    else from their work, and what it says last counts all the same.
    """

    def __init__(self, clock: Clock, post: Callable[[Altered], None]) -> None:
        self._clock = clock
        self._post = post
        self._said: dict[WorkerId, _Said] = {}

    def heard(self, worker_id: WorkerId, condition: Condition) -> None:
        """Take what a worker says."""
        condition, now = _sound(condition), self._clock.now()
        said = self._said.get(worker_id)
        if said is None:
            said = self._said[worker_id] = _Said(now, condition)
        said.condition = condition
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

    def _pass_on(self, worker_id: WorkerId, said: _Said) -> None:
        if said.timer is not None:
            said.timer.cancel()
            said.timer = None
        said.heard_from = self._clock.now() + ALTERED_EVERY
        self._post(Altered(worker_id, said.condition))


def _sound(condition: Condition) -> Condition:
    """Return a condition that can be reckoned with, whatever its worker said."""
    speed = condition.speed if math.isfinite(condition.speed) else 1.0
    return replace(
        condition,
        unfit=condition.unfit[:UNFIT_MAX],
        queued=min(max(condition.queued, 0), QUEUED_MAX),
        speed=min(max(speed, SPEED_MIN), 1.0),
    )
