"""The tasks that a peer asks us for, and what it is told of them.

Whatever cannot be done is answered, as far as it can be read which task it was: real
workers leave such tasks without an answer, and some then read no more.
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
    decode_task,
    encode_result,
    encode_result_parts,
)
from shoal.protocols.macfleet.codec.values import NIL, is_plain_value
from shoal.protocols.macfleet.local_node import FleetPeer, FleetRole
from shoal.protocols.seam.session import Bulk, Notice, Output, Send

OPEN_JOBS_MAX = 4096  # tasks and lanes of one peer that are open at a time
LEASE = LeaseNumber(1)  # a peer's task is given to us once

MAY_NOT_ASK = (
    "who joined by a token of its own is here to work: to ask, present the token of "
    "the fleet"
)
NO_CODE = (
    "code that is sent along is only called for peers that have the fleet's token, and "
    "this fleet has none: give it one with --macfleet-token"
)
NO_CALL_STREAMS = "a coordinator gives no lanes: its own workers do"
NOT_PLAIN = (
    "the task returned an array, or another value that only Shoal's own programs can "
    "read: have it return what MessagePack has, such as lists and bytes"
)

InboundOutput: TypeAlias = RunJob | CancelJob | PushCalls | CancelCalls | Output
JobEnd: TypeAlias = Completed | Rejected | Failed


class FleetInboundJobs:
    """Our side as the one who is asked."""

    def __init__(self, peer: FleetPeer, writer: FrameWriter, role: FleetRole) -> None:
        self._peer = peer
        self._writer = writer
        self._is_worker = role is FleetRole.WORKER
        self._open: set[str] = set()  # ids of tasks, and of lanes
        self._task_ids: dict[int, str] = {}  # the ids of lanes, by stream
        self._streams: dict[str, int] = {}  # and the other way round

    def receive_task(self, frame: Frame) -> InboundOutput:
        """Return the job that a task is, or how it is answered at once."""
        payload = frame.payload
        try:
            asked = decode_task(payload, strict=not self._peer.is_shoal)
        except PeerError as error:
            return self._reject_unreadable(payload, error)
        if asked.task_id in self._open:
            # An answer would end the first.
            return Notice(f"task {asked.task_id!a} came twice: one is ignored")
        try:
            work = _call_of(asked, self._peer)
        except PeerError as error:
            return self._encode_refusal(asked.task_id, str(error))
        if reason := self._refusal(work.needs):
            return self._encode_refusal(asked.task_id, reason)
        self._open.add(asked.task_id)
        return RunJob(JobId(asked.task_id), LEASE, work)

    def receive_calls(self, frame: Frame) -> InboundOutput | None:
        """Return calls in a lane; None if it is not there any more.

        Raises PeerError if they cannot be read.
        """
        task_id = self._task_ids.get(frame.stream)
        if task_id is None:
            return None
        return PushCalls(JobId(task_id), LEASE, decode_calls(frame.payload))

    def open_call_stream(self, message: control.OpenCallStreamMessage) -> InboundOutput:
        """Return the job that a lane is, or why there cannot be one.

        Raises PeerError if there is one by that name already.
        """
        task_id, stream = message.task_id, message.stream
        if task_id in self._open or stream in self._task_ids:
            raise PeerError(f"lane {task_id!a} on stream {stream} is open already")
        if not self._is_worker:
            return self._encode_refusal(task_id, NO_CALL_STREAMS)
        try:
            needs = features_of(message.features)
        except PeerError as error:
            return self._encode_refusal(task_id, str(error))
        if reason := self._refusal(needs):
            return self._encode_refusal(task_id, reason)
        self._open.add(task_id)
        self._task_ids[stream], self._streams[task_id] = task_id, stream
        return RunJob(
            JobId(task_id), LEASE, CallStream(message.name, message.timeout, needs)
        )

    def recall(self, message: control.RecallCallsMessage) -> Sequence[InboundOutput]:
        """Return calls that the peer does not want any more."""
        task_id = self._task_ids.get(message.stream)
        if task_id is None:
            return ()
        return (CancelCalls(JobId(task_id), LEASE, message.numbers),)

    def cancel(
        self, message: control.CancelMessage | control.CloseCallStreamMessage
    ) -> Sequence[InboundOutput]:
        """Return what the peer does not want any more, if that is not over."""
        if isinstance(message, control.CloseCallStreamMessage):
            task_id = self._task_ids.get(message.stream)
        else:
            task_id = message.task_id
        if task_id is None or task_id not in self._open:
            return ()
        self._forget(task_id)
        return (CancelJob(JobId(task_id), LEASE),)

    def send_result(self, event: JobEnd) -> Iterator[Output]:
        """Return how the peer is told of its task; nothing, if it has cancelled it."""
        task_id = str(event.job_id)
        if task_id not in self._open or event.lease != LEASE:
            return
        self._forget(task_id)
        match event:
            case Completed():
                yield self._encode_value(event)
            case Rejected(_, _, reason):
                yield self._encode_refusal(task_id, reason)
            case Failed(_, _, error, fault):
                yield self._encode_failure(
                    task_id, error, ResultDetails(fault=fault.value)
                )

    def send_progress(self, event: CallProgress) -> Iterator[Output]:
        """Return how the peer is told how far its task has come, if it wants that."""
        task_id = str(event.job_id)
        if self._peer.is_shoal and task_id in self._open:
            remark = event.remark[: control.TEXT_MAX]
            share = None if event.share is None else min(max(event.share, 0.0), 1.0)
            payload = control.encode_control(
                control.ProgressMessage(task_id, share, remark)
            )
            yield self._writer.write(FrameType.CONTROL, payload)

    def send_returns(self, event: CallsReturned) -> Iterator[Output]:
        """Return how the peer is told what came of calls in a lane."""
        stream = self._streams.get(str(event.job_id))
        if stream is not None:
            payload = encode_returns(event.results)
            yield self._writer.write(
                FrameType.RESULT, payload, stream, in_order=may_reference_blob(payload)
            )

    # Private parts, in the order in which they are called.

    def _reject_unreadable(self, payload: Payload, error: PeerError) -> Output:
        task_id = task_id_in(payload)
        if task_id is None or task_id in self._open:
            return Notice(f"a task is ignored: {error}")
        return self._encode_failure(
            task_id, str(error), ResultDetails(fault=Fault.REQUEST.value)
        )

    def _refusal(self, needs: frozenset[Feature]) -> str:
        if not self._peer.may_ask:
            return MAY_NOT_ASK
        if Feature.CODE in needs and not self._peer.trusted:
            return NO_CODE
        if len(self._open) >= OPEN_JOBS_MAX:
            return f"{OPEN_JOBS_MAX} tasks of this peer are open here already"
        return ""

    def _encode_value(self, done: Completed) -> Send | Bulk:
        task_id, ours = str(done.job_id), self._peer.is_shoal
        value = done.value or NIL
        if not ours and not is_plain_value(value):
            return self._encode_failure(task_id, NOT_PLAIN, ResultDetails())
        more = encode_result_details(ResultDetails(blobs=done.blobs)) if ours else None
        try:
            parts = encode_result_parts(task_id, value, None, more, strict=not ours)
        except (InvalidRequest, TooLarge) as error:
            return self._encode_failure(task_id, str(error), ResultDetails())
        in_turn = ours and may_reference_blob(*parts)
        return self._writer.write_parts(FrameType.RESULT, *parts, in_order=in_turn)

    def _encode_refusal(self, task_id: str, reason: str) -> Send | Bulk:
        return self._encode_failure(task_id, reason, ResultDetails(rejected=True))

    def _encode_failure(
        self, task_id: str, error: str, details: ResultDetails
    ) -> Send | Bulk:
        more = encode_result_details(details) if self._peer.is_shoal else None
        text = error.encode(errors="replace").decode()  # a name of a file may be in it
        payload = encode_result(task_id, None, text, more)
        return self._writer.write(FrameType.RESULT, payload)

    def _forget(self, task_id: str) -> None:
        self._open.discard(task_id)
        if (stream := self._streams.pop(task_id, None)) is not None:
            del self._task_ids[stream]


def _call_of(request: TaskRequest, peer: FleetPeer) -> Call:
    """Return what a task asks for.  Raises PeerError if we do not know what it needs.

    What only our own peers can say does not count in others' tasks.
    """
    needs, blobs = (
        decode_requirements(request.extension) if peer.is_shoal else (frozenset(), ())
    )
    args, kwargs = bytes(request.args), bytes(request.kwargs)
    return Call(request.name, args, kwargs, request.timeout, needs, blobs)


def task_id_in(payload: Payload) -> str | None:
    """Return the id of a task that cannot be read otherwise, if it has one."""
    try:
        told = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
        task_id = msgspec.msgpack.decode(told["task_id"], type=str)
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError):
        return None
    return task_id if len(task_id) <= ID_MAX else None
