"""The session with one peer: the same on a local network and through a relay.

Both ends are alike.  A message is the bytes of one JSON text.  Framing and encryption
belong to the layer that carries the messages.
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
from shoal.protocols.seam.multi_peer import PeerJoined
from shoal.protocols.seam.session import Close, Data, Notice, Output, Send
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
from shoal.protocols.tealenet.codec.model_sharing import (
    MODEL_WORDS,
    ModelSharingMessage,
    RawChunkReceiver,
    encode_model_word,
    read_model_message,
)
from shoal.protocols.tealenet.codec.scalars import ErrorCode
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.heartbeat import HeartbeatSender, PeerLiveness
from shoal.protocols.tealenet.inbound_jobs import JobReport, TealeInboundJobs
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.outbound_jobs import TealeOutboundJobs
from shoal.protocols.tealenet.peer import PeerDescription, TealeConnection, TealePeer
from shoal.protocols.tealenet.peer_state import TealePeerState
from shoal.protocols.tealenet.session_setup import SessionSetup

FromPeer: TypeAlias = PeerJoined | Event | Command

INVALID_MAX = 100  # messages in a row that are no good, until we hang up

SENDABLE: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss),
        *(OffersChanged, LoadChanged, Draining, HealthReported),
        *(AnswerChunk, Completed, Rejected, Failed),
    }
)


class TealePeerSession:
    """What is said with one peer.

    Words about what we asked it for are events, and what it asks us for are commands;
    Met comes first.  What it returns besides is for whoever carries its messages: after
    a Close it says and hears nothing more.  Nothing here waits, so that any number of
    jobs go on at a time in either direction.

    Args:
        desk: what tells of other connections to the same device; None where the carrier
            sees to that.
    """

    def __init__(
        self,
        own: TealeLocalNode,
        connection: TealeConnection,
        profile: LinkProfile,
        device_connections: DeviceConnections | None = None,
    ) -> None:
        self.accepts = SENDABLE | (
            MODEL_WORDS if profile.shares_models else frozenset()
        )
        self._own = own
        self._connection = connection
        self._profile = profile
        self._heartbeats = HeartbeatSender(own, profile, initiates=connection.dialled)
        self._setup = SessionSetup(
            own, connection, profile, device_connections, self._heartbeats
        )
        self._outbound = TealeOutboundJobs(own, profile)
        self._inbound = TealeInboundJobs(own)
        self._raw_chunks = RawChunkReceiver()
        self._peer_state: TealePeerState | None = (
            None  # from the time at which it is met
        )
        self._queued: list[FromPeer] = []  # to be heard, and came of what was said
        self._queued_at = 0.0
        self._invalid = 0  # messages in a row
        self._started = False
        self._closed = False

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; None before it was called, and after the end."""
        if self._closed or not self._started:
            return None
        if self._queued:
            return self._queued_at
        # Asked for after each token, and so in plain steps.
        standing, due = self._peer_state, self._heartbeats.due
        limit = self._setup.deadline if standing is None else standing.deadline
        if limit is None or due is None:
            return due if limit is None else limit
        return due if due < limit else limit

    @property
    def admitted(self) -> bool:
        """Whether the peer has said who it is, and is let in."""
        return self._setup.admitted

    def tick(self, now: float) -> Sequence[FromPeer | Output]:
        """Begin, when it is called for the first time; then act on time passing."""
        if self._closed:
            return ()
        outputs: list[FromPeer | Output] = [*self._queued]
        self._queued.clear()
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
        """Take the messages that arrived together.

        One that is no good is answered, if it can be, and the others count.
        """
        outputs: list[FromPeer | Output] = []
        asking = self._outbound
        asking.begin_batch()
        for data in batch:
            if self._closed:
                break
            if self._raw_chunks.pending:
                outputs += self._receive_raw_chunk(data)
                continue
            # Nearly every message is one more piece of a text.
            more = asking.receive_text(data)
            if more is not None:
                self._invalid = 0
                outputs += more
                continue
            try:
                message = decode(data)
            except BadMessage as error:
                outputs += self._reject_invalid(error)
                continue
            self._invalid = 0
            if isinstance(message, InferenceChunk):
                outputs += asking.receive_chunk(message, data)
            elif message is not None:
                outputs += self._receive_message(message, now)
        return outputs

    def send(self, word: Event | Command, now: float) -> Sequence[Output]:
        """Say something to the peer.

        Raises Unsupported for what the wire has no words for.
        """
        if self._closed:
            return ()
        match word:
            case AnswerChunk() | Completed() | Rejected() | Failed():
                return self._send_report(word, now)
            case RunJob():
                return self._send_job(word, now)
            case CancelJob():
                return self._send_cancel(word)
            case Dismiss(reason):
                return self._dismiss(reason, now)
            case OffersChanged(offers):
                self._heartbeats.offers = offers
                return self._send_change(now)
            case LoadChanged(condition):
                self._heartbeats.condition = condition
                return self._send_change(now)
            case Draining(reason):
                self._heartbeats.draining = reason
                return self._send_heartbeat(now)
            case HealthReported(health):
                self._heartbeats.machine_health = health
                return self._send_heartbeat(now)
            case ModelMessage():
                return self._send_model_word(word)
            case Joined() | ReceiptSent():
                raise Unsupported("a peer is told what there is, and no more")
            case CallMessage():
                raise Unsupported("this wire calls no functions")

    def update_description(
        self, described: PeerDescription, now: float
    ) -> Sequence[FromPeer | Output]:
        """Take what the carrier tells of a peer that does not say it itself."""
        standing = self._peer_state
        if self._closed or standing is None or standing.peer.runs_shoal:
            return ()
        if standing.peer.refusal:
            return ()
        events = standing.update_description(described)
        return [*events, *standing.load_events()]

    # The beginning.

    def _start(self, now: float) -> Sequence[FromPeer | Output]:
        begun = self._setup.start(now)
        if not isinstance(begun, TealePeerState):
            return self._note_close(begun)
        self._peer_state = begun
        peer = begun.peer
        if peer.refusal:
            return (Notice(f"{peer.name!a} is not let in: {peer.refusal}"),)
        described = begun.update_description(self._connection.description)
        return [self._joined(peer), *described, *begun.load_events()]

    def _note_close(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """Take note if one of the outputs ends the conversation."""
        self._closed = any(isinstance(each, Close) for each in outputs)
        return outputs

    def _joined(self, peer: TealePeer) -> PeerJoined:
        return PeerJoined(
            peer.name,
            cancels=ShoalFeature.CANCEL in peer.features,
            submits_jobs=peer.submits_jobs,
            grant=peer.grant,
            protection=self._connection.protection,
        )

    # What the peer says.

    def _receive_message(
        self, message: Message, now: float
    ) -> Sequence[FromPeer | Output]:
        """Take a message: before the peer is met only what makes it known."""
        if isinstance(message, Hello | HelloAck):
            # One that comes again later is ignored, as real peers do.
            late = self._peer_state is not None and self._profile.requires_hello
            return (
                ()
                if late
                else self._note_close(self._setup.receive_greeting(message, now))
            )
        if isinstance(message, Heartbeat | HeartbeatAck):
            return self._receive_heartbeat(message, now)
        if self._peer_state is None:
            return ()
        peer = self._peer_state.peer
        match message:
            case InferenceRequest():
                return self._receive_request(message, peer, now)
            case InferenceComplete():
                return self._outbound.receive_complete(message, peer)
            case InferenceError():
                return self._outbound.receive_error(message, peer)
            case InferenceCancel():
                cancelled = self._inbound.cancel(message)
                self._heartbeats.set_open_jobs(self._inbound.open_count, now)
                return () if cancelled is None else (cancelled,)
            case LoadModel():
                return (
                    Send(
                        self._inbound.load_model(message, peer, self._heartbeats.models)
                    ),
                )
            case InferenceChunk() | ModelLoaded() | ModelLoadError():
                return ()
            case _:
                return self._receive_model_message(message, peer)

    def _receive_heartbeat(
        self, beat: Heartbeat | HeartbeatAck, now: float
    ) -> Sequence[FromPeer | Output]:
        outputs: list[FromPeer | Output] = []
        if self._peer_state is None:
            try:
                met = self._setup.receive_first_heartbeat(beat, now)
            except PeerError as error:
                return (self._close(str(error)),)
            if met is None:
                return ()
            self._peer_state, said = met
            outputs += [self._joined(self._peer_state.peer), *said]
        standing = self._peer_state
        if standing.peer.refusal:
            return ()
        outputs += standing.receive_heartbeat(beat, self._outbound.count, now)
        self._setup.note_heartbeat(now)
        if standing.farewell is not None:
            self._own.on_rejected(standing.farewell)
            outputs.append(self._close(standing.farewell))
        elif isinstance(beat, Heartbeat):
            outputs.append(Send(self._heartbeats.heartbeat_ack(standing.peer, now)))
        return outputs

    def _receive_request(
        self, message: InferenceRequest, peer: TealePeer, now: float
    ) -> Sequence[FromPeer | Output]:
        taken = self._inbound.receive(message, peer, now)
        self._heartbeats.set_open_jobs(self._inbound.open_count, now)
        return (Send(taken) if isinstance(taken, bytes) else taken,)

    def _receive_model_message(
        self, message: ModelSharingMessage, peer: TealePeer
    ) -> Sequence[FromPeer | Output]:
        if self._raw_chunks.announces(message, peer):
            return ()
        return (read_model_message(message),) if self._shares_models_with(peer) else ()

    def _receive_raw_chunk(self, data: Data) -> Sequence[FromPeer | Output]:
        try:
            piece = self._raw_chunks.receive(data)
        except PeerError as error:
            return (self._close(str(error)),)
        standing = self._peer_state
        known = standing is not None and self._shares_models_with(standing.peer)
        return (piece,) if known else ()

    def _shares_models_with(self, peer: TealePeer) -> bool:
        return self._profile.shares_models and not peer.refusal

    def _reject_invalid(self, error: BadMessage) -> Sequence[FromPeer | Output]:
        """Answer a message that is no good; who sends nothing else is hung up on."""
        self._invalid += 1
        if self._invalid >= INVALID_MAX:
            return (self._close(f"{INVALID_MAX} invalid messages in a row"),)
        notice = Notice(f"message ignored: {error}")
        asked = error.kind == "inferenceRequest" and error.request_id
        if not asked or self._peer_state is None:
            return (notice, *self._outbound.fail_unreadable(error))
        code = ErrorCode.INTERNAL_ERROR
        refusal = self._inbound.refuse(error.request_id, str(error), code)
        return (notice, Send(refusal))

    # What we say.

    def _check_liveness(
        self, standing: TealePeerState, now: float
    ) -> Sequence[FromPeer | Output]:
        """Act on the peer's silence."""
        life = standing.liveness(now)
        if life is PeerLiveness.DISCONNECTED:
            if not self._profile.requires_hello and self._inbound.open_count:
                # It may only want to hear: gateways on a relay say nothing meanwhile.
                standing.note_alive(now)
                return ()
            return (self._close(f"silent for {self._profile.disconnected_after:g} s"),)
        return standing.load_events()

    def _send_heartbeat(self, now: float) -> Sequence[Output]:
        """Say how we are, if the peer is one to be told."""
        peer = self._setup.peer
        if peer is None or peer.refusal:
            return ()
        return (Send(self._heartbeats.heartbeat(peer, now)),)

    def _send_change(self, now: float) -> Sequence[Output]:
        """Tell what has changed, to whom it matters."""
        peer = self._setup.peer
        if peer is None or not peer.submits_jobs:
            return ()
        self._heartbeats.schedule_change(now)
        due = self._heartbeats.due
        return self._send_heartbeat(now) if due is not None and due <= now else ()

    def _send_job(self, job: RunJob, now: float) -> Sequence[Output]:
        assert self._peer_state is not None, "jobs are for peers that were met"
        try:
            return (Send(self._outbound.request(job, self._peer_state.peer)),)
        except PeerError as error:
            self._queue(Rejected(job.job_id, job.lease, str(error)), now)
            return ()

    def _send_cancel(self, job: CancelJob) -> Sequence[Output]:
        assert self._peer_state is not None, "jobs are for peers that were met"
        message = self._outbound.cancel(job, self._peer_state.peer)
        return () if message is None else (Send(message),)

    def _send_report(self, event: JobReport, now: float) -> Sequence[Output]:
        assert self._peer_state is not None, "only who was met has asked"
        peer = self._peer_state.peer
        try:
            said = self._inbound.report(event, peer, self._heartbeats.offers, now)
        except PeerError as error:
            message, cancel = self._inbound.fail(event, str(error), peer)
            self._queue(cancel, now)
            said = (message,)
        if not isinstance(event, AnswerChunk):
            self._heartbeats.set_open_jobs(self._inbound.open_count, now)
        return [Send(message) for message in said]

    def _send_model_word(self, word: ModelMessage) -> Sequence[Output]:
        if self._peer_state is None:
            return ()
        if not self._profile.shares_models:
            raise Unsupported("models are shared on local networks only")
        said = encode_model_word(word, self._peer_state.peer, self._own.flat)
        return [Send(message) for message in said]

    def _dismiss(self, reason: str, now: float) -> Sequence[Output]:
        """Hang up; a peer of ours is told why."""
        peer = self._setup.peer
        if peer is None or not peer.runs_shoal:
            return (self._close(reason),)
        return (
            Send(self._heartbeats.heartbeat(peer, now, reason)),
            self._close(reason),
        )

    def _queue(self, word: FromPeer, now: float) -> None:
        """Have something heard at the next tick, which is due at once."""
        self._queued.append(word)
        self._queued_at = now

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._setup.close()
        return Close(reason)
