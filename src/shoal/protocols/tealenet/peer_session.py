"""The session with one peer, the same on a local network and through a relay.

Both ends play the same role.  A message is the bytes of one JSON text; framing and
encryption belong to the transport.
"""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallMessage,
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
    ReceiptSent,
    Rejected,
    RunJob,
    WakeMachine,
)
from shoal.protocols.seam.peer_session import PeerDescribed, PeerJoined, PeerRefused
from shoal.protocols.seam.session import Close, Data, Notice, Output, PeerProfile, Send
from shoal.protocols.tealenet.codec import messages
from shoal.protocols.tealenet.codec.envelope import BadMessage, PayloadForm, decode
from shoal.protocols.tealenet.codec.scalars import ErrorCode
from shoal.protocols.tealenet.handshake import (
    DeviceConnections,
    PeerHandshake,
    read_greeting,
)
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.inbound_jobs import JobReport, TealeInboundJobs
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.outbound_jobs import TealeOutboundJobs
from shoal.protocols.tealenet.peer import (
    LinkProfile,
    PeerDescription,
    PeerSoftware,
    TealeConnection,
    TealePeer,
)
from shoal.protocols.tealenet.peer_state import PeerLiveness, TealePeerState

FromPeer: TypeAlias = PeerJoined | PeerRefused | PeerDescribed | Event | Command

INVALID_MAX = 100  # consecutive invalid messages before the session closes

SENDABLE: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss),
        *(OffersChanged, LoadChanged, Draining),
        *(AnswerChunk, Completed, Rejected, Failed),
    }
)


class TealePeerSession:
    """State machine of the session with one peer.

    Answers to our jobs are events, and the peer's jobs are commands; PeerJoined comes
    first.  The other outputs are for the transport.  After a Close the session sends
    and receives nothing.  Any number of jobs run concurrently in both directions.

    Args:
        device_connections: the other connections to the same device; None where the
            transport allows one connection to each peer.
        form: the form of the last session at the dialled address; None: a new one.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        connection: TealeConnection,
        profile: LinkProfile,
        device_connections: DeviceConnections | None = None,
        form: PayloadForm | None = None,
    ) -> None:
        self._form = form = form or PayloadForm()
        form.start_session()
        self._local = local
        self._connection = connection
        self._profile = profile
        self._heartbeats = HeartbeatSender(local, profile, form)
        self._handshake = PeerHandshake(
            local, connection, profile, device_connections, form, self._heartbeats
        )
        self._outbound = TealeOutboundJobs(local, profile, form, self._heartbeats)
        self._inbound = TealeInboundJobs(local, form, self._heartbeats)
        self.accepts = SENDABLE
        if profile.shares_models:
            self.accepts |= messages.MODEL_MESSAGES
        self._peer_state: TealePeerState | None = None  # until the setup is complete
        self._pending: list[Rejected | CancelJob] = []  # events that sending caused
        self._pending_since = 0.0
        self._invalid = 0  # consecutive messages
        self._started = False
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None before the first tick and after the end."""
        if self._closed or not self._started:
            return None
        if self._pending:
            return self._pending_since
        # Read after each token, and therefore written without ``min``.
        state, due = self._peer_state, self._heartbeats.due
        limit = self._handshake.deadline if state is None else state.deadline
        if limit is None or due is None:
            return due if limit is None else limit
        return due if due < limit else limit

    @property
    def admitted(self) -> bool:
        """Whether the peer has introduced itself and was admitted."""
        return self._handshake.admitted

    def learn_form(self, data: Data) -> None:
        """Adopt the form of a message that arrives before the first tick."""
        self._form.learn(data)

    def tick(self, now: float) -> Sequence[FromPeer | Output]:
        """Start the session at the first call; then handle deadlines."""
        if self._closed:
            return ()
        outputs: list[FromPeer | Output] = [*self._pending]
        self._pending.clear()
        if not self._started:
            self._started = True
            outputs += self._start(now)
        elif self._peer_state is not None:
            outputs += self._check_liveness(self._peer_state, now)
        else:
            outputs += self._note_close(self._handshake.tick(now))
        due = self._heartbeats.due
        if due is not None and now >= due and not self._closed:
            outputs += self._send_heartbeat(now)
        return outputs

    def receive(self, batch: Sequence[Data], now: float) -> Sequence[FromPeer | Output]:
        """Process the messages that arrived together; an invalid one is skipped."""
        outputs: list[FromPeer | Output] = []
        outbound = self._outbound
        outbound.begin_batch()
        for data in batch:
            if self._closed:
                break
            # Fast path: nearly every message is the next text of an answer.
            chunks = outbound.receive_text(data)
            if chunks is not None:
                self._invalid = 0
                outputs += chunks
                continue
            self._form.learn(data)
            try:
                message = decode(data)
            except BadMessage as error:
                outputs += self._reject_invalid(error)
                continue
            self._invalid = 0
            if isinstance(message, messages.InferenceChunk):
                outputs += outbound.receive_chunk(message, data)
            elif message is not None:
                outputs += self._receive_message(message, now)
        return outputs

    def send(self, message: Event | Command, now: float) -> Sequence[Output]:
        """Send something to the peer.

        Raises Unsupported for types that the wire has no message for.
        """
        if self._closed:
            return ()
        match message:
            case AnswerChunk() | Completed() | Rejected() | Failed():
                return self._report(message, now)
            case RunJob():
                return self._submit(message, now)
            case CancelJob():
                self._outbound.cancel(message)
                return ()
            case Dismiss(reason):
                return (self._close(reason),)
            case OffersChanged(offers):
                before = self._heartbeats.models
                self._heartbeats.set_offers(offers)
                # Jobs may wait for a model that a worker has loaded.
                added = not self._heartbeats.models <= before
                return self._send_change(now, at_once=added and self._local.serves_only)
            case LoadChanged(load):
                self._heartbeats.set_load(load)
                return self._send_change(now)
            case Draining():
                self._heartbeats.draining = True
                return self._send_heartbeat(now)
            case ModelMessage() if self._peer_state is None:
                return ()
            case ModelMessage() if not self._profile.shares_models:
                raise Unsupported("models are shared on local networks only")
            case ModelMessage():
                return (Send(self._form.encode(messages.wire_message(message))),)
            case (
                HealthReported()
                | Joined()
                | ReceiptSent()
                | WakeMachine()
                | CallMessage()
            ):
                raise Unsupported(
                    f"TealeNet has no message for {type(message).__name__}"
                )

    def learn_software(self, software: PeerSoftware, profile: LinkProfile) -> None:
        """Apply what the peer runs, and how long it may be silent."""
        if self._peer_state is not None:
            self._peer_state.learn_software(software, profile)

    def update_description(
        self, description: PeerDescription, now: float
    ) -> Sequence[FromPeer | Output]:
        """Apply what the relay reports about the peer."""
        state = self._peer_state
        if self._closed or state is None:
            return ()
        profile = state.describe(description.profile)
        if state.peer.refusal:
            return profile
        events = state.update_description(description)
        return [*profile, *events, *state.load_events()]

    def describe(self, profile: PeerProfile) -> Sequence[FromPeer]:
        """Apply what the relay says about a peer that reports its offers elsewhere."""
        state = self._peer_state
        return () if self._closed or state is None else state.describe(profile)

    # Setup.

    def _start(self, now: float) -> Sequence[FromPeer | Output]:
        started = self._handshake.start(now)
        if not isinstance(started, TealePeerState):
            return self._note_close(started)
        self._peer_state = started
        peer, description = started.peer, self._connection.description
        profile = started.describe(description.profile)
        if peer.refusal:
            notice = Notice(f"{peer.name!a} is not admitted: {peer.refusal}")
            return (notice, PeerRefused(peer.name, peer.refusal), *profile)
        events = started.update_description(description)
        return [self._peer_joined(peer), *profile, *events, *started.load_events()]

    def _note_close(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """Mark the session as closed if one of the outputs is a Close."""
        self._closed = any(isinstance(each, Close) for each in outputs)
        return outputs

    def _peer_joined(self, peer: TealePeer) -> PeerJoined:
        return PeerJoined(
            peer.name,
            submits_jobs=peer.submits_jobs,
            protection=self._connection.protection,
        )

    # Receiving.

    def _receive_message(
        self, message: messages.Message, now: float
    ) -> Sequence[FromPeer | Output]:
        """Process a message; before the peer has joined, only those of the setup."""
        if isinstance(message, messages.Hello | messages.HelloAck):
            return self._receive_greeting(message, now)
        if self._peer_state is not None:
            return self._receive_from(self._peer_state, message, now)
        joined = self._handshake.join(now)
        if joined is None:
            return ()
        self._peer_state, events = joined
        peer_joined = self._peer_joined(self._peer_state.peer)
        rest = self._receive_from(self._peer_state, message, now)
        return [peer_joined, *events, *rest]

    def _receive_from(
        self, state: TealePeerState, message: messages.Message, now: float
    ) -> Sequence[FromPeer | Output]:
        """Process a message of a peer that has joined."""
        peer = state.peer
        match message:
            case messages.Heartbeat() | messages.HeartbeatAck():
                return self._receive_heartbeat(state, message, now)
            case (
                messages.InferenceChunk()
                | messages.Hello()
                | messages.HelloAck()
                | messages.ModelLoaded()
                | messages.ModelLoadError()
            ):
                return ()
            case messages.InferenceRequest():
                job = self._inbound.receive(message, peer, now)
                return (Send(job) if isinstance(job, bytes) else job,)
            case messages.InferenceComplete():
                return self._outbound.receive_complete(message)
            case messages.InferenceError():
                return self._outbound.receive_error(message)
            case messages.LoadModel():
                return (Send(self._inbound.load_model(message, peer)),)
            case _:
                return self._receive_model_message(message, peer)

    def _receive_greeting(
        self, message: messages.Hello | messages.HelloAck, now: float
    ) -> Sequence[FromPeer | Output]:
        # Real peers ignore a second one as well.
        if self._peer_state is not None and self._profile.requires_hello:
            return ()
        outputs = self._note_close(self._handshake.receive_greeting(message, now))
        if self._peer_state is None:
            return outputs
        return [*self._peer_state.describe(read_greeting(message).profile), *outputs]

    def _receive_heartbeat(
        self,
        state: TealePeerState,
        heartbeat: messages.Heartbeat | messages.HeartbeatAck,
        now: float,
    ) -> Sequence[FromPeer | Output]:
        if state.peer.refusal:
            return ()
        events = state.receive_heartbeat(heartbeat, len(self._outbound), now)
        outputs: list[FromPeer | Output] = [*events]
        self._handshake.note_heartbeat(now)
        if isinstance(heartbeat, messages.Heartbeat):
            return [*outputs, Send(self._heartbeats.heartbeat_ack(state.peer, now))]
        if not self._outbound.receive_ack(heartbeat):
            return outputs
        # An idle peer shows which jobs it has dropped.
        for job in self._outbound.withdraw_unread():
            outputs += self._submit(job, now)
        if state.peer.software is PeerSoftware.RUST:
            outputs += self._outbound.reject_dropped()
        return outputs

    def _receive_model_message(
        self, message: messages.ModelSharingMessage, peer: TealePeer
    ) -> Sequence[FromPeer | Output]:
        """Return a message's meaning.

        On a link that shares no models, a query or a request gets the answer that the
        model is not available: the peer would wait for another one.
        """
        meaning = messages.read_model_message(message)
        if self._profile.shares_models:
            return () if peer.refusal else (meaning,)
        if not isinstance(meaning, ModelQuery | ModelRequest):
            return ()
        answer = messages.wire_message(ModelAnswer(meaning.model, available=False))
        return (Send(self._form.encode(answer)),)

    def _reject_invalid(self, error: BadMessage) -> Sequence[FromPeer | Output]:
        """Answer an invalid message; after ``INVALID_MAX`` in a row, close."""
        self._invalid += 1
        if self._invalid >= INVALID_MAX:
            return (self._close(f"{INVALID_MAX} invalid messages in a row"),)
        notice = Notice(f"message ignored: {error}")
        is_request = error.kind == "inferenceRequest" and error.request_id
        if not is_request or self._handshake.peer is None:
            return (notice, *self._outbound.fail_unreadable(error))
        code = ErrorCode.INTERNAL_ERROR
        refusal = self._inbound.refuse(error.request_id, str(error), code)
        return (notice, Send(refusal))

    # Sending.

    def _submit(self, job: RunJob, now: float) -> Sequence[Output]:
        """Submit a job to the peer; a job that cannot be encoded is rejected."""
        try:
            return (Send(self._outbound.request(job)),)
        except PeerError as error:
            self._defer(Rejected(job.job_id, job.lease, str(error)), now)
            return ()

    def _report(self, event: JobReport, now: float) -> Sequence[Output]:
        """Report on one of the peer's jobs; too large a report fails the job."""
        reports, cancelled = self._inbound.report(event, now)
        if cancelled is not None:
            self._defer(cancelled, now)
        return [Send(message) for message in reports]

    def _defer(self, event: Rejected | CancelJob, now: float) -> None:
        """Keep an event for the next tick."""
        self._pending.append(event)
        self._pending_since = now

    def _check_liveness(
        self, state: TealePeerState, now: float
    ) -> Sequence[FromPeer | Output]:
        """Act on the peer's silence."""
        if state.liveness(now) is not PeerLiveness.DISCONNECTED:
            return state.load_events()
        waits = len(self._inbound) and not len(self._outbound)
        if waits or self._outbound.has_progressed():
            # Gateways and small clients send nothing while they wait for an answer,
            # and small servers nothing else while they write one.
            state.note_alive(now)
            return ()
        return (self._close(state.silence),)

    def _send_heartbeat(self, now: float) -> Sequence[Output]:
        peer = self._handshake.peer
        if peer is None or peer.refusal:
            return ()
        return [Send(each) for each in self._heartbeats.heartbeat(peer, now)]

    def _send_change(self, now: float, *, at_once: bool = False) -> Sequence[Output]:
        """Announce a change, soon or ``at_once``, to a peer that may submit jobs."""
        peer = self._handshake.peer
        if peer is None or not peer.submits_jobs:
            return ()
        self._heartbeats.schedule_change(now)
        due = self._heartbeats.due
        if due is None or not (at_once or due <= now):
            return ()
        return self._send_heartbeat(now)

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._handshake.close()
        return Close(reason)
