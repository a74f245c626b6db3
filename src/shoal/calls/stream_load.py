"""The calls in flight on one stream, and how many to send ahead."""

import math
from dataclasses import dataclass, field

from shoal.calls.stream import OpenCallStream
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import StreamedCall

WORK_AHEAD = 0.005  # seconds of work that a stream should always have
DEPTH_MAX = 512  # calls in flight on a stream at most
DEPTH_FIXED_MAX = 16  # the same, if calls cannot be cancelled
NEWEST = 0.25  # weight of the newest measurement in an average
STUCK_AFTER = 0.05  # seconds on one call after which the others move elsewhere


@dataclass(slots=True)
class PendingCall:
    """A call without a result; ``attempts`` counts the streams that it was lost with.

    ``stream_id`` is the stream's job, None while it waits; ``due`` is its timeout, and
    ``wait_until`` when it has waited too long.
    """

    call: StreamedCall
    blobs: tuple[bytes, ...] = ()
    wait_until: float = math.inf
    attempts: int = 0
    stream_id: JobId | None = None
    due: float = math.inf


@dataclass(slots=True)
class StreamLoad:
    """A stream and its calls in flight, in order.

    A call's duration is measured from one result to the next, and so includes a share
    of the round trip.  ``_trip`` is the shortest time from a call on an idle stream to
    its result: with that much work ahead, a distant worker is never idle.
    """

    stream: OpenCallStream
    opened_at: float
    call_timeout: float  # seconds that one call may take
    in_flight: dict[int, PendingCall] = field(default_factory=dict)
    depth: int = 1
    active_at: float = 0.0  # time of the last result, or of a call while idle
    closing: bool = False  # whether it accepts no more calls
    _seconds: float | None = None  # per call
    _trip: float | None = None

    @property
    def capacity(self) -> int:
        """How many more calls it should get."""
        if self.closing or any(map(self.runs_alone, self.in_flight.values())):
            return 0
        return self.depth - len(self.in_flight)

    def runs_alone(self, call: PendingCall) -> bool:
        """Say whether a call must not share the stream.

        If a worker cannot cancel, every call in flight is blamed for its loss, so one
        that was blamed before would take the others with it.
        """
        return call.attempts > 0 and not self.stream.can_cancel

    def push(self, calls: list[PendingCall], now: float) -> None:
        """Send calls, to run after the others."""
        if not self.in_flight:
            self.active_at = now
        for each in calls:
            self.in_flight[each.call.number] = each
            each.stream_id = self.stream.job_id
            # The worker may run them one after the other.
            each.due = now + self.call_timeout * len(self.in_flight)
        blobs = {digest: None for each in calls for digest in each.blobs}
        self.stream.push([each.call for each in calls], blobs)

    def resend(self, calls: list[PendingCall], now: float) -> None:
        """Send these calls, and forget the others: another worker has the stream."""
        self.active_at = now
        self.in_flight = {}
        if calls:
            self.push(calls, now)

    def measure(self, returns: int, now: float) -> None:
        """Update the averages after ``returns`` results, and choose the depth."""
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
        """When the oldest call times out."""
        return next((each.due for each in self.in_flight.values()), math.inf)

    def take_back_stuck(self, now: float) -> list[PendingCall]:
        """Cancel and return the calls behind one that takes long."""
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
        """Return the unfinished calls; count an attempt for those that may have run."""
        calls = [*self.in_flight.values()]
        # Calls run one after the other: only the first can have crashed the worker.
        tried = calls[:1] if self.stream.can_cancel else calls
        for each in tried:
            each.attempts += 1
        for each in calls:
            each.stream_id = None
        self.in_flight = {}
        return calls
