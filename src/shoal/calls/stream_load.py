"""The calls in flight on one stream, and how many more it should be sent ahead."""

import math
from dataclasses import dataclass, field

from shoal.calls.stream import OpenCallStream
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import StreamedCall

WORK_AHEAD = 0.005  # seconds of work that a lane should always have
DEPTH_MAX = 512  # calls that a lane is given ahead at the most
DEPTH_FIXED_MAX = 16  # the same, where they cannot be taken back again
NEWEST = 0.25  # the share that the newest measurement has in an average
STUCK_AFTER = 0.05  # seconds on one call, from which on the others should not wait


@dataclass(slots=True)
class PendingCall:
    """A call that has not returned; ``attempts`` counts the lanes that it was lost in.

    ``lane`` is who has it; None: it waits.  ``due`` is when it is waited for no more.
    """

    call: StreamedCall
    blobs: tuple[bytes, ...] = ()
    attempts: int = 0
    stream_id: JobId | None = None
    due: float = math.inf


@dataclass(slots=True)
class StreamLoad:
    """A lane and the calls that it was given, in their order.

    How long a call takes is measured from one return to the next, and so with its share
    of the way there and back.  ``trip`` is the shortest time from giving one to an idle
    lane to its return: with as much work ahead, a lane far away is never idle.
    """

    stream: OpenCallStream
    opened_at: float
    call_timeout: float  # seconds that one call may take
    in_flight: dict[int, PendingCall] = field(default_factory=dict)
    depth: int = 1
    active_at: float = 0.0  # when it was given something while idle, or returned last
    closing: bool = False  # whether it is given nothing more
    _seconds: float | None = None  # that a call takes
    _trip: float | None = None

    @property
    def capacity(self) -> int:
        """How many more calls it should be given."""
        return 0 if self.closing else self.depth - len(self.in_flight)

    def push(self, calls: list[PendingCall], now: float) -> None:
        """Have these called after the others."""
        if not self.in_flight:
            self.active_at = now
        for each in calls:
            self.in_flight[each.call.number] = each
            each.stream_id = self.stream.job_id
            # Perhaps they are made one after the other.
            each.due = now + self.call_timeout * len(self.in_flight)
        blobs = {digest: None for each in calls for digest in each.blobs}
        self.stream.push([each.call for each in calls], blobs)

    def resend(self, now: float) -> None:
        """Have all called anew: another worker has the lane."""
        self.active_at = now
        if self.in_flight:
            again, self.in_flight = [*self.in_flight.values()], {}
            self.push(again, now)

    def measure(self, returns: int, now: float) -> None:
        """Learn from that many calls which returned, and decide how much is ahead."""
        seconds = (now - self.active_at) / returns
        self.active_at = now
        if self._trip is None or seconds < self._trip:
            self._trip = seconds
        before = self._seconds
        average = seconds if before is None else before + NEWEST * (seconds - before)
        self._seconds = max(average, 1e-6)
        most = DEPTH_MAX if self.stream.can_cancel else DEPTH_FIXED_MAX
        ahead = int((WORK_AHEAD + self._trip) / self._seconds)
        self.depth = max(1, min(most, ahead))

    @property
    def due(self) -> float:
        """When the call is waited for no more that was given first."""
        return next((each.due for each in self.in_flight.values()), math.inf)

    def take_back_stuck(self, now: float) -> list[PendingCall]:
        """Take back what waits behind a call that takes long; return it."""
        if (
            len(self.in_flight) < 2
            or now - self.active_at < STUCK_AFTER
            or not self.stream.can_cancel
        ):
            return []
        first, *behind = self.in_flight.values()
        self.in_flight = {first.call.number: first}
        self.depth = 1
        self._seconds = now - self.active_at
        self.stream.cancel_calls([each.call.number for each in behind])
        for each in behind:
            each.stream_id = None
        return behind

    def take_unfinished(self) -> list[PendingCall]:
        """Return what did not return; what may have been run counts as tried."""
        calls = [*self.in_flight.values()]
        # One call after the other: only the first can be what brought the worker down.
        tried = calls[:1] if self.stream.can_cancel else calls
        for each in tried:
            each.attempts += 1
        for each in calls:
            each.stream_id = None
        self.in_flight = {}
        return calls
