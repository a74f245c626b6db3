"""A call stream: one slot of one worker, held to call a function repeatedly."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.coordinator.answer import EndedJob
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.domain.errors import WorkerLost
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Priority, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import (
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
        self._hub = hub
        self._listener: CallGroup | None = listener
        hub.submit(job, self)

    def push(self, calls: list[StreamedCall], blobs: Iterable[bytes] = ()) -> bool:
        """Send calls to the worker; return whether it is connected."""
        assert self.connection is not None, "the stream has no worker yet"
        self._hub.blobs.send(self.connection, tuple(blobs))
        return self.connection.send(PushCalls(self.job_id, self.lease, calls))

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

    def close(self, *, idle: bool) -> None:
        """Give the slot back; the listener receives no more events.

        A stream that is not ``idle`` is cancelled.
        """
        self._listener = None
        waits = self._hub.pool.holder_of(self.job_id) is None
        if self.connection is None or waits or not idle:
            self._hub.cancel(self.job_id, "closed by its client")
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
        if self._listener is not None:
            self._listener.on_open(self)

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
