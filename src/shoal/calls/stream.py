"""A call stream: one slot of one worker, held to call a function repeatedly.

A ``StreamLoad`` has the calls in flight on one, and says how many to send ahead.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.coordinator.answer import EndedJob
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.domain.errors import WorkerLost
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Priority, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import (
    CallName,
    CallResult,
    CancelCalls,
    CancelJob,
    PushCalls,
    StreamedCall,
)
from shoal.domain.work import CallStream
from shoal.pool.functions import CALL_TOTAL_SECONDS

if TYPE_CHECKING:
    from shoal.calls.group import CallGroup


NOT_STORED = JobTerms(kept=False)
NOT_STORED_WAITS = JobTerms(kept=False, waits=True)
WORK_AHEAD = 0.005  # seconds of work that a stream should always have
DEPTH_MAX = 512  # calls in flight on a stream at most
DEPTH_FIXED_MAX = 16  # the same, if calls cannot be cancelled
NEWEST = 0.25  # weight of the newest measurement in an average
CLOSED = "closed by its client"
STUCK_AFTER = 0.05  # seconds on one call after which the others move elsewhere


class OpenCallStream:
    """A requested stream; to the pool it is a job that is not stored.

    ``queue`` is the number of seconds that it may wait for a worker.
    """

    def __init__(
        self,
        hub: Hub,
        owner: str,
        stream: CallStream,
        priority: Priority,
        queue: float,
        listener: "CallGroup",
        *,
        waits: bool = False,
    ) -> None:
        """Submit the job.  Raises what ``Hub.submit`` does."""
        limits = TimeLimits(
            queue, CALL_TOTAL_SECONDS, CALL_TOTAL_SECONDS, CALL_TOTAL_SECONDS
        )
        terms = NOT_STORED_WAITS if waits else NOT_STORED
        job = Job(hub.new_id(), stream, limits, owner, priority, terms=terms)
        self.job_id = job.id
        self.connection: WorkerConnection | None = None
        self.worker_id: WorkerId | None = None
        self.lease = LeaseNumber(0)
        self.goes_on = False  # whether its worker has come back with its calls
        self._hub = hub
        self._listener: CallGroup | None = listener
        hub.submit(job, self)

    def push(
        self,
        calls: list[StreamedCall],
        names: list[CallName],
        blobs: Iterable[bytes] = (),
    ) -> bool:
        """Send calls to the worker; return whether it is connected.

        ``names`` are as in ``PushCalls``.
        """
        assert self.connection is not None, "the stream has no worker yet"
        self._hub.blobs.send(self.connection, tuple(blobs))
        return self.connection.send(PushCalls(self.job_id, self.lease, calls, names))

    def cancel_calls(self, numbers: Sequence[int]) -> None:
        """Cancel calls, which then have no result."""
        if self.connection is not None and CancelCalls in self.connection.accepts:
            self.connection.send(CancelCalls(self.job_id, self.lease, tuple(numbers)))

    @property
    def can_cancel(self) -> bool:
        """Whether its worker can cancel a running call."""
        return self.connection is not None and CancelJob in self.connection.accepts

    @property
    def may_continue(self) -> bool:
        """Whether its worker, if it has one, takes new jobs."""
        worker = self._hub.pool.holder_of(self.job_id)
        return worker is None or worker.accepts_jobs

    @property
    def is_away(self) -> bool:
        """Whether its worker was lost, and may come back, or another will have it."""
        return self._hub.pool.holder_of(self.job_id) is None

    @property
    def losses(self) -> int:
        """How many workers it was lost with, which have not come back."""
        return self._hub.pool.jobs[self.job_id].lost

    def close(self, *, idle: bool) -> None:
        """Give the slot back; the listener receives no more events.

        A stream that is not ``idle`` is cancelled.
        """
        self._listener = None
        waits = self._hub.pool.holder_of(self.job_id) is None
        if self.connection is None or waits or not idle:
            self._hub.cancel(self.job_id, CLOSED)
            return
        # Every protocol with streams can end one; a worker that cannot cancel confirms
        # the end after its last call.
        self.connection.send(CancelJob(self.job_id, self.lease))
        if self.can_cancel:
            self._hub.end_call_stream(self.job_id)

    # Events from the hub.

    def on_accepted(self, job_id: JobId) -> None:
        pass

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        self.lease, self.worker_id, self.connection = lease, worker_id, peer
        self.goes_on = self._hub.pool.jobs[job_id].run_since < lease
        if self._listener is not None:
            self._listener.on_open(self)
        else:  # it was closed in the moment in which its worker was lost
            self._hub.cancel(job_id, CLOSED)

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def on_results(self, results: list[CallResult]) -> None:
        if self._listener is not None:
            self._listener.on_results(self, results)

    def runs(self, number: int) -> bool:
        return self._listener is not None and self._listener.runs(self, number)

    def on_end(self, job: EndedJob) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        end = job.end
        if end is None or isinstance(end, Outcome):
            end = WorkerLost("the worker ended the call stream")
        listener.on_end(self, end)


@dataclass(slots=True)
class PendingCall:
    """A call without a result; ``attempts`` counts the streams that it was lost with.

    ``name`` is that of a stored call.  ``stream_id`` is the stream's job, None while it
    waits; ``due`` is its timeout, and ``wait_until`` when it has waited too long.
    """

    call: StreamedCall
    blobs: tuple[bytes, ...] = ()
    name: CallName | None = None
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
    losses: int = 0  # of the stream, as far as they are counted
    closing: bool = False  # whether it accepts no more calls
    _seconds: float | None = None  # per call
    _trip: float | None = None

    @property
    def capacity(self) -> int:
        """How many more calls it should get."""
        if self.closing or any(map(self.runs_alone, self.in_flight.values())):
            return 0
        if self.stream.is_away:
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
        self._send(calls, {digest: None for each in calls for digest in each.blobs})

    def _send(self, calls: list[PendingCall], blobs: Iterable[bytes] = ()) -> None:
        names = [each.name for each in calls if each.name is not None]
        self.stream.push([each.call for each in calls], names, blobs)

    def resend(self, calls: list[PendingCall], now: float) -> None:
        """Send these calls, and forget the others: another worker has the stream."""
        self.active_at = now
        self.in_flight = {}
        if calls:
            self.push(calls, now)

    def repeat(self, calls: list[PendingCall], now: float) -> None:
        """Tell the worker, which has come back, which calls are wanted.

        It has most of them, and asks for values that it lacks.
        """
        self.active_at = now
        self.in_flight = {each.call.number: each for each in calls}
        self._send(calls)

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
            or self.stream.is_away
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
