"""The jobs that a peer asks us for, and what it is told of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from msgspec import UNSET

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault, Piece
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Failed,
    Progress,
    Rejected,
    RunJob,
)
from shoal.domain.work import ANY_MODEL, Task, Work
from shoal.domain.worker import Offer
from shoal.protocols.session import Notice
from shoal.protocols.tealenet.admission import NO_ASKING
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.peer import Peer
from shoal.protocols.tealenet.wire.chunks import ChunkWriter
from shoal.protocols.tealenet.wire.extension import (
    ending_of,
    failing_of,
    write,
)
from shoal.protocols.tealenet.wire.messages import (
    BadMessage,
    InferenceCancel,
    InferenceComplete,
    InferenceError,
    InferenceRequest,
    LoadModel,
    ModelLoaded,
    ModelLoadError,
    encode,
)
from shoal.protocols.tealenet.wire.receipts import Signature
from shoal.protocols.tealenet.wire.requests import (
    name_in_receipts,
    read_request,
    wants_usage,
)
from shoal.protocols.tealenet.wire.scalars import (
    EXACT_MAX,
    TEXT_MAX,
    ErrorCode,
    Extra,
    key_of,
    well_formed,
)

OPEN_MAX = 256  # requests of one peer that are open at a time
UNNAMED = "any"  # the model in the answer, where none was asked for

WORKER_FAILED = "what ran the model failed; the same request may work again"

Said: TypeAlias = Progress | Completed | Rejected | Failed


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet; ``request_id`` is as the peer wrote it."""

    request_id: str
    lease: LeaseNumber
    work: Work
    writer: ChunkWriter
    signature: Signature


class Answering:
    """Our side as the one who is asked."""

    def __init__(self, own: Ourselves) -> None:
        self._own = own
        self._open: dict[str, _Open] = {}  # by the request's id in upper case

    @property
    def open(self) -> int:
        """How many requests of the peer's are open."""
        return len(self._open)

    def take(
        self, message: InferenceRequest, peer: Peer, now: float
    ) -> RunJob | Notice | bytes:
        """Return the job that is asked for, or why it is not done as a message."""
        key = key_of(message.request_id)
        if key in self._open:
            # An answer would end the first.
            return Notice(f"request {message.request_id!a} came twice: one is ignored")
        if not peer.asks:
            why = peer.refusal or NO_ASKING
            return self.refusal(message.request_id, why, ErrorCode.UNAVAILABLE)
        if len(self._open) >= OPEN_MAX:
            why = f"{OPEN_MAX} requests are open already"
            return self.refusal(message.request_id, why, ErrorCode.QUEUE_FULL)
        try:
            job = read_request(message, extended=peer.ours)
        except BadMessage as error:
            return self.refusal(
                message.request_id, str(error), ErrorCode.INTERNAL_ERROR
            )
        self._open[key] = _Open(
            message.request_id,
            job.lease,
            job.work,
            self._writer(message, job.work, peer, now),
            self._signature(message, job, peer),
        )
        return job

    def cancel(self, message: InferenceCancel) -> CancelJob | None:
        """Return what a peer does not want any more; None if that is over."""
        opened = self._open.pop(key_of(message.request_id), None)
        if opened is None:
            return None
        return CancelJob(JobId(opened.request_id), opened.lease)

    def say(
        self, event: Said, peer: Peer, offers: Sequence[Offer], now: float
    ) -> Sequence[bytes]:
        """Return how the peer is told of its job; nothing, if it has cancelled it.

        ``offers`` is what we can run.

        Raises PeerError if a piece is too large to be told; the job is over then.
        """
        opened = self._open.get(key_of(event.job_id))
        if opened is None or opened.lease != event.lease:
            return ()
        if isinstance(event, Progress):
            return self._pieces(opened, event.pieces)
        match event:
            case Completed(rest=rest):
                said = [*self._pieces(opened, rest)] if rest else []
                said += opened.writer.end(event.finish_reason, event.usage)
                said.append(self._completion(opened, event, peer, now))
            case Rejected(_, _, reason):
                code = self._why_not(opened.work, offers)
                said = [self._error(opened.request_id, reason, code, event, peer)]
            case Failed(_, _, error, fault):
                told = error
                if not peer.ours and fault is Fault.WORKER:
                    told = WORKER_FAILED  # what it is in detail is not for strangers
                code = ErrorCode.INTERNAL_ERROR
                said = [self._error(opened.request_id, told, code, event, peer)]
        del self._open[key_of(event.job_id)]
        return said

    def drop(self, event: Said, why: str, peer: Peer) -> tuple[bytes, CancelJob]:
        """Give up an open job; return how the peer and whoever runs it are told."""
        opened = self._open.pop(key_of(event.job_id))
        failed = Failed(event.job_id, event.lease, why)
        code = ErrorCode.INTERNAL_ERROR
        error = self._error(opened.request_id, why, code, failed, peer)
        return error, CancelJob(event.job_id, event.lease)

    def load(self, message: LoadModel, peer: Peer, models: Collection[str]) -> bytes:
        """Return whether a model is ready; none is made ready because of it."""
        request_id, model = message.request_id, message.model_id
        answer: ModelLoaded | ModelLoadError
        if not peer.asks:
            answer = ModelLoadError(request_id, model, peer.refusal or NO_ASKING)
        elif model in models:
            answer = ModelLoaded(request_id, model, 0)
        else:
            answer = ModelLoadError(request_id, model, "it is not on offer here")
        return encode(answer, self._own.flat)

    def refusal(self, request_id: str, why: str, code: ErrorCode) -> bytes:
        """Return that a request is not taken."""
        error = InferenceError(request_id, well_formed(why[:TEXT_MAX]), code)
        return encode(error, self._own.flat)

    # Private parts, in the order in which they are called.

    def _writer(
        self, message: InferenceRequest, work: Work, peer: Peer, now: float
    ) -> ChunkWriter:
        named = not isinstance(work, Task) and work.model != ANY_MODEL
        return ChunkWriter(
            message.request_id,
            work.model if named else UNNAMED,
            int(now + self._own.epoch),
            usage=wants_usage(message),
            streaming=message.streaming,
            exact=peer.ours,
            flat=self._own.flat,
        )

    def _signature(
        self, message: InferenceRequest, job: RunJob, peer: Peer
    ) -> Signature:
        signs = peer.ours and self._own.role is Role.WORKER
        name = name_in_receipts(message) if signs else ""
        return Signature(self._own.identity, name, job.continues)

    def _pieces(self, opened: _Open, pieces: Sequence[Piece]) -> Sequence[bytes]:
        opened.signature.add(pieces)
        return opened.writer.pieces(pieces)

    def _completion(
        self, opened: _Open, done: Completed, peer: Peer, now: float
    ) -> bytes:
        usage = done.usage
        shoal: Extra = UNSET
        at = now + self._own.epoch
        if peer.ours:
            receipt = opened.signature.sign(opened.work, done, at)
            shoal = write(ending_of(replace(done, receipt=receipt)))
        message = InferenceComplete(
            opened.request_id,
            None if usage is None else min(usage.prompt_tokens, EXACT_MAX),
            None if usage is None else min(usage.completion_tokens, EXACT_MAX),
            shoal,
        )
        return encode(message, self._own.flat)

    def _why_not(self, work: Work, offers: Sequence[Offer]) -> ErrorCode:
        named = not isinstance(work, Task) and work.model != ANY_MODEL
        if named and not any(work.model in offer.models for offer in offers):
            return ErrorCode.MODEL_NOT_LOADED
        slots = sum(offer.slots for offer in offers)
        return ErrorCode.QUEUE_FULL if self.open > slots else ErrorCode.UNAVAILABLE

    def _error(
        self,
        request_id: str,
        why: str,
        code: ErrorCode,
        end: Rejected | Failed,
        peer: Peer,
    ) -> bytes:
        shoal = write(failing_of(end)) if peer.ours else UNSET
        error = InferenceError(request_id, well_formed(why[:TEXT_MAX]), code, shoal)
        return encode(error, self._own.flat)
