"""Jobs that a peer submits to this end, and the reports about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain import vocabulary as words
from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.work import ANY_MODEL
from shoal.protocols.seam.session import Notice
from shoal.protocols.tealenet.admission import MAY_NOT_SUBMIT
from shoal.protocols.tealenet.codec.chats import read_chat, wants_usage
from shoal.protocols.tealenet.codec.chunks import ChunkWriter
from shoal.protocols.tealenet.codec.envelope import PayloadForm
from shoal.protocols.tealenet.codec.messages import (
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    ModelLoaded,
    ModelLoadError,
)
from shoal.protocols.tealenet.codec.scalars import (
    EXACT_MAX,
    TEXT_MAX,
    ErrorCode,
    normalized_id,
    well_formed,
)
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import TealePeer

ONLY_LEASE = LeaseNumber(1)  # a peer submits each request once
OPEN_MAX = 256  # open requests of one peer, or as many as the slots on offer
UNNAMED_MODEL = "any"  # the model in the answer to a request without one

WORKER_FAILED = "the worker failed; the same request may succeed if repeated"

JobReport: TypeAlias = (
    words.AnswerChunk | words.Completed | words.Rejected | words.Failed
)


@dataclass(slots=True)
class _InboundJob:
    """An open request; ``request_id`` is as the peer wrote it."""

    request_id: str
    model: str
    writer: ChunkWriter


class TealeInboundJobs:
    """The jobs that the peer has submitted in one session.

    ``heartbeats`` has the offers of this end, and notifies the peer when it is busy.
    """

    def __init__(
        self, local: TealeLocalNode, form: PayloadForm, heartbeats: HeartbeatSender
    ) -> None:
        self._local = local
        self._form = form
        self._heartbeats = heartbeats
        self._jobs: dict[str, _InboundJob] = {}  # by the request's id in upper case

    def __len__(self) -> int:
        return len(self._jobs)

    def receive(
        self, message: InferenceRequest, peer: TealePeer, now: float
    ) -> words.RunJob | Notice | bytes:
        """Return the requested job, or the encoded error that refuses it."""
        key = normalized_id(message.request_id)
        if key in self._jobs:
            # An error would end the first request.
            return Notice(f"duplicate request {message.request_id!a} ignored")
        if not peer.submits_jobs:
            why = peer.refusal or MAY_NOT_SUBMIT
            return self.refuse(message.request_id, why, ErrorCode.UNAVAILABLE)
        limit = max(OPEN_MAX, self._heartbeats.slots)
        if len(self._jobs) >= limit:
            why = f"the peer has {limit} open requests already"
            return self.refuse(message.request_id, why, ErrorCode.QUEUE_FULL)
        chat = read_chat(message.request)
        model = chat.model
        writer = ChunkWriter(
            message.request_id,
            UNNAMED_MODEL if model == ANY_MODEL else model,
            int(now + self._local.epoch),
            usage=wants_usage(message),
            streaming=message.streaming,
            flat=self._form.flat,
        )
        self._jobs[key] = _InboundJob(message.request_id, model, writer)
        self._heartbeats.set_open_jobs(len(self._jobs), now)
        return words.RunJob(JobId(message.request_id), ONLY_LEASE, chat)

    def report(
        self, event: JobReport, now: float
    ) -> tuple[Sequence[bytes], words.CancelJob | None]:
        """Encode a report for the peer; nothing if the job has ended.

        A piece that is too large to send fails the job, which is then to be cancelled.
        """
        job = self._jobs.get(normalized_id(event.job_id))
        if job is None or event.lease != ONLY_LEASE:
            return (), None
        cancelled = None
        try:
            messages = self._messages(job, event)
        except PeerError as error:
            failed = self.refuse(job.request_id, str(error), ErrorCode.INTERNAL_ERROR)
            messages = [failed]
            cancelled = words.CancelJob(event.job_id, event.lease)
        if cancelled is not None or not isinstance(event, words.AnswerChunk):
            del self._jobs[normalized_id(event.job_id)]
            self._heartbeats.set_open_jobs(len(self._jobs), now)
        return messages, cancelled

    def load_model(self, message: LoadModel, peer: TealePeer) -> bytes:
        """Return whether a model is on offer; the request loads nothing."""
        request_id, model = message.request_id, message.model_id
        answer: ModelLoaded | ModelLoadError
        if not peer.submits_jobs:
            answer = ModelLoadError(request_id, model, peer.refusal or MAY_NOT_SUBMIT)
        elif model in self._heartbeats.models:
            answer = ModelLoaded(request_id, model, 0)
        else:
            answer = ModelLoadError(request_id, model, "the model is not on offer")
        return self._form.encode(answer)

    def refuse(self, request_id: str, why: str, code: ErrorCode) -> bytes:
        """Return the error that refuses a request, or ends it."""
        error = InferenceError(request_id, well_formed(why[:TEXT_MAX]), code)
        return self._form.encode(error)

    # Private parts, in the order in which they are called.

    def _messages(self, job: _InboundJob, event: JobReport) -> Sequence[bytes]:
        """Encode a report.  Raises PeerError if a piece is too large to send."""
        match event:
            case words.AnswerChunk(pieces=pieces):
                return job.writer.write(pieces)
            case words.Completed(rest=rest, finish_reason=reason, usage=usage):
                complete = InferenceComplete(job.request_id)
                if usage is not None:
                    complete = InferenceComplete(
                        job.request_id,
                        min(usage.prompt_tokens, EXACT_MAX),
                        min(usage.completion_tokens, EXACT_MAX),
                    )
                return [
                    *(job.writer.write(rest) if rest else ()),
                    *job.writer.write_end(reason, usage),
                    self._form.encode(complete),
                ]
            case words.Rejected(reason=reason):
                code = self._rejection_code(job)
                return [self.refuse(job.request_id, reason, code)]
            case words.Failed(error=why, fault=fault):
                if fault in (Fault.WORKER, Fault.ENGINE):
                    why = WORKER_FAILED
                return [self.refuse(job.request_id, why, ErrorCode.INTERNAL_ERROR)]

    def _rejection_code(self, job: _InboundJob) -> ErrorCode:
        if job.model not in (ANY_MODEL, *self._heartbeats.models):
            return ErrorCode.MODEL_NOT_LOADED
        full = len(self._jobs) > self._heartbeats.slots
        return ErrorCode.QUEUE_FULL if full else ErrorCode.UNAVAILABLE
