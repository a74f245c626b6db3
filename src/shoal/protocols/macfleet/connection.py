"""What is said on a connection once both ends know each other.

To real peers only tasks are said, and of them only tasks and results are heard.  With
our own there are also words, heartbeats, blobs, and lanes on streams of their own.
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

ACCEPTED_MESSAGES: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, PushCalls, CancelCalls, SendBlob),
        *(OffersChanged, LoadChanged, Draining, HealthReported),
        *(AnswerChunk, Completed, Rejected, Failed),
        *(CallProgress, CallsReturned, BlobMissing),
    }
)


class FleetConnection:
    """What is said with one peer.

    Words about what we asked it for are events, and what it asks us for are commands.
    After a Close it says and hears nothing more.
    """

    def __init__(self, local: FleetLocalNode, peer: FleetPeer, now: float) -> None:
        self._peer = peer
        self._writer = voice = FrameWriter(is_shoal=peer.is_shoal)
        tickets = FleetTaskIds(local.handshake.draw)
        ours = peer.is_shoal
        self._parts = ConnectionParts(
            voice,
            FleetOutboundJobs(peer, tickets, voice),
            (ShoalCallStreams if ours else UpstreamCallStreams)(peer, tickets, voice),
            FleetInboundJobs(peer, voice, local.role),
            FleetPeerState(peer, local.role),
            HeartbeatLiveness(now)
            if ours
            else RegistryLiveness(local.registry, peer.name, now),
        )
        self._probe = FunctionProbe(tickets.next(), local.slots)
        self._sends_probe = local.role is FleetRole.COORDINATOR and not ours
        self._handler = (
            ShoalFrameHandler(self._parts, local.on_refused)
            if ours
            else UpstreamFrameHandler(self._parts, self._probe)
        )
        self._pending: list[
            InboundMessage
        ] = []  # to be heard, and came of what was said
        self._pending_since = 0.0
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None: never."""
        if self._closed:
            return None
        return self._pending_since if self._pending else self._parts.liveness.deadline

    def start(self) -> Sequence[ConnectionOutput]:
        """Return what is said and heard to begin with."""
        if not self._sends_probe:
            return ()
        return (self._writer.write(FrameType.TASK, self._probe.encode_request()),)

    def tick(self, now: float) -> Sequence[ConnectionOutput]:
        """Act on time passing."""
        if self._closed:
            return ()
        outputs: list[ConnectionOutput] = [*self._pending]
        self._pending.clear()
        if reason := self._parts.liveness.lost_reason(now):
            return [*outputs, self._close(reason)]
        if (beat := self._parts.liveness.next_heartbeat(now)) is not None:
            outputs.append(self._writer.write(FrameType.HEARTBEAT, beat))
        return outputs

    def buffer_for(self, head: bytes, take: Allocate) -> memoryview | None:
        """Return where a frame is to be read to, as ``Framed.place`` does."""
        return self._handler.buffer_for(head, take)

    def receive(self, frame: Frame, now: float) -> Sequence[ConnectionOutput]:
        """Take a frame.

        Raises PeerError if it is no good, and nothing is to be said about it.
        """
        self._parts.liveness.on_activity(now)
        said = self._handler.receive(frame)
        self._closed = any(isinstance(each, Close) for each in said)
        return said

    def send(self, message: Event | Command, now: float) -> Sequence[Output]:
        """Say something to the peer.

        Raises Unsupported for what the wire has no words for.
        """
        said: list[Output] = []
        for each in () if self._closed else self._encode(message):
            if isinstance(each, Send | Bulk | Close | Notice):
                said.append(each)
            else:
                self._pending.append(each)
                self._pending_since = now
        return said

    # What we say.

    def _encode(self, message: Event | Command) -> Iterable[ConnectionOutput]:
        """Return how something is said, and what comes of it at once."""
        match message:
            case RunJob():
                return self._run(message)
            case PushCalls():
                return self._parts.call_streams.push(message)
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
                words = self._send_control(
                    control.DismissedMessage(reason[: control.TEXT_MAX])
                )
                return [*words, self._close(reason)]
            case AnswerChunk():
                return ()  # what is called returns all at once
            case Joined() | ReceiptSent() | ModelMessage() | CallMessage():
                raise Unsupported("this wire has no words for that")

    def _run(self, job: RunJob) -> Iterable[ConnectionOutput]:
        match job.work:
            case Call() | Task():
                return (self._parts.outbound.send(job, job.work),)
            case CallStream():
                opened = self._parts.call_streams.open(job, job.work)
                return () if opened is None else (opened,)
            case _:
                raise Unsupported("this wire asks no models")

    def _send_control(self, message: control.ControlMessage) -> Sequence[Output]:
        """Return how a word goes out, if the peer is one that knows words."""
        if not self._peer.is_shoal:
            return ()
        return (self._writer.write(FrameType.CONTROL, control.encode_control(message)),)

    def _close(self, reason: str) -> Close:
        self._closed = True
        return Close(reason)
