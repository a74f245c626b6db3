"""A connection whose handshake is complete: it sends and receives jobs.

With MacFleet's own programs it exchanges tasks and results only.  With Shoal nodes it
also exchanges control messages, heartbeats, blobs, and call streams on frame streams.
"""

from collections.abc import Iterable, Sequence

from shoal.domain.errors import Unsupported
from shoal.domain.model_messages import ModelMessage
from shoal.domain.vocabulary import (
    AnswerChunk,
    BlobMissing,
    CallMessage,
    CallProgress,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Draining,
    Event,
    Failed,
    HealthReported,
    Joined,
    LoadChanged,
    OffersChanged,
    PushCalls,
    ReceiptSent,
    Rejected,
    RunJob,
    SendBlob,
)
from shoal.domain.work import Call, CallStream, Task
from shoal.protocols.macfleet.call_streams import ShoalCallStreams, UpstreamCallStreams
from shoal.protocols.macfleet.codec import control, reserved_frames
from shoal.protocols.macfleet.codec.chunks import Allocate
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import Frame, FrameType
from shoal.protocols.macfleet.frame_handlers import (
    RESULT_GRACE,
    ConnectionOutput,
    ConnectionParts,
    InboundMessage,
    ShoalFrameHandler,
    UpstreamFrameHandler,
)
from shoal.protocols.macfleet.function_probe import FunctionProbe
from shoal.protocols.macfleet.inbound_jobs import FleetInboundJobs
from shoal.protocols.macfleet.liveness import HeartbeatLiveness, RegistryLiveness
from shoal.protocols.macfleet.local_node import FleetLocalNode, FleetPeer, FleetRole
from shoal.protocols.macfleet.outbound_jobs import FleetOutboundJobs, FleetTaskIds
from shoal.protocols.macfleet.peer_state import FleetPeerState
from shoal.protocols.seam.session import Bulk, Close, Notice, Output, Send
from shoal.protocols.seam.task_deadlines import TaskDeadlines

ACCEPTED_MESSAGES: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, PushCalls, CancelCalls, SendBlob),
        *(OffersChanged, LoadChanged, Draining, HealthReported),
        *(AnswerChunk, Completed, Rejected, Failed),
        *(CallProgress, CallsReturned, BlobMissing),
    }
)


class FleetConnection:
    """The exchange with one peer.

    Messages about jobs sent to the peer are events; its own requests are commands.
    After it returns Close it sends and receives nothing more.
    """

    def __init__(self, local: FleetLocalNode, peer: FleetPeer, now: float) -> None:
        self._peer = peer
        self._writer = writer = FrameWriter(is_shoal=peer.is_shoal)
        task_ids = FleetTaskIds(local.handshake.random_bytes)
        is_shoal = peer.is_shoal
        deadlines = TaskDeadlines(RESULT_GRACE)
        self._parts = ConnectionParts(
            writer,
            FleetOutboundJobs(peer, task_ids, writer, deadlines),
            ShoalCallStreams(peer, task_ids, writer)
            if is_shoal
            else UpstreamCallStreams(peer, task_ids, writer, deadlines),
            FleetInboundJobs(peer, writer, local.role),
            FleetPeerState(peer, local.role),
            HeartbeatLiveness(now)
            if is_shoal
            else RegistryLiveness(local.registry, peer.name, now),
            deadlines,
        )
        self._probe = FunctionProbe(task_ids.next(), local.slots)
        self._sends_probe = local.role is FleetRole.COORDINATOR and not is_shoal
        self._handler = (
            ShoalFrameHandler(self._parts, local.on_refused)
            if is_shoal
            else UpstreamFrameHandler(self._parts, self._probe)
        )
        # Events that arose while sending, not yet returned.
        self._pending: list[InboundMessage] = []
        self._pending_since = 0.0
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due next; None: never."""
        if self._closed:
            return None
        if self._pending:
            return self._pending_since
        parts = self._parts
        dues = (
            *(parts.liveness.deadline, parts.deadlines.due, parts.inbound.due),
            self._handler.deadline,
        )
        return min((due for due in dues if due is not None), default=None)

    def start(self) -> Sequence[ConnectionOutput]:
        """Return the first messages to and from the peer."""
        if not self._sends_probe:
            return ()
        return (self._writer.write(FrameType.TASK, self._probe.encode_request()),)

    def tick(self, now: float) -> Sequence[ConnectionOutput]:
        """Handle time passing: heartbeats, liveness, tasks that time out."""
        if self._closed:
            return ()
        outputs: list[ConnectionOutput] = [*self._pending]
        self._pending.clear()
        if reason := self._parts.liveness.lost_reason(now):
            return [*outputs, self._close(reason)]
        if (heartbeat := self._parts.liveness.next_heartbeat(now)) is not None:
            outputs.append(self._writer.write(FrameType.HEARTBEAT, heartbeat))
        return [*outputs, *self._handler.expire(now)]

    def buffer_for(self, head: bytes, allocate: Allocate) -> memoryview | None:
        """Return memory for a frame, as ``FramedSession.buffer_for`` does."""
        return self._handler.buffer_for(head, allocate)

    def receive(self, frame: Frame, now: float) -> Sequence[ConnectionOutput]:
        """Handle a frame.

        Raises PeerError if it violates the protocol; the connection then ends.
        """
        self._parts.liveness.on_activity(now)
        outputs = self._handler.receive(frame, now)
        self._closed = any(isinstance(each, Close) for each in outputs)
        return outputs

    def send(self, message: Event | Command, now: float) -> Sequence[Output]:
        """Send a message to the peer.

        Raises Unsupported if the wire has no message for it.
        """
        outputs: list[Output] = []
        for each in () if self._closed else self._encode(message, now):
            if isinstance(each, Send | Bulk | Close | Notice):
                outputs.append(each)
            else:
                self._pending.append(each)
                self._pending_since = now
        return outputs

    # Sending.

    def _encode(
        self, message: Event | Command, now: float
    ) -> Iterable[ConnectionOutput]:
        """Return the frames of a message, and events that follow at once."""
        match message:
            case RunJob():
                return self._run(message, now)
            case PushCalls():
                return self._parts.call_streams.push(message, now)
            case CallsReturned():
                return self._parts.inbound.send_returns(message)
            case CancelCalls():
                return self._parts.call_streams.recall(message)
            case CancelJob():
                return [
                    *self._parts.outbound.cancel(message),
                    *self._parts.call_streams.close(message),
                ]
            case Completed() | Rejected() | Failed():
                return self._parts.inbound.send_result(message)
            case CallProgress():
                return self._parts.inbound.send_progress(message)
            case SendBlob():
                return (
                    (reserved_frames.write_blob(message, self._writer),)
                    if self._peer.is_shoal
                    else ()
                )
            case BlobMissing(digest):
                return self._send_control(control.BlobMissingMessage(digest))
            case OffersChanged() | LoadChanged() | Draining() | HealthReported():
                return self._parts.state.send(message, self._writer)
            case Dismiss(reason):
                dismissal = self._send_control(
                    control.DismissedMessage(reason[: control.TEXT_MAX])
                )
                return [*dismissal, self._close(reason)]
            case AnswerChunk():
                return ()  # a function's value is returned whole, without deltas
            case Joined() | ReceiptSent() | ModelMessage() | CallMessage():
                raise Unsupported("MacFleet has no message for that")

    def _run(self, job: RunJob, now: float) -> Iterable[ConnectionOutput]:
        match job.work:
            case Call() | Task():
                return (self._parts.outbound.send(job, job.work, now),)
            case CallStream():
                output = self._parts.call_streams.open(job, job.work, now)
                return () if output is None else (output,)
            case _:
                raise Unsupported("MacFleet does not run models")

    def _send_control(self, message: control.ControlMessage) -> Sequence[Output]:
        """Return the frame of a control message; nothing unless the peer is Shoal's."""
        if not self._peer.is_shoal:
            return ()
        return (self._writer.write(FrameType.CONTROL, control.encode_control(message)),)

    def _close(self, reason: str) -> Close:
        self._closed = True
        return Close(reason)
