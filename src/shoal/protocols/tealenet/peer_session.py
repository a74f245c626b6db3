"""The session with one peer, the same on a local network and through a relay.

Both ends play the same role.  A message is the bytes of one JSON text; framing and
encryption belong to the transport.
"""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import ModelMessage
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
)
from shoal.protocols.seam.peer_session import PeerDescribed, PeerJoined, PeerRefused
from shoal.protocols.seam.session import (
    Close,
    Data,
    Notice,
    Output,
    PeerProfile,
    Send,
)
from shoal.protocols.tealenet.codec.envelope import BadMessage, decode
from shoal.protocols.tealenet.codec.extension import ShoalFeature
from shoal.protocols.tealenet.codec.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloAck,
    InferenceCancel,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    Message,
    ModelLoaded,
    ModelLoadError,
)
from shoal.protocols.tealenet.greeting import read_greeting
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole
from shoal.protocols.tealenet.model_exchange import ModelExchange
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import PeerDescription, TealeConnection, TealePeer
from shoal.protocols.tealenet.peer_jobs import PeerJobs
from shoal.protocols.tealenet.peer_state import PeerLiveness, TealePeerState
from shoal.protocols.tealenet.session_setup import SessionSetup

FromPeer: TypeAlias = PeerJoined | PeerRefused | PeerDescribed | Event | Command

INVALID_MAX = 100  # consecutive invalid messages before the session closes

SENDABLE: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss),
        *(OffersChanged, LoadChanged, Draining, HealthReported),
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
        self._heartbeats = HeartbeatSender(
            local, profile, form, initiates=connection.dialled
        )
        self._setup = SessionSetup(
            local, connection, profile, device_connections, form, self._heartbeats
        )
        self._jobs = PeerJobs(local, profile, form, self._heartbeats)
        self._models = ModelExchange(profile, form)
        self.accepts = SENDABLE | self._models.accepts
        self._peer_state: TealePeerState | None = None  # until the setup is complete
        self._invalid = 0  # consecutive messages
        self._started = False
        self._closed = False

    def bind(self, binding: bytes) -> None:
        """Record the binding of the encrypted connection, before the first tick."""
        self._connection = self._connection.bound_to(binding)
        self._setup.bind(self._connection)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None before the first tick and after the end."""
        if self._closed or not self._started:
            return None
        if self._jobs.pending:
            return self._jobs.pending_since
        # Read after each token, and therefore written without ``min``.
        state, due = self._peer_state, self._heartbeats.due
        limit = self._setup.deadline if state is None else state.deadline
        if limit is None or due is None:
            return due if limit is None else limit
        return due if due < limit else limit

    @property
    def admitted(self) -> bool:
        """Whether the peer has introduced itself and was admitted."""
        return self._setup.admitted

    @property
    def is_anonymous(self) -> bool:
        """Whether the peer has presented no credential, or none yet."""
        return self._setup.peer is None or self._setup.peer.anonymous

    def learn_form(self, data: Data) -> None:
        """Adopt the form of a message that arrives before the first tick."""
        self._form.learn(data)

    def tick(self, now: float) -> Sequence[FromPeer | Output]:
        """Start the session at the first call; then handle deadlines."""
        if self._closed:
            return ()
        outputs: list[FromPeer | Output] = [*self._jobs.pending]
        self._jobs.pending.clear()
        if not self._started:
            self._started = True
            outputs += self._start(now)
        elif self._peer_state is not None:
            outputs += self._check_liveness(self._peer_state, now)
        else:
            outputs += self._note_close(self._setup.tick(now))
        due = self._heartbeats.due
        if due is not None and now >= due and not self._closed:
            outputs += self._send_heartbeat(now)
        return outputs

    def receive(self, batch: Sequence[Data], now: float) -> Sequence[FromPeer | Output]:
        """Process the messages that arrived together; an invalid one is skipped."""
        outputs: list[FromPeer | Output] = []
        outbound = self._jobs.outbound
        outbound.begin_batch()
        for data in batch:
            if self._closed:
                break
            if self._models.expects_raw:
                outputs += self._receive_raw_chunk(data)
                continue
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
            if isinstance(message, InferenceChunk):
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
                return self._jobs.report(message, self._joined_peer, now)
            case RunJob():
                return self._jobs.submit(message, self._joined_peer, now)
            case CancelJob():
                return self._jobs.cancel(message, self._joined_peer)
            case Dismiss(reason):
                return self._dismiss(reason, now)
            case OffersChanged(offers):
                before = self._heartbeats.models
                self._heartbeats.set_offers(offers)
                # Jobs may wait for a model that a worker has loaded.
                added = not self._heartbeats.models <= before
                is_worker = self._local.role is TealeRole.WORKER
                return self._send_change(now, at_once=added and is_worker)
            case LoadChanged(load):
                self._heartbeats.load = load
                return self._send_change(now)
            case Draining(reason):
                self._heartbeats.draining = reason
                return self._send_heartbeat(now)
            case HealthReported(health):
                self._heartbeats.machine_health = health
                return self._send_heartbeat(now)
            case ModelMessage():
                state = self._peer_state
                return () if state is None else self._models.send(message, state.peer)
            case Joined() | ReceiptSent():
                raise Unsupported(
                    f"TealeNet has no message for {type(message).__name__}"
                )
            case CallMessage():
                raise Unsupported("TealeNet does not support function calls")

    def probe(self, now: float) -> Sequence[Output]:
        """Make a Shoal peer show that it still has this session; others need not."""
        state = self._peer_state
        if self._closed or state is None or not state.peer.runs_shoal:
            return ()
        state.expect_answer(now)
        return self._send_heartbeat(now)

    def update_description(
        self, description: PeerDescription, now: float
    ) -> Sequence[FromPeer | Output]:
        """Apply what the relay reports about a peer that does not run Shoal."""
        state = self._peer_state
        if self._closed or state is None or state.peer.runs_shoal:
            return ()
        profile = state.describe(description.profile)
        if state.peer.refusal:
            return profile
        events = state.update_description(description)
        return [*profile, *events, *state.load_events()]

    def describe(self, profile: PeerProfile) -> Sequence[FromPeer]:
        """Apply what the relay says about a peer that reports its offers elsewhere."""
        state = self._peer_state
        if self._closed or state is None or state.peer.runs_shoal:
            return ()
        return state.describe(profile)

    # Setup.

    def _start(self, now: float) -> Sequence[FromPeer | Output]:
        started = self._setup.start(now)
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
            cancels=ShoalFeature.CANCEL in peer.features,
            submits_jobs=peer.submits_jobs,
            grant=peer.grant,
            protection=self._connection.protection,
            # On a relay this depends on whose relay it is.
            exclusive=peer.is_shoal_worker,
            respects_offers=peer.runs_shoal,
            paces_models=ShoalFeature.PULL in peer.features,
            public_key=peer.public_key.hex(),
        )

    # Receiving.

    def _receive_message(
        self, message: Message, now: float
    ) -> Sequence[FromPeer | Output]:
        """Process a message; before the peer has joined, only those of the setup."""
        if isinstance(message, Hello | HelloAck):
            # Real peers ignore a second one as well.
            if self._peer_state is not None and self._profile.requires_hello:
                return ()
            outputs = self._note_close(self._setup.receive_greeting(message, now))
            if self._peer_state is None:
                return outputs
            profile = self._peer_state.describe(read_greeting(message).profile)
            return [*profile, *outputs]
        if isinstance(message, Heartbeat | HeartbeatAck):
            return self._receive_heartbeat(message, now)
        if self._peer_state is None:
            return ()
        peer = self._peer_state.peer
        match message:
            case InferenceChunk() | ModelLoaded() | ModelLoadError():
                return ()
            case (
                InferenceRequest()
                | InferenceComplete()
                | InferenceError()
                | InferenceCancel()
                | LoadModel()
            ):
                return self._jobs.receive(message, peer, now)
            case _:
                return self._models.receive(message, peer)

    def _receive_heartbeat(
        self, heartbeat: Heartbeat | HeartbeatAck, now: float
    ) -> Sequence[FromPeer | Output]:
        outputs: list[FromPeer | Output] = []
        if self._peer_state is None:
            try:
                joined = self._setup.receive_first_heartbeat(heartbeat, now)
            except PeerError as error:
                return (self._close(str(error)),)
            if joined is None:
                return ()
            self._peer_state, events = joined
            outputs += [self._peer_joined(self._peer_state.peer), *events]
        state = self._peer_state
        if state.peer.refusal:
            return ()
        outputs += state.receive_heartbeat(heartbeat, self._jobs.outbound.count, now)
        self._setup.note_heartbeat(now)
        if state.farewell is not None:
            self._local.on_rejected(state.farewell)
            outputs.append(self._close(state.farewell))
        elif isinstance(heartbeat, Heartbeat):
            outputs.append(Send(self._heartbeats.heartbeat_ack(state.peer, now)))
        else:
            outputs += self._jobs.receive_ack(heartbeat, state.peer, now)
        return outputs

    def _receive_raw_chunk(self, data: Data) -> Sequence[FromPeer | Output]:
        assert self._peer_state is not None, "a message of the peer announced it"
        try:
            return self._models.receive_raw(data, self._peer_state.peer)
        except PeerError as error:
            return (self._close(str(error)),)

    def _reject_invalid(self, error: BadMessage) -> Sequence[FromPeer | Output]:
        """Answer an invalid message; after ``INVALID_MAX`` in a row, close."""
        self._invalid += 1
        if self._invalid >= INVALID_MAX:
            return (self._close(f"{INVALID_MAX} invalid messages in a row"),)
        return self._jobs.reject_invalid(error, answer=self._peer_state is not None)

    # Sending.

    @property
    def _joined_peer(self) -> TealePeer:
        assert self._peer_state is not None, "jobs belong to peers that have joined"
        return self._peer_state.peer

    def _check_liveness(
        self, state: TealePeerState, now: float
    ) -> Sequence[FromPeer | Output]:
        """Act on the peer's silence."""
        if state.liveness(now) is not PeerLiveness.DISCONNECTED:
            return state.load_events()
        plain = not state.peer.runs_shoal
        if plain and not self._profile.requires_hello and self._jobs.inbound_count:
            # Gateways on a relay send nothing while they wait for an answer.
            state.note_alive(now)
            return ()
        return (self._close(state.silence),)

    def _send_heartbeat(self, now: float) -> Sequence[Output]:
        peer = self._setup.peer
        if peer is None or peer.refusal:
            return ()
        return [Send(each) for each in self._heartbeats.heartbeat(peer, now)]

    def _send_change(self, now: float, *, at_once: bool = False) -> Sequence[Output]:
        """Announce a change, soon or ``at_once``, to a peer that may submit jobs."""
        peer = self._setup.peer
        if peer is None or not peer.submits_jobs:
            return ()
        self._heartbeats.schedule_change(now)
        due = self._heartbeats.due
        if due is None or not (at_once or due <= now):
            return ()
        return self._send_heartbeat(now)

    def _dismiss(self, reason: str, now: float) -> Sequence[Output]:
        """Close the session; a Shoal peer gets the reason first."""
        peer = self._setup.peer
        if peer is None or not peer.runs_shoal:
            return (self._close(reason),)
        farewell = self._heartbeats.heartbeat(peer, now, reason)
        return [*(Send(each) for each in farewell), self._close(reason)]

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._setup.close()
        return Close(reason)
