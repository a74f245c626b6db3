"""Call streams at a peer: slots in which it calls one function many times.

A Shoal node has a frame stream for each call stream, with many calls in a frame.  At
MacFleet's own workers each call is a task.
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
from shoal.protocols.macfleet.outbound_jobs import (
    FleetTaskIds,
    failure,
    grant_for,
    refusal,
    task_timeout,
)
from shoal.protocols.seam.session import Bulk, Output
from shoal.protocols.seam.task_deadlines import TaskDeadlines


@dataclass(slots=True)
class _OpenCallStream:
    """A call stream that is open at the peer; ``in_order`` as in ``_SentTask``.

    ``task_id`` identifies it when it ends.  ``calls`` maps the numbers of pending calls
    to the ids of their tasks; results of ``recalled`` calls are dropped.  A stream that
    is ``closing`` ends with its last pending call.  ``ends_by`` is when the job's total
    limit ends it; None: not known.
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
    ends_by: float | None = None


class ShoalCallStreams:
    """Call streams at a Shoal worker."""

    def __init__(
        self, peer: FleetPeer, task_ids: FleetTaskIds, writer: FrameWriter
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._by_lease: dict[tuple[JobId, LeaseNumber], _OpenCallStream] = {}
        self._by_stream_id: dict[int, _OpenCallStream] = {}
        self._by_task_id: dict[str, _OpenCallStream] = {}

    def open(self, job: RunJob, work: CallStream, now: float) -> Output | Rejected:
        """Return the frame that opens a call stream, or a rejection."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        task_id, stream = self._task_ids.next(), self._writer.new_stream()
        call_stream = _OpenCallStream(job.job_id, job.lease, work, task_id, stream)
        self._by_lease[call_stream.job_id, call_stream.lease] = call_stream
        self._by_stream_id[stream] = self._by_task_id[task_id] = call_stream
        needs = frozenset(each.value for each in work.needs)
        opening = control.OpenCallStreamMessage(
            *(task_id, stream, work.name, work.timeout, needs, work.python, work.exact),
            grant=grant_for(self._peer, job),
        )
        return self._writer.write(FrameType.CONTROL, control.encode_control(opening))

    def push(self, command: PushCalls, now: float) -> Iterator[Output | Event]:
        """Return the frames with calls."""
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is None:
            return
        for at in range(0, len(command.calls), CALLS_MAX):
            payload = encode_calls(command.calls[at : at + CALLS_MAX])
            output = self._writer.write(
                FrameType.TASK,
                payload,
                call_stream.stream_id,
                in_order=may_reference_blob(payload),
            )
            call_stream.in_order = call_stream.in_order or isinstance(output, Bulk)
            yield output

    def recall(self, command: CancelCalls) -> Sequence[Output]:
        """Return the frames that cancel calls."""
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is None:
            return ()
        numbers, count_max = command.numbers, control.RECALLED_MAX
        return [
            self._encode_control(
                call_stream,
                control.RecallCallsMessage(
                    call_stream.stream_id, numbers[at : at + count_max]
                ),
            )
            for at in range(0, len(numbers), count_max)
        ]

    def close(self, command: CancelJob) -> Sequence[Output]:
        """Forget a call stream; return the frame that closes it."""
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is None:
            return ()
        self._forget(call_stream)
        return (
            self._encode_control(
                call_stream, control.CloseCallStreamMessage(call_stream.stream_id)
            ),
        )

    def receive_returns(self, frame: Frame) -> CallsReturned | None:
        """Return the results of calls; None if the call stream is closed.

        Raises PeerError if the payload is malformed.
        """
        call_stream = self._by_stream_id.get(frame.stream)
        if call_stream is None:
            return None
        return CallsReturned(
            call_stream.job_id, call_stream.lease, decode_returns(frame.payload)
        )

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """End a call stream that the peer has ended; return its failure.

        Raises PeerError if the result is malformed.
        """
        call_stream = self._by_task_id.get(result.task_id)
        if call_stream is None:
            return ()
        self._forget(call_stream)
        return (failure(call_stream.job_id, call_stream.lease, self._peer, result),)

    def _encode_control(
        self, call_stream: _OpenCallStream, message: control.ControlMessage
    ) -> Output:
        payload = control.encode_control(message)
        return self._writer.write(
            FrameType.CONTROL, payload, in_order=call_stream.in_order
        )

    def _forget(self, call_stream: _OpenCallStream) -> None:
        del self._by_lease[call_stream.job_id, call_stream.lease]
        del self._by_stream_id[call_stream.stream_id]
        del self._by_task_id[call_stream.task_id]


class UpstreamCallStreams:
    """Call streams at one of MacFleet's own workers, as one task for each call."""

    def __init__(
        self,
        peer: FleetPeer,
        task_ids: FleetTaskIds,
        writer: FrameWriter,
        deadlines: TaskDeadlines,
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._deadlines = deadlines
        self._by_lease: dict[tuple[JobId, LeaseNumber], _OpenCallStream] = {}
        self._calls: dict[str, tuple[_OpenCallStream, int]] = {}  # by task id

    def open(self, job: RunJob, work: CallStream, now: float) -> Rejected | None:
        """Open a call stream; return a rejection if the peer does not support it."""
        if reason := refusal(self._peer, work.needs):
            return Rejected(job.job_id, job.lease, reason)
        self._by_lease[job.job_id, job.lease] = _OpenCallStream(
            *(job.job_id, job.lease, work),
            ends_by=None if job.remaining is None else now + job.remaining,
        )
        return None

    def push(self, command: PushCalls, now: float) -> Iterator[Output | Event]:
        """Return a task for each call, and failures of calls that cannot be encoded."""
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is None or call_stream.closing:
            return
        failed: list[CallResult] = []
        name, ends_by = call_stream.work.name, call_stream.ends_by
        remaining = None if ends_by is None else max(0.0, ends_by - now)
        timeout = task_timeout(call_stream.work, remaining)
        for call in command.calls:
            task_id = self._task_ids.next()
            try:
                payload = encode_task(task_id, name, call.args, call.kwargs, timeout)
            except (InvalidRequest, TooLarge) as error:
                failed.append(CallResult(call.number, b"", str(error)))
                continue
            call_stream.calls[call.number] = task_id
            self._calls[task_id] = (call_stream, call.number)
            self._deadlines.add(task_id, timeout, now)
            yield self._writer.write(FrameType.TASK, payload)
        if failed:
            yield CallsReturned(call_stream.job_id, call_stream.lease, failed)

    def recall(self, command: CancelCalls) -> Sequence[Output]:
        """Drop the results of calls; the peer cannot cancel them."""
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is not None:
            call_stream.recalled.update(call_stream.calls.keys() & set(command.numbers))
        return ()

    def close(self, command: CancelJob) -> Sequence[Completed]:
        """Make no further calls; return the end if no call is pending.

        Pending calls cannot be cancelled, so the slot is occupied until they end.
        """
        call_stream = self._by_lease.get((command.job_id, command.lease))
        if call_stream is None:
            return ()
        call_stream.closing = True
        return self._finish(call_stream)

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """Return the result of a call.

        If the worker does not have the function, the call stream fails.
        """
        entry = self._calls.pop(result.task_id, None)
        if entry is None:
            return ()
        call_stream, number = entry
        self._deadlines.remove(result.task_id)
        del call_stream.calls[number]
        error = result.error
        if error is not None and is_unknown_function(error) and not call_stream.closing:
            self._forget(call_stream)
            return (failure(call_stream.job_id, call_stream.lease, self._peer, result),)
        if call_stream.closing:
            return self._finish(call_stream)
        if number in call_stream.recalled:
            call_stream.recalled.remove(number)
            return ()
        value = b"" if error is not None else bytes(result.value)
        returned = CallResult(number, value, error or "")
        return (CallsReturned(call_stream.job_id, call_stream.lease, [returned]),)

    def receive_returns(self, frame: Frame) -> CallsReturned | None:
        """Return None: there are no frame streams."""
        return None

    def _finish(self, call_stream: _OpenCallStream) -> Sequence[Completed]:
        """Return the end of a closing call stream if no call is pending."""
        if call_stream.calls:
            return ()
        self._forget(call_stream)
        return (Completed(call_stream.job_id, call_stream.lease),)

    def _forget(self, call_stream: _OpenCallStream) -> None:
        for task_id in call_stream.calls.values():
            del self._calls[task_id]
            self._deadlines.remove(task_id)
        del self._by_lease[call_stream.job_id, call_stream.lease]
