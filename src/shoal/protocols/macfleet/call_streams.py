"""Lanes at a peer: slots in which it calls one function of ours again and again.

One of ours gives a lane a stream of its own, with many calls to a frame.  To others
each call is a task like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Event,
    PushCalls,
    Rejected,
    RunJob,
    StreamedCall,
)
from shoal.domain.work import CallStream
from shoal.protocols.macfleet.codec import control
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import Frame, FrameType
from shoal.protocols.macfleet.codec.reserved_frames import may_reference_blob
from shoal.protocols.macfleet.codec.task_extension import (
    CALLS_MAX,
    decode_returns,
    encode_calls,
)
from shoal.protocols.macfleet.codec.tasks import TaskResult, encode_task
from shoal.protocols.macfleet.function_probe import is_unknown_function
from shoal.protocols.macfleet.local_node import FleetPeer
from shoal.protocols.macfleet.outbound_jobs import FleetTaskIds, failure, refusal
from shoal.protocols.seam.session import Bulk, Output


@dataclass(slots=True)
class _OpenCallStream:
    """A lane that the peer has; ``in_order`` is as with tasks.

    ``task_id`` is what its end is told by, and ``calls`` are the ids of those tasks
    that are calls in it, by their numbers; of those that were ``recalled``, nothing is
    said.  One that is ``closing`` is over with the last of them.
    """

    job_id: JobId
    lease: LeaseNumber
    work: CallStream
    task_id: str = ""
    stream_id: int = 0
    in_order: bool = False
    calls: dict[int, str] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)
    closing: bool = False


class ShoalCallStreams:
    """Lanes at one of ours."""

    def __init__(
        self, peer: FleetPeer, task_ids: FleetTaskIds, writer: FrameWriter
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._by_lease: dict[tuple[JobId, LeaseNumber], _OpenCallStream] = {}
        self._by_stream_id: dict[int, _OpenCallStream] = {}
        self._by_task_id: dict[str, _OpenCallStream] = {}

    def open(self, job: RunJob, work: CallStream) -> Output | Rejected:
        """Return how the peer is asked for a lane, or why it is not."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        task_id, stream = self._task_ids.next(), self._writer.new_stream()
        lane = _OpenCallStream(job.job_id, job.lease, work, task_id, stream)
        self._by_lease[lane.job_id, lane.lease] = lane
        self._by_stream_id[stream] = self._by_task_id[task_id] = lane
        needs = frozenset(each.value for each in work.needs)
        opening = control.OpenCallStreamMessage(
            task_id, stream, work.name, work.timeout, needs
        )
        return self._writer.write(FrameType.CONTROL, control.encode_control(opening))

    def push(self, command: PushCalls) -> Iterator[Output | Event]:
        """Return how calls go to the peer."""
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is None:
            return
        for at in range(0, len(command.calls), CALLS_MAX):
            payload = encode_calls(command.calls[at : at + CALLS_MAX])
            said = self._writer.write(
                FrameType.TASK,
                payload,
                lane.stream_id,
                in_order=may_reference_blob(payload),
            )
            lane.in_order = lane.in_order or isinstance(said, Bulk)
            yield said

    def recall(self, command: CancelCalls) -> Sequence[Output]:
        """Return how the peer is told not to make calls."""
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is None:
            return ()
        numbers, most = command.numbers, control.RECALLED_MAX
        return [
            self._about(
                lane,
                control.RecallCallsMessage(lane.stream_id, numbers[at : at + most]),
            )
            for at in range(0, len(numbers), most)
        ]

    def close(self, command: CancelJob) -> Sequence[Output]:
        """Forget a lane; return how the peer is told."""
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is None:
            return ()
        self._forget(lane)
        return (self._about(lane, control.CloseCallStreamMessage(lane.stream_id)),)

    def receive_returns(self, frame: Frame) -> CallsReturned | None:
        """Return what came of calls, if it is about a lane that is still there.

        Raises PeerError if it cannot be read.
        """
        lane = self._by_stream_id.get(frame.stream)
        if lane is None:
            return None
        return CallsReturned(lane.job_id, lane.lease, decode_returns(frame.payload))

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """Return how a lane ended that the peer does not have any more.

        Raises PeerError if it cannot be read.
        """
        lane = self._by_task_id.get(result.task_id)
        if lane is None:
            return ()
        self._forget(lane)
        return (failure(lane.job_id, lane.lease, self._peer, result),)

    def _about(self, lane: _OpenCallStream, word: control.ControlMessage) -> Output:
        payload = control.encode_control(word)
        return self._writer.write(FrameType.CONTROL, payload, in_order=lane.in_order)

    def _forget(self, lane: _OpenCallStream) -> None:
        del self._by_lease[lane.job_id, lane.lease]
        del self._by_stream_id[lane.stream_id]
        del self._by_task_id[lane.task_id]


class UpstreamCallStreams:
    """Lanes at a worker that knows of none."""

    def __init__(
        self, peer: FleetPeer, task_ids: FleetTaskIds, writer: FrameWriter
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._by_lease: dict[tuple[JobId, LeaseNumber], _OpenCallStream] = {}
        self._calls: dict[str, tuple[_OpenCallStream, int]] = {}  # by the task's id

    def open(self, job: RunJob, work: CallStream) -> Rejected | None:
        """Take note of a lane; return why it cannot be one."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        self._by_lease[job.job_id, job.lease] = _OpenCallStream(
            job.job_id, job.lease, work
        )
        return None

    def push(self, command: PushCalls) -> Iterator[Output | Event]:
        """Return a task for each call; and what came of those that cannot be one."""
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is None or lane.closing:
            return
        unsaid: list[CallResult] = []
        for call in command.calls:
            task_id = self._task_ids.next()
            try:
                payload = self._encode_task(task_id, lane, call)
            except (InvalidRequest, TooLarge) as error:
                unsaid.append(CallResult(call.number, b"", str(error)))
                continue
            lane.calls[call.number] = task_id
            self._calls[task_id] = (lane, call.number)
            yield self._writer.write(FrameType.TASK, payload)
        if unsaid:
            yield CallsReturned(lane.job_id, lane.lease, unsaid)

    def recall(self, command: CancelCalls) -> Sequence[Output]:
        """Take note that calls are unwanted; the peer makes them all the same."""
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is not None:
            lane.recalled.update(lane.calls.keys() & set(command.numbers))
        return ()

    def close(self, command: CancelJob) -> Sequence[Completed]:
        """Have no more calls made in a lane; return its end, if none is made now.

        What the peer was asked for it does, and so long its slot is taken.
        """
        lane = self._by_lease.get((command.job_id, command.lease))
        if lane is None:
            return ()
        lane.closing = True
        return self._finish(lane)

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """Return what came of a call.

        If there is no such function, that is the end of the lane.
        """
        found = self._calls.pop(result.task_id, None)
        if found is None:
            return ()
        lane, number = found
        del lane.calls[number]
        error = result.error
        if error is not None and is_unknown_function(error) and not lane.closing:
            self._forget(lane)
            return (failure(lane.job_id, lane.lease, self._peer, result),)
        if lane.closing:
            return self._finish(lane)
        if number in lane.recalled:
            lane.recalled.remove(number)
            return ()
        value = b"" if error is not None else bytes(result.value)
        returned = CallResult(number, value, error or "")
        return (CallsReturned(lane.job_id, lane.lease, [returned]),)

    def receive_returns(self, frame: Frame) -> CallsReturned | None:
        """Return nothing: there are no streams of lanes."""
        return None

    def _encode_task(
        self, task_id: str, lane: _OpenCallStream, call: StreamedCall
    ) -> bytes:
        name, timeout = lane.work.name, lane.work.timeout
        return encode_task(task_id, name, call.args, call.kwargs, timeout)

    def _finish(self, lane: _OpenCallStream) -> Sequence[Completed]:
        """Return the end of a lane that is closing, once nothing is left of it."""
        if lane.calls:
            return ()
        self._forget(lane)
        return (Completed(lane.job_id, lane.lease),)

    def _forget(self, lane: _OpenCallStream) -> None:
        for task_id in lane.calls.values():
            del self._calls[task_id]
        del self._by_lease[lane.job_id, lane.lease]
