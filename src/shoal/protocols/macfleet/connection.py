"""A connection whose handshake is complete: it sends and receives tasks and results."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from msgspec import Raw

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Event,
    Failed,
    PushCalls,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, CallStream, Task
from shoal.protocols.macfleet.codec import tasks
from shoal.protocols.macfleet.codec.chunks import ChunkJoiner
from shoal.protocols.macfleet.codec.frames import Frame, FrameType
from shoal.protocols.macfleet.codec.values import NIL
from shoal.protocols.macfleet.function_probe import FunctionProbe
from shoal.protocols.macfleet.jobs import FleetInboundJobs, FleetOutboundJobs
from shoal.protocols.macfleet.local_node import FleetLocalNode, FleetRole
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.seam.session import Bulk, Close, Notice, Output, Send

ConnectionOutput: TypeAlias = Event | Command | Output

ACCEPTED_MESSAGES: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, PushCalls, CancelCalls),
        *(AnswerChunk, Completed, Rejected, Failed, CallsReturned),
    }
)

SILENCE_MAX = 10.0  # seconds for which a frame is a sign of life
CHECK_INTERVAL = 1.0  # seconds between looks into the registry

_COLLECTIVE_FRAMES = frozenset(
    {
        *(FrameType.TENSOR, FrameType.GRADIENT, FrameType.COMPRESSED_GRADIENT),
        FrameType.BARRIER,
    }
)


class FleetLiveness:
    """Detects a peer that is gone although its connection is still open.

    MacFleet's programs need not send anything there; they are gone when the fleet's
    gossip says so, unless frames of theirs still arrive.
    """

    def __init__(self, registry: FleetRegistry, node_id: str, now: float) -> None:
        self.deadline = now + CHECK_INTERVAL
        self._registry = registry
        self._node_id = node_id
        self._last_received = now

    def on_activity(self, now: float) -> None:
        """Record that a frame has arrived."""
        self._last_received = now

    def lost_reason(self, now: float) -> str:
        """Return why the peer counts as gone; empty: it does not."""
        if now < self.deadline:
            return ""
        self.deadline = now + CHECK_INTERVAL
        silent = now - self._last_received >= SILENCE_MAX
        failed = silent and self._registry.has_failed(self._node_id)
        return "its heartbeats have stopped" if failed else ""


class FleetConnection:
    """The exchange with one peer.

    Messages about jobs sent to the peer are events; its own requests are commands.
    After it returns Close it sends and receives nothing more.
    """

    def __init__(self, local: FleetLocalNode, peer_id: str, now: float) -> None:
        self._role = local.role
        self._outbound = FleetOutboundJobs(local.member.random_bytes)
        self._probe = FunctionProbe(self._outbound.next_id(), local.slots)
        self._inbound = FleetInboundJobs(local.role)
        self._liveness = FleetLiveness(local.registry, peer_id, now)
        self._joiner = ChunkJoiner()
        self._ignored: set[FrameType] = set()  # reported already
        # Events that arose while sending, not yet returned.
        self._pending: list[Event | Command] = []
        self._pending_since = 0.0
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due next; None: never."""
        if self._closed:
            return None
        if self._pending:
            return self._pending_since
        dues = (
            *(self._liveness.deadline, self._joiner.deadline),
            *(self._inbound.due, self._outbound.due),
        )
        return min((due for due in dues if due is not None), default=None)

    def start(self) -> Sequence[Output]:
        """Return the first messages to the peer."""
        is_coordinator = self._role is FleetRole.COORDINATOR
        return (self._probe.encode_request(),) if is_coordinator else ()

    def tick(self, now: float) -> Sequence[ConnectionOutput]:
        """Handle time passing: liveness, late chunks, tasks that time out."""
        if self._closed:
            return ()
        outputs: list[ConnectionOutput] = [*self._pending]
        self._pending.clear()
        if reason := self._liveness.lost_reason(now) or self._joiner.late_reason(now):
            return [*outputs, self._close(reason)]
        return [*outputs, *self._inbound.expire(now), *self._outbound.expire(now)]

    def receive(self, frame: Frame, now: float) -> Sequence[ConnectionOutput]:
        """Handle a frame; nothing follows from a chunk until the last.

        Other frame types are ignored, as upstream ignores them, but for collectives.

        Raises PeerError if it violates the protocol; the connection then ends.
        """
        self._liveness.on_activity(now)
        if frame.type in (FrameType.TASK, FrameType.RESULT):
            whole = self._joiner.join(frame, now)
            if whole is None:
                return ()
            if frame.type is FrameType.TASK:
                return (self._inbound.receive_task(whole, now),)
            return self._receive_result(whole)
        if frame.type in _COLLECTIVE_FRAMES:
            # To ignore one would leave its sender waiting.
            raise PeerError(
                f"a {frame.type.name} frame: no group of ranks is here, only a port "
                "for jobs; each rank of a training run has a port of its own"
            )
        if frame.type is FrameType.HEARTBEAT or frame.type in self._ignored:
            return ()
        self._ignored.add(frame.type)
        return (Notice(f"ignored a frame of type {frame.type.name}"),)

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

    def _encode(
        self, message: Event | Command, now: float
    ) -> Iterable[ConnectionOutput]:
        """Return the frames of a message, and events that follow at once."""
        match message:
            case RunJob(work=Call() | Task() as work):
                return (self._outbound.send(message, work, now),)
            case RunJob(work=CallStream() as work):
                return self._outbound.open_stream(message, work, now)
            case PushCalls():
                return self._outbound.push(message, now)
            case CancelCalls():
                self._outbound.recall(message)
                return ()
            case CancelJob():
                return self._outbound.cancel(message)
            case Completed() | Rejected() | Failed():
                return self._inbound.send_result(message)
            case Dismiss(reason):
                return (self._close(reason),)
            case AnswerChunk() | CallsReturned():
                return ()  # a function's value is returned whole, with its end
            case _:
                raise Unsupported("MacFleet has no message for that")

    def _receive_result(self, frame: Frame) -> Sequence[ConnectionOutput]:
        """Handle a result; one that is malformed or too large fails its task."""
        if frame.dropped:
            size = len(frame.payload) + frame.dropped
            task_id = tasks.task_id_at_start(frame.payload)
            reason = f"{size} bytes that do not begin with a task's id"
            error = tasks.error_text(tasks.result_too_large(size))
        else:
            try:
                return self._on_result(tasks.decode_result(frame.payload))
            except PeerError as malformed:
                task_id, reason = tasks.task_id_in(frame.payload), str(malformed)
                error = f"the worker's result: {reason}"
        if task_id is None:
            return (Notice(f"ignored a result: {reason}"),)
        return self._on_result(tasks.TaskResult(task_id, Raw(NIL), error))

    def _on_result(self, result: tasks.TaskResult) -> Sequence[Event]:
        offer = self._probe.offer_from(result)
        return self._outbound.receive_result(result) if offer is None else (offer,)

    def _close(self, reason: str) -> Close:
        self._closed = True
        return Close(reason)
