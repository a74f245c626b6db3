"""Tasks and call streams that a peer sends to this node, and the replies.

A task that cannot be done gets an error result as long as its id can be read.  MacFleet
workers leave such tasks unanswered, and some then stop reading.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    CallProgress,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Failed,
    PushCalls,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, CallStream, Feature
from shoal.protocols.macfleet.codec import control
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import Frame, FrameType, Payload
from shoal.protocols.macfleet.codec.reserved_frames import may_reference_blob
from shoal.protocols.macfleet.codec.task_extension import (
    ResultDetails,
    decode_calls,
    decode_requirements,
    encode_result_details,
    encode_returns,
    features_of,
)
from shoal.protocols.macfleet.codec.tasks import (
    ID_MAX,
    TaskRequest,
    arguments_too_large,
    decode_task,
    encode_result,
    encode_result_parts,
    error_text,
    task_id_at_start,
    timeout_error,
)
from shoal.protocols.macfleet.codec.values import NIL, is_plain_value
from shoal.protocols.macfleet.local_node import FleetPeer, FleetRole
from shoal.protocols.seam.session import Bulk, Notice, Output, Send
from shoal.protocols.seam.task_deadlines import TaskDeadlines

OPEN_JOBS_MAX = 4096  # open tasks and call streams of one peer
LEASE = LeaseNumber(1)  # a peer sends a task once

MAY_NOT_SUBMIT = (
    "a worker that joined with a join token may not submit jobs: present the token "
    "of the fleet"
)
NO_CODE = (
    "code from a task is only run for peers that have the fleet's token, and this "
    "fleet has none: set --macfleet-token"
)
NO_CALL_STREAMS = "a coordinator does not accept call streams: its workers do"
NOT_PLAIN = (
    "the task returned an array or another value that only Shoal's programs can "
    "decode: return MessagePack types, such as lists and bytes"
)

InboundOutput: TypeAlias = RunJob | CancelJob | PushCalls | CancelCalls | Output
JobEnd: TypeAlias = Completed | Rejected | Failed


class FleetInboundJobs:
    """The jobs that one peer has sent to this node.

    The answers to a task are sent on the frame stream of the task.
    """

    def __init__(self, peer: FleetPeer, writer: FrameWriter, role: FleetRole) -> None:
        self._peer = peer
        self._writer = writer
        self._is_worker = role is FleetRole.WORKER
        # The frame streams of open tasks and call streams, by task id.
        self._open: dict[str, int] = {}
        self._task_ids: dict[int, str] = {}  # of call streams, by frame stream
        self._deadlines = TaskDeadlines()  # of an upstream peer's tasks

    def receive_task(self, frame: Frame) -> InboundOutput:
        """Return the job of a task, or the reply if it cannot be run."""
        try:
            request = decode_task(frame.payload, strict=not self._peer.is_shoal)
        except PeerError as error:
            return self._reject_unreadable(frame, error)
        if request.task_id in self._open:
            # A reply would end the first.
            return Notice(f"ignored task {request.task_id!a}: its id is in use")
        try:
            job = _job_of(request, self._peer)
        except PeerError as error:
            return self._encode_refusal(request.task_id, frame.stream, str(error))
        if reason := self._refusal(job.work.needs):
            return self._encode_refusal(request.task_id, frame.stream, reason)
        self._open[request.task_id] = frame.stream
        return job

    @property
    def due(self) -> float | None:
        """When the first task times out; None: never."""
        return self._deadlines.due

    def limit(self, job: RunJob, now: float) -> None:
        """End a task at its timeout, whether it then runs or waits.

        As at upstream workers.  An upstream peer cannot cancel a task.
        """
        if isinstance(job.work, Call) and job.work.timeout is not None:
            self._deadlines.add(str(job.job_id), job.work.timeout, now)

    def expire(self, now: float) -> Iterator[InboundOutput]:
        """Answer the tasks that have timed out, and cancel their jobs."""
        for task_id, timeout in self._deadlines.take_overdue(now):
            stream = self._forget(task_id)
            error = timeout_error(timeout)
            yield self._encode_failure(task_id, stream, error, ResultDetails())
            yield CancelJob(JobId(task_id), LEASE)

    def refuse_truncated(self, frame: Frame) -> Output:
        """Return the reply to a task of which only the start was kept."""
        task_id = task_id_at_start(frame.payload)
        error = arguments_too_large(len(frame.payload) + frame.dropped)
        if task_id is None or task_id in self._open:
            return Notice(f"ignored a task: {error}")
        details = ResultDetails(fault=Fault.REQUEST.value)
        return self._encode_failure(task_id, frame.stream, error_text(error), details)

    def receive_calls(self, frame: Frame) -> InboundOutput | None:
        """Return calls of a call stream; None if it is closed.

        Raises PeerError if the payload is malformed.
        """
        task_id = self._task_ids.get(frame.stream)
        if task_id is None:
            return None
        return PushCalls(JobId(task_id), LEASE, decode_calls(frame.payload))

    def open_call_stream(self, message: control.OpenCallStreamMessage) -> InboundOutput:
        """Return the job of a call stream, or the reply if it is refused.

        Raises PeerError if its id or its frame stream is in use.
        """
        task_id, stream = message.task_id, message.stream
        if task_id in self._open or stream in self._task_ids:
            raise PeerError(f"call stream {task_id!a} on stream {stream} exists")
        if not self._is_worker:
            return self._encode_refusal(task_id, stream, NO_CALL_STREAMS)
        try:
            needs = features_of(message.features)
        except PeerError as error:
            return self._encode_refusal(task_id, stream, str(error))
        if reason := self._refusal(needs):
            return self._encode_refusal(task_id, stream, reason)
        self._task_ids[stream], self._open[task_id] = task_id, stream
        named = message.name, message.timeout, needs
        work = CallStream(*named, message.python, message.exact)
        return RunJob(JobId(task_id), LEASE, work, grant=message.grant)

    def recall(self, message: control.RecallCallsMessage) -> Sequence[InboundOutput]:
        """Return the command that cancels calls."""
        task_id = self._task_ids.get(message.stream)
        if task_id is None:
            return ()
        return (CancelCalls(JobId(task_id), LEASE, message.numbers),)

    def cancel(
        self, message: control.CancelMessage | control.CloseCallStreamMessage
    ) -> Sequence[InboundOutput]:
        """Return the command that cancels a task or closes a call stream."""
        if isinstance(message, control.CloseCallStreamMessage):
            task_id = self._task_ids.get(message.stream)
        else:
            task_id = message.task_id
        if task_id is None or task_id not in self._open:
            return ()
        self._forget(task_id)
        return (CancelJob(JobId(task_id), LEASE),)

    def send_result(self, event: JobEnd) -> Iterator[Output]:
        """Return the result of a task; nothing if the peer has cancelled it."""
        task_id = str(event.job_id)
        if task_id not in self._open or event.lease != LEASE:
            return
        stream = self._forget(task_id)
        match event:
            case Completed():
                yield self._encode_value(event, stream)
            case Rejected(_, _, reason):
                yield self._encode_refusal(task_id, stream, reason)
            case Failed(_, _, error, fault, exception):
                details = ResultDetails(fault=fault.value, exception=exception)
                yield self._encode_failure(task_id, stream, error, details)

    def send_progress(self, event: CallProgress) -> Iterator[Output]:
        """Return the progress message of a task; nothing unless the peer is Shoal's."""
        task_id = str(event.job_id)
        if self._peer.is_shoal and task_id in self._open:
            remark = event.remark[: control.TEXT_MAX]
            share = None if event.share is None else min(max(event.share, 0.0), 1.0)
            payload = control.encode_control(
                control.ProgressMessage(task_id, share, remark)
            )
            yield self._writer.write(FrameType.CONTROL, payload)

    def send_returns(self, event: CallsReturned) -> Iterator[Output]:
        """Return the results of calls in a call stream."""
        stream = self._open.get(str(event.job_id))
        if stream is not None:
            payload = encode_returns(event.results)
            yield self._writer.write(
                FrameType.RESULT, payload, stream, in_order=may_reference_blob(payload)
            )

    def _reject_unreadable(self, frame: Frame, error: PeerError) -> Output:
        task_id = task_id_in(frame.payload)
        if task_id is None or task_id in self._open:
            return Notice(f"ignored a task: {error}")
        details = ResultDetails(fault=Fault.REQUEST.value)
        return self._encode_failure(task_id, frame.stream, str(error), details)

    def _refusal(self, needs: frozenset[Feature]) -> str:
        if not self._peer.may_submit:
            return MAY_NOT_SUBMIT
        if Feature.CODE in needs and not self._peer.trusted:
            return NO_CODE
        if len(self._open) >= OPEN_JOBS_MAX:
            return f"{OPEN_JOBS_MAX} tasks of this peer are already open"
        return ""

    def _encode_value(self, event: Completed, stream: int) -> Send | Bulk:
        task_id, is_shoal = str(event.job_id), self._peer.is_shoal
        value = event.value or NIL
        if not is_shoal and not is_plain_value(value):
            return self._encode_failure(task_id, stream, NOT_PLAIN, ResultDetails())
        extension = (
            encode_result_details(ResultDetails(blobs=event.blobs))
            if is_shoal
            else None
        )
        try:
            parts = encode_result_parts(
                task_id, value, None, extension, strict=not is_shoal
            )
        except (InvalidRequest, TooLarge) as error:
            return self._encode_failure(task_id, stream, str(error), ResultDetails())
        in_order = is_shoal and may_reference_blob(*parts)
        return self._writer.write_parts(
            FrameType.RESULT, *parts, stream=stream, in_order=in_order
        )

    def _encode_refusal(self, task_id: str, stream: int, reason: str) -> Send | Bulk:
        details = ResultDetails(rejected=True)
        return self._encode_failure(task_id, stream, reason, details)

    def _encode_failure(
        self, task_id: str, stream: int, error: str, details: ResultDetails
    ) -> Send | Bulk:
        extension = encode_result_details(details) if self._peer.is_shoal else None
        text = error.encode(errors="replace").decode()  # it may quote a file's name
        payload = encode_result(task_id, None, text, extension)
        return self._writer.write(FrameType.RESULT, payload, stream)

    def _forget(self, task_id: str) -> int:
        """Forget an open task or call stream; return its frame stream."""
        stream = self._open.pop(task_id)
        self._deadlines.remove(task_id)
        if self._task_ids.get(stream) == task_id:
            del self._task_ids[stream]
        return stream


def _job_of(request: TaskRequest, peer: FleetPeer) -> RunJob:
    """Return the call in a task as a job.

    An upstream peer's timeout is both how long the function may run and the limit of
    the whole task.  The extension of a task is ignored unless the peer is Shoal's.

    Raises PeerError if it needs an unknown feature.
    """
    required = decode_requirements(request.extension if peer.is_shoal else None)
    call = Call(
        request.name,
        bytes(request.args),
        bytes(request.kwargs),
        request.timeout if required.names_timeout else None,
        features_of(required.needs),
        required.blobs,
        required.python,
        required.exact,
    )
    is_total = not (peer.is_shoal and required.names_timeout)
    remaining = request.timeout if is_total else None
    job_id = JobId(request.task_id)
    return RunJob(job_id, LEASE, call, remaining=remaining, grant=required.grant)


def task_id_in(payload: Payload) -> str | None:
    """Return the id of a task or result that is otherwise malformed, if it has one."""
    try:
        fields = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
        task_id = msgspec.msgpack.decode(fields["task_id"], type=str)
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError):
        return None
    return task_id if len(task_id) <= ID_MAX else None
