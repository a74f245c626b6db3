"""Jobs that a peer submits to this end, and the reports about them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from msgspec import UNSET

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece, Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import ANY_MODEL, Task, Work
from shoal.domain.worker import Offer
from shoal.protocols.seam.answer_receipts import ReceiptSigner
from shoal.protocols.seam.session import Notice
from shoal.protocols.tealenet.admission import MAY_NOT_SUBMIT
from shoal.protocols.tealenet.codec.chunks import ChunkWriter
from shoal.protocols.tealenet.codec.envelope import BadMessage
from shoal.protocols.tealenet.codec.extension import (
    completion_extension,
    error_extension,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import (
    InferenceCancel,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    ModelLoaded,
    ModelLoadError,
)
from shoal.protocols.tealenet.codec.requests import (
    read_request,
    receipt_job_name,
    wants_usage,
)
from shoal.protocols.tealenet.codec.scalars import (
    EXACT_MAX,
    TEXT_MAX,
    ErrorCode,
    ShoalField,
    normalized_id,
    well_formed,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import TealePeer

OPEN_MAX = 256  # open requests of one peer, or as many as the slots on offer
UNNAMED_MODEL = "any"  # the model in the answer to a request without one

WORKER_FAILED = "the worker failed; the same request may succeed if repeated"

JobReport: TypeAlias = AnswerChunk | Completed | Rejected | Failed


@dataclass(slots=True)
class _InboundJob:
    """An open request; ``request_id`` is as the peer wrote it."""

    request_id: str
    lease: LeaseNumber
    work: Work
    writer: ChunkWriter
    receipt_signer: ReceiptSigner


class TealeInboundJobs:
    """The jobs that the peer has submitted in one session."""

    def __init__(self, local: TealeLocalNode, form: PayloadForm) -> None:
        self._local = local
        self._form = form
        self._jobs: dict[str, _InboundJob] = {}  # by the request's id in upper case

    @property
    def open_count(self) -> int:
        """How many of the peer's requests are open."""
        return len(self._jobs)

    def receive(
        self, message: InferenceRequest, peer: TealePeer, slots: int, now: float
    ) -> RunJob | Notice | bytes:
        """Return the requested job, or the encoded error that refuses it.

        ``slots``: how many this end offers.
        """
        key = normalized_id(message.request_id)
        if key in self._jobs:
            # An error would end the first request.
            return Notice(f"duplicate request {message.request_id!a} ignored")
        if not peer.submits_jobs:
            why = peer.refusal or MAY_NOT_SUBMIT
            return self.refuse(message.request_id, why, ErrorCode.UNAVAILABLE)
        limit = max(OPEN_MAX, slots)
        if len(self._jobs) >= limit:
            why = f"the peer has {limit} open requests already"
            return self.refuse(message.request_id, why, ErrorCode.QUEUE_FULL)
        try:
            job = read_request(message, extended=peer.runs_shoal)
        except BadMessage as error:
            return self.refuse(message.request_id, str(error), ErrorCode.INTERNAL_ERROR)
        self._jobs[key] = _InboundJob(
            message.request_id,
            job.lease,
            job.work,
            self._writer(message, job.work, peer, now),
            self._receipt_signer(message, job, peer),
        )
        return job

    def cancel(self, message: InferenceCancel) -> CancelJob | None:
        """Return the cancellation of a job; None if the job has ended."""
        job = self._jobs.pop(normalized_id(message.request_id), None)
        if job is None:
            return None
        return CancelJob(JobId(job.request_id), job.lease)

    def report(
        self, event: JobReport, peer: TealePeer, offers: Sequence[Offer], now: float
    ) -> Sequence[bytes]:
        """Encode a report for the peer; nothing if the peer has cancelled the job.

        ``offers`` are those of this end.

        Raises PeerError if a piece is too large to send; the caller then ends the job.
        """
        job = self._jobs.get(normalized_id(event.job_id))
        if job is None or job.lease != event.lease:
            return ()
        if isinstance(event, AnswerChunk):
            return self._chunks(job, event.pieces)
        match event:
            case Completed(rest=rest):
                messages = [*self._chunks(job, rest)] if rest else []
                messages += job.writer.write_end(event.finish_reason, event.usage)
                messages.append(self._completion(job, event, peer, now))
            case Rejected(_, _, reason):
                code = self._rejection_code(job.work, offers)
                messages = [self._error(job.request_id, reason, code, event, peer)]
            case Failed(_, _, error, fault):
                if not peer.runs_shoal and fault in (Fault.WORKER, Fault.ENGINE):
                    error = WORKER_FAILED  # details are for Shoal peers only
                code = ErrorCode.INTERNAL_ERROR
                messages = [self._error(job.request_id, error, code, event, peer)]
        del self._jobs[normalized_id(event.job_id)]
        return messages

    def fail(
        self, event: JobReport, why: str, peer: TealePeer
    ) -> tuple[bytes, CancelJob]:
        """End an open job; return the error for the peer, and the cancellation."""
        job = self._jobs.pop(normalized_id(event.job_id))
        failed = Failed(event.job_id, event.lease, why)
        code = ErrorCode.INTERNAL_ERROR
        error = self._error(job.request_id, why, code, failed, peer)
        return error, CancelJob(event.job_id, event.lease)

    def load_model(
        self, message: LoadModel, peer: TealePeer, models: Collection[str]
    ) -> bytes:
        """Return whether a model is on offer; the request loads nothing."""
        request_id, model = message.request_id, message.model_id
        answer: ModelLoaded | ModelLoadError
        if not peer.submits_jobs:
            answer = ModelLoadError(request_id, model, peer.refusal or MAY_NOT_SUBMIT)
        elif model in models:
            answer = ModelLoaded(request_id, model, 0)
        else:
            answer = ModelLoadError(request_id, model, "the model is not on offer")
        return self._form.encode(answer)

    def refuse(self, request_id: str, why: str, code: ErrorCode) -> bytes:
        """Return the error that refuses a request."""
        error = InferenceError(request_id, well_formed(why[:TEXT_MAX]), code)
        return self._form.encode(error)

    # Private parts, in the order in which they are called.

    def _writer(
        self, message: InferenceRequest, work: Work, peer: TealePeer, now: float
    ) -> ChunkWriter:
        named = not isinstance(work, Task) and work.model != ANY_MODEL
        return ChunkWriter(
            message.request_id,
            work.model if named else UNNAMED_MODEL,
            int(now + self._local.epoch),
            usage=wants_usage(message),
            streaming=message.streaming,
            exact=peer.runs_shoal,
            flat=self._form.flat,
        )

    def _receipt_signer(
        self, message: InferenceRequest, job: RunJob, peer: TealePeer
    ) -> ReceiptSigner:
        signs = peer.runs_shoal and self._local.role is TealeRole.WORKER
        name = receipt_job_name(message) if signs else ""
        return ReceiptSigner(self._local.identity, name, job.beginning)

    def _chunks(
        self, job: _InboundJob, pieces: Sequence[AnswerPiece]
    ) -> Sequence[bytes]:
        job.receipt_signer.add(pieces)
        return job.writer.write(pieces)

    def _completion(
        self, job: _InboundJob, event: Completed, peer: TealePeer, now: float
    ) -> bytes:
        usage = event.usage
        shoal: ShoalField = UNSET
        at = now + self._local.epoch
        if peer.runs_shoal:
            receipt = job.receipt_signer.sign(job.work, event, at)
            shoal = write_extension(
                completion_extension(replace(event, receipt=receipt))
            )
        message = InferenceComplete(
            job.request_id,
            None if usage is None else min(usage.prompt_tokens, EXACT_MAX),
            None if usage is None else min(usage.completion_tokens, EXACT_MAX),
            shoal,
        )
        return self._form.encode(message)

    def _rejection_code(self, work: Work, offers: Sequence[Offer]) -> ErrorCode:
        named = not isinstance(work, Task) and work.model != ANY_MODEL
        if named and not any(work.model in offer.models for offer in offers):
            return ErrorCode.MODEL_NOT_LOADED
        slots = sum(offer.slots for offer in offers)
        return (
            ErrorCode.QUEUE_FULL if self.open_count > slots else ErrorCode.UNAVAILABLE
        )

    def _error(
        self,
        request_id: str,
        why: str,
        code: ErrorCode,
        end: Rejected | Failed,
        peer: TealePeer,
    ) -> bytes:
        shoal = write_extension(error_extension(end)) if peer.runs_shoal else UNSET
        error = InferenceError(request_id, well_formed(why[:TEXT_MAX]), code, shoal)
        return self._form.encode(error)
