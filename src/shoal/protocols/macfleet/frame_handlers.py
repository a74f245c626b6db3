"""What each frame from a peer means: handlers by frame type."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Raw

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.vocabulary import BlobMissing, CallProgress, Command, Event, RunJob
from shoal.protocols.macfleet.call_streams import ShoalCallStreams, UpstreamCallStreams
from shoal.protocols.macfleet.codec import control, reserved_frames
from shoal.protocols.macfleet.codec.chunks import BUFFERED_MAX, Allocate, ChunkJoiner
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import (
    PAYLOAD_MAX,
    Flag,
    Frame,
    FrameType,
    Payload,
)
from shoal.protocols.macfleet.codec.tasks import (
    TaskResult,
    decode_result,
    error_text,
    result_too_large,
    task_id_at_start,
    timeout_error,
)
from shoal.protocols.macfleet.codec.values import NIL
from shoal.protocols.macfleet.function_probe import FunctionProbe
from shoal.protocols.macfleet.inbound_jobs import FleetInboundJobs, task_id_in
from shoal.protocols.macfleet.liveness import HeartbeatLiveness, RegistryLiveness
from shoal.protocols.macfleet.outbound_jobs import FleetOutboundJobs
from shoal.protocols.macfleet.peer_state import FleetPeerState
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import Close, Notice, Output
from shoal.protocols.seam.task_deadlines import TaskDeadlines

InboundMessage: TypeAlias = PeerJoined | Event | Command
ConnectionOutput: TypeAlias = InboundMessage | Output
FrameHandlers: TypeAlias = Mapping[
    FrameType, Callable[[Frame], Sequence[ConnectionOutput]]
]

ARRAY_LEADS = frozenset(
    (*range(0x90, 0xA0), 0xDC, 0xDD)
)  # the first byte of an array in MessagePack
BLOB_MAX = PAYLOAD_MAX + reserved_frames.DIGEST_SIZE  # bytes, with the digest


NO_RESULT = (
    "the worker sent no result; MacFleet's own workers send none that MessagePack "
    "cannot represent, such as a set or an array"
)
RESULT_GRACE = 30.0  # seconds after a task's timeout in which its result may arrive
CHUNK_TIMEOUT = 120.0  # seconds between chunks, as upstream waits for a frame

# IntFlag operations cost a microsecond a frame.
_CHUNKED = int(Flag.CHUNKED)
_CHUNK_FLAGS = int(Flag.CHUNKED | Flag.LAST)
_COMPRESSED = int(Flag.COMPRESSED)


@dataclass(frozen=True, slots=True)
class ConnectionParts:
    """The parts of a connection that frame handlers use."""

    writer: FrameWriter
    outbound: FleetOutboundJobs
    call_streams: ShoalCallStreams | UpstreamCallStreams
    inbound: FleetInboundJobs
    state: FleetPeerState
    liveness: HeartbeatLiveness | RegistryLiveness
    deadlines: TaskDeadlines  # of tasks that an upstream worker has


_JOB_FRAMES = frozenset({FrameType.TASK, FrameType.RESULT})
_COLLECTIVE_FRAMES = frozenset(
    {
        *(FrameType.TENSOR, FrameType.GRADIENT, FrameType.COMPRESSED_GRADIENT),
        FrameType.BARRIER,
    }
)


class UpstreamFrameHandler:
    """Handles frames of peers that are not Shoal's: tasks, results and heartbeats.

    Tasks and results may come in chunks, but not compressed: the document specifies no
    compression of them.  Other frame types are ignored, as upstream ignores them, but
    for collectives.
    """

    def __init__(self, parts: ConnectionParts, probe: FunctionProbe) -> None:
        self._parts = parts
        self._probe = probe
        self._ignored: set[FrameType] = set()  # reported already
        self._joiner = ChunkJoiner(buffered_max=PAYLOAD_MAX, counts_from_zero=False)
        self._chunks_due: dict[int, float] = {}  # by frame stream, the next first

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has to check for missing chunks; None: never."""
        return next(iter(self._chunks_due.values()), None)

    def buffer_for(self, head: bytes, allocate: Allocate) -> memoryview | None:
        """Return None: only Shoal nodes announce the size of a chunked payload."""
        return None

    def receive(self, frame: Frame, now: float) -> Sequence[ConnectionOutput]:
        """Return what a frame means, and any replies; nothing until the last chunk.

        Raises PeerError for a compressed task or result, or a malformed chunk.
        """
        if frame.flags & (_CHUNK_FLAGS | _COMPRESSED) and frame.type in _JOB_FRAMES:
            joined = self._join(frame, now)
            if joined is None:
                return ()
            frame = joined
        match frame.type:
            case FrameType.TASK:
                return (self._on_task(frame, now),)
            case FrameType.RESULT:
                return self._on_result(frame)
            case FrameType.HEARTBEAT:
                self._parts.liveness.on_heartbeat(frame.payload)
                return ()
            case _:
                if frame.type in self._ignored:
                    return ()
                self._ignored.add(frame.type)
                return _other(frame)

    def expire(self, now: float) -> Iterator[ConnectionOutput]:
        """Handle the tasks, of either end, that have timed out, and missing chunks."""
        for stream, due in self._chunks_due.items():
            if now >= due:
                late = f"the next chunk on stream {stream}"
                yield Close(f"{late} did not arrive within {CHUNK_TIMEOUT:g} s")
                return
            break
        yield from self._parts.inbound.expire(now)
        for task_id, timeout in self._parts.deadlines.take_overdue(now):
            error = f"{timeout_error(timeout)}: {NO_RESULT}"
            yield from _on_task_result(
                self._parts, TaskResult(task_id, Raw(NIL), error)
            )

    def _join(self, frame: Frame, now: float) -> Frame | None:
        """Return the whole frame with its last chunk; None before."""
        if frame.flags & _COMPRESSED:
            raise PeerError(
                f"a compressed {frame.type.name} frame: tasks and results have to be "
                "sent uncompressed"
            )
        if frame.dropped:
            raise LimitExceeded(
                "chunk", len(frame.payload) + frame.dropped, PAYLOAD_MAX
            )
        self._chunks_due.pop(frame.stream, None)
        joined = self._joiner.add(frame)
        if joined is None:
            self._chunks_due[frame.stream] = now + CHUNK_TIMEOUT
        return joined

    def _on_task(self, frame: Frame, now: float) -> ConnectionOutput:
        inbound = self._parts.inbound
        if frame.dropped:
            return inbound.refuse_truncated(frame)
        output = inbound.receive_task(frame)
        if isinstance(output, RunJob):
            inbound.limit(output, now)
        return output

    def _on_result(self, frame: Frame) -> Sequence[ConnectionOutput]:
        """Handle a result; one that is malformed or too large fails its task."""
        try:
            result = _result_in(frame)
        except PeerError as error:
            task_id = task_id_in(frame.payload)
            if task_id is None:
                return (Notice(f"ignored a result: {error}"),)
            result = TaskResult(task_id, Raw(NIL), f"the worker's result: {error}")
        offer = self._probe.offer_from(result)
        return _on_task_result(self._parts, result) if offer is None else (offer,)


class ShoalFrameHandler:
    """Handles frames of Shoal nodes; ``on_refused`` receives a dismissal's reason."""

    def __init__(
        self, parts: ConnectionParts, on_refused: Callable[[str], None]
    ) -> None:
        self._parts = parts
        self._on_refused = on_refused
        self._joiner = ChunkJoiner(
            BLOB_MAX, buffered_max=BUFFERED_MAX + reserved_frames.DIGEST_SIZE
        )
        self._blobs = reserved_frames.IncomingBlobs()
        self.buffer_for = self._joiner.buffer_for
        self._handlers: FrameHandlers = {
            FrameType.TASK: self._on_task,
            FrameType.RESULT: self._on_result,
            FrameType.CONTROL: self._on_control,
            FrameType.HEARTBEAT: self._on_heartbeat,
            FrameType.STATE: self._on_blob,
        }

    @property
    def deadline(self) -> float | None:
        """Return None: a Shoal node that sends nothing more is lost."""
        return None

    def receive(self, frame: Frame, now: float) -> Sequence[ConnectionOutput]:
        """Return what a frame means, and any replies; nothing until the last chunk.

        Raises PeerError if the frame violates the protocol.
        """
        if not frame.flags & _CHUNKED:
            return _handle(self._handlers, frame)
        joined = self._joiner.add(frame)
        if frame.type is FrameType.STATE:
            self._blobs.add_chunk(frame)
        return () if joined is None else _handle(self._handlers, joined)

    def expire(self, now: float) -> Iterator[ConnectionOutput]:
        """Return nothing: Shoal nodes answer every task, and cancel their own."""
        return iter(())

    def _on_task(self, frame: Frame) -> Sequence[ConnectionOutput]:
        """Handle a task (a map), or calls of a call stream (an array)."""
        if not _is_array(frame.payload):
            return (self._parts.inbound.receive_task(frame),)
        calls = self._parts.inbound.receive_calls(frame)
        return () if calls is None else (calls,)

    def _on_result(self, frame: Frame) -> Sequence[ConnectionOutput]:
        """Handle a result (a map), or returns of a call stream (an array)."""
        if not _is_array(frame.payload):
            return _on_task_result(
                self._parts, decode_result(frame.payload, strict=False)
            )
        returned = self._parts.call_streams.receive_returns(frame)
        return () if returned is None else (returned,)

    def _on_control(self, frame: Frame) -> Sequence[ConnectionOutput]:
        message = control.decode_control(frame.payload)
        match message:
            case None:
                return ()  # newer peers may send messages unknown here
            case control.CancelMessage() | control.CloseCallStreamMessage():
                return self._parts.inbound.cancel(message)
            case control.OpenCallStreamMessage():
                return (self._parts.inbound.open_call_stream(message),)
            case control.RecallCallsMessage():
                return self._parts.inbound.recall(message)
            case control.ProgressMessage(task_id, share, remark):
                job = self._parts.outbound.job_of(task_id)
                return () if job is None else (CallProgress(*job, share, remark),)
            case control.BlobMissingMessage(digest):
                return (BlobMissing(digest),)
            case control.DismissedMessage(reason):
                self._on_refused(reason)
                return (Close(reason),)
            case (
                control.OfferMessage()
                | control.DrainingMessage()
                | control.LoadReportMessage()
            ):
                return self._parts.state.receive(message)

    def _on_heartbeat(self, frame: Frame) -> Sequence[ConnectionOutput]:
        self._parts.liveness.on_heartbeat(frame.payload)
        return ()

    def _on_blob(self, frame: Frame) -> Sequence[ConnectionOutput]:
        return (self._blobs.complete(frame),)


def _handle(handlers: FrameHandlers, frame: Frame) -> Sequence[ConnectionOutput]:
    handler = handlers.get(frame.type)
    return _other(frame) if handler is None else handler(frame)


def _other(frame: Frame) -> Sequence[ConnectionOutput]:
    """Return what follows from a frame without a handler.

    Raises PeerError for collectives: to ignore one would leave its sender waiting.
    """
    if frame.type in _COLLECTIVE_FRAMES:
        raise PeerError(
            f"a {frame.type.name} frame: no group of ranks is here, only a port for "
            "jobs; each rank of a training run has a port of its own"
        )
    return (Notice(f"ignored a frame of type {frame.type.name}"),)


def _result_in(frame: Frame) -> TaskResult:
    """Return the result in a frame, or the error for one that is too large.

    Raises PeerError if it is malformed.
    """
    if not frame.dropped:
        return decode_result(frame.payload)
    task_id = task_id_at_start(frame.payload)
    if task_id is None:
        size = len(frame.payload) + frame.dropped
        raise PeerError(f"{size} bytes that do not begin with a task's id")
    error = result_too_large(len(frame.payload) + frame.dropped)
    return TaskResult(task_id, Raw(NIL), error_text(error))


def _on_task_result(
    parts: ConnectionParts, result: TaskResult
) -> Sequence[ConnectionOutput]:
    """Return the result of a job, or of a call in a call stream."""
    return [
        *parts.outbound.receive_result(result),
        *parts.call_streams.receive_result(result),
    ]


def _is_array(payload: Payload) -> bool:
    """Say whether a MessagePack payload is an array."""
    return len(payload) > 0 and payload[0] in ARRAY_LEADS
