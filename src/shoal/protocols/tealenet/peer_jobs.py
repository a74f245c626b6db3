"""The jobs of one session: those of the peer, and those submitted to it."""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import AnswerChunk, CancelJob, Event, Rejected, RunJob
from shoal.protocols.seam.session import Notice, Output, Send
from shoal.protocols.tealenet.codec.envelope import BadMessage
from shoal.protocols.tealenet.codec.messages import (
    HeartbeatAck,
    InferenceCancel,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
)
from shoal.protocols.tealenet.codec.scalars import ErrorCode
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.inbound_jobs import JobReport, TealeInboundJobs
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.outbound_jobs import TealeOutboundJobs
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import PeerSoftware, TealePeer

JobMessage: TypeAlias = (
    InferenceRequest | InferenceComplete | InferenceError | InferenceCancel | LoadModel
)


class PeerJobs:
    """Jobs in both directions.

    ``pending``: events that sending caused, since ``pending_since``; the session
    returns them at its next tick.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        profile: LinkProfile,
        form: PayloadForm,
        heartbeats: HeartbeatSender,
    ) -> None:
        self.outbound = TealeOutboundJobs(local, profile, form)
        self._inbound = TealeInboundJobs(local, form)
        self._heartbeats = heartbeats
        self.pending: list[Rejected | CancelJob] = []
        self.pending_since = 0.0
        self._acks = 0

    @property
    def inbound_count(self) -> int:
        """How many of the peer's jobs are open."""
        return self._inbound.open_count

    def receive(
        self, message: JobMessage, peer: TealePeer, now: float
    ) -> Sequence[Event | RunJob | CancelJob | Output]:
        """Process a message about a job; ``outbound`` reads chunks."""
        match message:
            case InferenceRequest():
                job = self._inbound.receive(message, peer, self._heartbeats.slots, now)
                self._update_load(now)
                return (Send(job) if isinstance(job, bytes) else job,)
            case InferenceComplete():
                return self.outbound.receive_complete(message, peer)
            case InferenceError():
                return self.outbound.receive_error(message, peer)
            case InferenceCancel():
                cancelled = self._inbound.cancel(message)
                self._update_load(now)
                return () if cancelled is None else (cancelled,)
            case LoadModel():
                models = self._heartbeats.models
                return (Send(self._inbound.load_model(message, peer, models)),)

    def reject_invalid(
        self, error: BadMessage, *, answer: bool
    ) -> Sequence[Event | Output]:
        """End the job of an invalid message; ``answer``: refuse an invalid request."""
        notice = Notice(f"message ignored: {error}")
        is_request = error.kind == "inferenceRequest" and error.request_id
        if not is_request or not answer:
            return (notice, *self.outbound.fail_unreadable(error))
        code = ErrorCode.INTERNAL_ERROR
        refusal = self._inbound.refuse(error.request_id, str(error), code)
        return (notice, Send(refusal))

    def receive_ack(
        self, ack: HeartbeatAck, peer: TealePeer, now: float
    ) -> Sequence[Event | Output]:
        """Process the answer to a heartbeat: it may show that jobs were dropped."""
        self._acks += 1
        if ack.is_generating or ack.queue_depth:
            return ()
        outputs: list[Event | Output] = []
        unread = self._heartbeats.unread
        for job in self.outbound.withdraw_unread(self._acks + unread):
            outputs += self.submit(job, peer, now)
        if peer.software is PeerSoftware.RUST:
            outputs += self.outbound.reject_dropped(self._acks)
        return outputs

    def submit(self, job: RunJob, peer: TealePeer, now: float) -> Sequence[Output]:
        """Submit a job to the peer; a job that cannot be encoded is rejected."""
        try:
            return (Send(self.outbound.request(job, peer, self._heartbeats.sent)),)
        except PeerError as error:
            self._defer(Rejected(job.job_id, job.lease, str(error)), now)
            return ()

    def cancel(self, job: CancelJob, peer: TealePeer) -> Sequence[Output]:
        """Cancel a job at the peer."""
        message = self.outbound.cancel(job, peer)
        return () if message is None else (Send(message),)

    def report(self, event: JobReport, peer: TealePeer, now: float) -> Sequence[Output]:
        """Report on one of the peer's jobs; too large a report fails the job."""
        try:
            messages = self._inbound.report(event, peer, self._heartbeats.offers, now)
        except PeerError as error:
            message, cancel = self._inbound.fail(event, str(error), peer)
            self._defer(cancel, now)
            messages = (message,)
        if not isinstance(event, AnswerChunk):
            self._update_load(now)
        return [Send(message) for message in messages]

    # Private parts, in the order in which they are called.

    def _update_load(self, now: float) -> None:
        self._heartbeats.set_open_jobs(self._inbound.open_count, now)

    def _defer(self, event: Rejected | CancelJob, now: float) -> None:
        self.pending.append(event)
        self.pending_since = now
