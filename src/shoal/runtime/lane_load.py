"""What one lane has to do, and how much more it should be given ahead of time."""

import math
from dataclasses import dataclass, field

from shoal.domain.ids import JobId
from shoal.domain.vocabulary import LaneCall
from shoal.runtime.lanes import OpenLane

WORK_AHEAD = 0.005  # seconds of work that a lane should always have
DEPTH_MAX = 512  # calls that a lane is given ahead at the most
DEPTH_KEPT = 16  # the same, where they cannot be taken back again
NEWEST = 0.25  # the share that the newest measurement has in an average
STUCK_AFTER = 0.05  # seconds on one call, from which on the others should not wait


@dataclass(slots=True)
class Pending:
    """A call that has not returned; ``attempts`` counts the lanes that it was lost in.

    ``lane`` is who has it; None: it waits.  ``due`` is when it is waited for no more.
    """

    call: LaneCall
    blobs: tuple[bytes, ...] = ()
    attempts: int = 0
    lane: JobId | None = None
    due: float = math.inf


@dataclass(slots=True)
class LaneLoad:
    """A lane and the calls that it was given, in their order.

    How long a call takes is measured from one return to the next, and so with its share
    of the way there and back.  ``trip`` is the shortest time from giving one to an idle
    lane to its return: with as much work ahead, a lane far away is never idle.
    """

    lane: OpenLane
    opened_at: float
    patience: float  # seconds that one call may take
    given: dict[int, Pending] = field(default_factory=dict)
    depth: int = 1
    active_at: float = 0.0  # when it was given something while idle, or returned last
    closing: bool = False  # whether it is given nothing more
    _seconds: float | None = None  # that a call takes
    _trip: float | None = None

    @property
    def room(self) -> int:
        """How many more calls it should be given."""
        return 0 if self.closing else self.depth - len(self.given)

    def give(self, calls: list[Pending], now: float) -> None:
        """Have these called after the others."""
        if not self.given:
            self.active_at = now
        for each in calls:
            self.given[each.call.number] = each
            each.lane = self.lane.job_id
            # Perhaps they are made one after the other.
            each.due = now + self.patience * len(self.given)
        blobs = {digest: None for each in calls for digest in each.blobs}
        self.lane.push([each.call for each in calls], blobs)

    def give_again(self, now: float) -> None:
        """Have all called anew: another worker has the lane."""
        self.active_at = now
        if self.given:
            again, self.given = [*self.given.values()], {}
            self.give(again, now)

    def measure(self, returns: int, now: float) -> None:
        """Learn from that many calls which returned, and decide how much is ahead."""
        seconds = (now - self.active_at) / returns
        self.active_at = now
        if self._trip is None or seconds < self._trip:
            self._trip = seconds
        before = self._seconds
        average = seconds if before is None else before + NEWEST * (seconds - before)
        self._seconds = max(average, 1e-6)
        most = DEPTH_MAX if self.lane.stops else DEPTH_KEPT
        ahead = int((WORK_AHEAD + self._trip) / self._seconds)
        self.depth = max(1, min(most, ahead))

    @property
    def due(self) -> float:
        """When the call is waited for no more that was given first."""
        return next((each.due for each in self.given.values()), math.inf)

    def stuck(self, now: float) -> list[Pending]:
        """Take back what waits behind a call that takes long; return it."""
        if (
            len(self.given) < 2
            or now - self.active_at < STUCK_AFTER
            or not self.lane.stops
        ):
            return []
        first, *behind = self.given.values()
        self.given = {first.call.number: first}
        self.depth = 1
        self._seconds = now - self.active_at
        self.lane.recall([each.call.number for each in behind])
        for each in behind:
            each.lane = None
        return behind

    def lost(self) -> list[Pending]:
        """Return what did not return; what may have been run counts as tried."""
        calls = [*self.given.values()]
        # One call after the other: only the first can be what brought the worker down.
        tried = calls[:1] if self.lane.stops else calls
        for each in tried:
            each.attempts += 1
        for each in calls:
            each.lane = None
        self.given = {}
        return calls
