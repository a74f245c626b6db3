"""A lane: one slot of one worker, held in order to call a function again and again."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from shoal.domain.errors import ShoalError, WorkerLost
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import (
    CancelJob,
    LaneCall,
    LaneReturn,
    PushCalls,
    RecallCalls,
)
from shoal.domain.work import Job, Lane, Limits, Priority, Terms
from shoal.runtime.asker import Ended
from shoal.runtime.call_limits import TOTAL
from shoal.runtime.hub import Hub
from shoal.runtime.peers import Peer

UNKEPT = Terms(kept=False)


class Holder(Protocol):
    """Whoever opened a lane."""

    def opened(self, lane: "OpenLane") -> None:
        """Take note that a worker has it: calls may be pushed."""
        ...

    def returned(self, lane: "OpenLane", returns: list[LaneReturn]) -> None:
        """Take what came of calls."""
        ...

    def over(self, lane: "OpenLane", error: ShoalError) -> None:
        """Take note that it ended otherwise than by ``close``.

        What did not return then was perhaps called, and perhaps not.
        """
        ...


class OpenLane:
    """A lane that was asked for; the pool knows it as a job that is not stored.

    ``queue`` is for how many seconds it may wait for a worker.
    """

    def __init__(
        self,
        hub: Hub,
        owner: str,
        lane: Lane,
        priority: Priority,
        queue: float,
        holder: Holder,
    ) -> None:
        """Ask for it.  Raises what ``Hub.place`` does."""
        limits = Limits(queue, TOTAL, TOTAL, TOTAL)
        job = Job(hub.new_id(), lane, limits, owner, priority, terms=UNKEPT)
        self.job_id = job.id
        self.peer: Peer | None = None
        self.lease = LeaseNumber(0)
        self._hub = hub
        self._holder: Holder | None = holder
        hub.place(job, self)

    def push(self, calls: list[LaneCall], blobs: Iterable[bytes] = ()) -> bool:
        """Have these called; say whether the worker was there to hear it."""
        assert self.peer is not None, "nobody has the lane yet"
        self._hub.blobs.give(self.peer, tuple(blobs))
        return self.peer.issue(PushCalls(self.job_id, self.lease, calls))

    def recall(self, numbers: Sequence[int]) -> None:
        """Have these calls not made, or stopped: nothing returns of them."""
        if self.peer is not None and RecallCalls in self.peer.accepts:
            self.peer.issue(RecallCalls(self.job_id, self.lease, tuple(numbers)))

    @property
    def stops(self) -> bool:
        """Whether its worker stops in the middle of a call if it is told to."""
        return self.peer is not None and CancelJob in self.peer.accepts

    def close(self, *, idle: bool) -> None:
        """Give the slot back; nothing is heard of the lane any more.

        One that is not ``idle`` is stopped, as a job that nobody wants.
        """
        self._holder = None
        if self.peer is None or not idle:
            self._hub.withdraw(self.job_id, "its holder wants no more of it")
            return
        # Any wire with lanes can be told that one is over; where nothing can be
        # stopped, it says so when nothing is being called there any more.
        self.peer.issue(CancelJob(self.job_id, self.lease))
        if self.stops:
            self._hub.end_lane(self.job_id)

    # The hub's side.

    def accepted(self, job_id: JobId) -> None:
        pass

    def leased(self, job_id: JobId, lease: LeaseNumber, peer: Peer) -> None:
        self.lease, self.peer = lease, peer
        if self._holder is not None:
            self._holder.opened(self)

    def advanced(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def returned(self, returns: list[LaneReturn]) -> None:
        if self._holder is not None:
            self._holder.returned(self, returns)

    def ended(self, job: Ended) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        end = job.end
        if end is None or isinstance(end, Outcome):
            end = WorkerLost("the worker ended the lane")
        holder.over(self, end)
