"""A call stream: one slot of one worker, held to call a function repeatedly."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.coordinator.job_listener import EndedJob
from shoal.domain.errors import ShoalError, WorkerLost
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import (
    CallResult,
    CancelCalls,
    CancelJob,
    PushCalls,
    StreamedCall,
)
from shoal.domain.work import CallStream, Job, JobTerms, Priority, TimeLimits
from shoal.pool.functions import CALL_TOTAL_SECONDS

NOT_STORED = JobTerms(kept=False)


class StreamListener(Protocol):
    """Whoever opened a lane."""

    def on_open(self, lane: "OpenCallStream") -> None:
        """Take note that a worker has it: calls may be pushed."""
        ...

    def on_results(self, lane: "OpenCallStream", returns: list[CallResult]) -> None:
        """Take what came of calls."""
        ...

    def on_end(self, lane: "OpenCallStream", error: ShoalError) -> None:
        """Take note that it ended otherwise than by ``close``.

        What did not return then was perhaps called, and perhaps not.
        """
        ...


class OpenCallStream:
    """A lane that was asked for; the pool knows it as a job that is not stored.

    ``queue`` is for how many seconds it may wait for a worker.
    """

    def __init__(
        self,
        hub: Hub,
        owner: str,
        lane: CallStream,
        priority: Priority,
        queue: float,
        holder: StreamListener,
    ) -> None:
        """Ask for it.  Raises what ``Hub.submit`` does."""
        limits = TimeLimits(
            queue, CALL_TOTAL_SECONDS, CALL_TOTAL_SECONDS, CALL_TOTAL_SECONDS
        )
        job = Job(hub.new_id(), lane, limits, owner, priority, terms=NOT_STORED)
        self.job_id = job.id
        self.connection: WorkerConnection | None = None
        self.lease = LeaseNumber(0)
        self._hub = hub
        self._listener: StreamListener | None = holder
        hub.submit(job, self)

    def push(self, calls: list[StreamedCall], blobs: Iterable[bytes] = ()) -> bool:
        """Have these called; say whether the worker was there to hear it."""
        assert self.connection is not None, "nobody has the lane yet"
        self._hub.blobs.send(self.connection, tuple(blobs))
        return self.connection.send(PushCalls(self.job_id, self.lease, calls))

    def cancel_calls(self, numbers: Sequence[int]) -> None:
        """Have these calls not made, or stopped: nothing returns of them."""
        if self.connection is not None and CancelCalls in self.connection.accepts:
            self.connection.send(CancelCalls(self.job_id, self.lease, tuple(numbers)))

    @property
    def can_cancel(self) -> bool:
        """Whether its worker stops in the middle of a call if it is told to."""
        return self.connection is not None and CancelJob in self.connection.accepts

    def close(self, *, idle: bool) -> None:
        """Give the slot back; nothing is heard of the lane any more.

        One that is not ``idle`` is stopped, as a job that nobody wants.
        """
        self._listener = None
        if self.connection is None or not idle:
            self._hub.cancel(self.job_id, "its holder wants no more of it")
            return
        # Any wire with lanes can be told that one is over; where nothing can be
        # stopped, it says so when nothing is being called there any more.
        self.connection.send(CancelJob(self.job_id, self.lease))
        if self.can_cancel:
            self._hub.end_call_stream(self.job_id)

    # The hub's side.

    def on_accepted(self, job_id: JobId) -> None:
        pass

    def on_leased(
        self, job_id: JobId, lease: LeaseNumber, peer: WorkerConnection
    ) -> None:
        self.lease, self.connection = lease, peer
        if self._listener is not None:
            self._listener.on_open(self)

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def on_results(self, results: list[CallResult]) -> None:
        if self._listener is not None:
            self._listener.on_results(self, results)

    def on_end(self, job: EndedJob) -> None:
        holder, self._listener = self._listener, None
        if holder is None:
            return
        end = job.end
        if end is None or isinstance(end, Outcome):
            end = WorkerLost("the worker ended the lane")
        holder.on_end(self, end)
