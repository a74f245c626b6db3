"""Jobs that this end submits to a peer, and the peer's answers."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.domain import vocabulary as words
from shoal.domain.errors import LimitExceeded
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece, Fault
from shoal.domain.server_refusals import ServerRefusal, classify_refusal
from shoal.domain.work import Chat
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec import chunks, messages
from shoal.protocols.tealenet.codec.chats import write_request
from shoal.protocols.tealenet.codec.envelope import BadMessage, PayloadForm
from shoal.protocols.tealenet.codec.scalars import ErrorCode, normalized_id, well_formed
from shoal.protocols.tealenet.heartbeat import HeartbeatSender
from shoal.protocols.tealenet.local_node import TealeLocalNode, uuid_from
from shoal.protocols.tealenet.peer import LinkProfile

ANSWER_KINDS = frozenset({"inferenceChunk", "inferenceComplete", "inferenceError"})
SEED_SIZE = 32  # bytes
REASON_MAX = 1000  # characters of an error; the rest is cut off

DROPPED = "the node is idle, and has not answered the request"
TRUNCATED = "the answer ended without a finish reason and usage"

NOT_STARTED_CODES = frozenset(
    {ErrorCode.QUEUE_FULL, ErrorCode.UNAVAILABLE, ErrorCode.MODEL_NOT_LOADED}
)
"""Error codes that mean that the peer has not started the job."""


TEXT_MAX = 64 << 10  # characters of an error that are read
MESSAGE_MAX = 500  # characters of a server's message that are passed on

_STATUS = re.compile(r"(?<![\w.:/-])[45]\d\d(?![\w./-])")
# Addresses and paths of the node's machine.
_INTERNALS = re.compile(
    r"\b\w+://\S+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?|(?<!\w)/\w\S*/\S*"
)

_FAULTS: Mapping[ServerRefusal, Fault] = {
    ServerRefusal.BROKEN: Fault.ENGINE,
    ServerRefusal.CONTEXT: Fault.CONTEXT,
    ServerRefusal.FAILED: Fault.ENGINE,
    ServerRefusal.INVALID: Fault.REQUEST,
    ServerRefusal.TOO_LARGE: Fault.SIZE,
    ServerRefusal.UNPROCESSABLE: Fault.VALUES,
}
"""The refusals that end a job, at once or when repeated."""


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """A failure of a model server.

    ``fault`` is None if the server refused the job, which another may do.  ``reason``
    is for clients: it has no address or path of the server.
    """

    fault: Fault | None
    reason: str


def read_server_failure(text: str) -> ServerFailure:
    """Read the text of an ``internal_error``; a text without a status is no response.

    The text is the peer's: anything is read as some failure.
    """
    text = text[:TEXT_MAX]
    head, brace, _ = text.partition("{")
    problem = _problem(text[len(head) :]) if brace else {}
    status = _status(_INTERNALS.sub("", head), problem)
    if status is None:
        return ServerFailure(None, "the node's model server failed")
    message = problem.get("message")
    message = message if isinstance(message, str) else ""
    codes = {str(problem.get("code")), str(problem.get("type"))}
    fault = _FAULTS.get(classify_refusal(status, message or head, codes))
    summary = f"the node's model server failed with status {status}"
    words = without_internals(message)[:MESSAGE_MAX]
    if fault is None or not words:
        return ServerFailure(fault, summary)
    return ServerFailure(
        fault, f"{summary}: {words}" if fault is Fault.ENGINE else words
    )


def without_internals(text: str) -> str:
    """Return a text without the addresses and paths of a peer's machine."""
    return _INTERNALS.sub("…", text)


def _problem(body: str) -> Mapping[str, Any]:
    """Return the error object at the beginning of a body in JSON; empty if none."""
    try:
        decoded, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return {}
    match decoded:
        case {"error": str() as message}:
            return {"message": message}
        case {"error": dict() as problem}:
            return problem
        case {"detail": detail}:
            return {"message": detail}
        case dict():
            return decoded
        case _:
            return {}


def _status(head: str, problem: Mapping[str, Any]) -> int | None:
    """Return the status of the server's response; None if there was none."""
    if found := _STATUS.search(head):
        return int(found[0])
    code = problem.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else None


@dataclass(slots=True)
class _OutboundJob:
    """A submitted job; ``pieces`` may grow while the messages of ``batch`` are read.

    ``heartbeats`` is how many this end had sent when it submitted the job.  ``unread``
    is the job again, if its request may be in a form that the peer cannot read.
    """

    job_id: JobId
    lease: LeaseNumber
    reader: chunks.ChunkReader
    pieces: list[AnswerPiece]
    heartbeats: int
    unread: words.RunJob | None
    batch: int = 0  # 0: no output yet
    template: chunks.ChunkTemplate | None = None


class TealeOutboundJobs:
    """The jobs that this end has submitted in one session.

    Messages about jobs that have ended are ignored.  ``heartbeats`` counts those that
    this end has sent.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        profile: LinkProfile,
        form: PayloadForm,
        heartbeats: HeartbeatSender,
    ) -> None:
        self._form = form
        self._heartbeats = heartbeats
        self._acks = 0
        self._profile = profile
        # The counter keeps ids unique even if the random bytes are not.
        self._seed = local.random_bytes(SEED_SIZE)
        self._counter = 0
        self._jobs: dict[str, _OutboundJob] = {}  # by the request's id in upper case
        self._request_ids: dict[tuple[JobId, LeaseNumber], str] = {}
        self._templates: dict[Data, _OutboundJob] = {}  # by the prefix of their chunks
        self._batch = 0
        self._noted_batch = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def request(self, job: words.RunJob) -> bytes:
        """Return the request for a job.

        Raises PeerError if it cannot be encoded, or exceeds the limit of the link.
        """
        request_id = self._new_request_id()
        message = self._form.encode(write_request(job, request_id))
        limit = self._profile.message_max
        if len(message) > limit:
            raise LimitExceeded("request", len(message), limit)
        assert isinstance(job.work, Chat), "no other job can be encoded"
        several = job.work.options.get("n") not in (None, 1)
        reader = chunks.ChunkReader(request_id, several=several)
        unread = None if self._form.known else job
        self._jobs[request_id] = _OutboundJob(
            job.job_id, job.lease, reader, [], self._heartbeats.sent, unread
        )
        self._request_ids[job.job_id, job.lease] = request_id
        return message

    def cancel(self, job: words.CancelJob) -> None:
        """Submit a job no more; at the peer it goes on, and its end is reported."""
        request_id = self._request_ids.get((job.job_id, job.lease))
        if request_id is not None:
            self._jobs[request_id].unread = None

    def begin_batch(self) -> None:
        """Start a batch: the chunks of one job in it are one event."""
        self._batch += 1

    def has_progressed(self) -> bool:
        """Return whether an open job has had output since the last call."""
        newest = max((job.batch for job in self._jobs.values()), default=0)
        progressed, self._noted_batch = newest > self._noted_batch, newest
        return progressed

    def receive_text(self, data: Data) -> Sequence[words.AnswerChunk] | None:
        """Read a chunk that differs from the job's others only in its text.

        None: it is another message, which the caller decodes.
        """
        job = self._templates.get(data[: chunks.TEMPLATE_KEY_SIZE])
        if job is None or job.template is None:
            return None
        text = job.template.text(data)
        return self._progress(job, [text]) if text else None

    def receive_chunk(
        self, message: messages.InferenceChunk, data: Data
    ) -> Sequence[words.AnswerChunk]:
        """Return the output in a chunk; within a batch it extends the last event."""
        job = self._find(message.request_id)
        if job is None:
            return ()
        pieces = job.reader.read(message.chunk)
        if not pieces:
            return ()
        # Only a first chunk with nothing but text can be a template.
        first = pieces[0] if job.batch == 0 and len(pieces) == 1 else None
        if isinstance(first, str):
            template = chunks.find_template(data, message, first)
            if template is not None:
                job.template = template
                self._templates[template.key] = job
        return self._progress(job, pieces)

    def receive_complete(
        self, message: messages.InferenceComplete
    ) -> Sequence[words.Event]:
        """Return the completion of a job.

        A real node whose model server dies completes the answer as if it were whole;
        only the finish reason and the usage are missing.  That is a rejection: another
        worker takes the answer over.  In the document, whole answers have neither:
        their chunks are flat or say null, which a Mac's do not, and the end has no
        counts, which that of a Rust node has.
        """
        job = self._end(message.request_id)
        if job is None:
            return ()
        job_id, lease, reader = job.job_id, job.lease, job.reader
        of_document = self._form.flat or reader.has_nulls
        documented = of_document and message.tokens_out is None
        if not (reader.ended or documented):
            return (words.Rejected(job_id, lease, TRUNCATED),)
        return (words.Completed(job_id, lease, reader.finish_reason, reader.usage),)

    def receive_error(self, message: messages.InferenceError) -> Sequence[words.Event]:
        """Return a job's failure, or its rejection: then another peer may do it.

        It is a rejection if its code says so, if it has no code and there was no
        output, or if the node's model server failed and the request is not at fault.
        """
        job = self._end(message.request_id)
        if job is None:
            return ()
        if message.code == ErrorCode.INTERNAL_ERROR:
            failure = read_server_failure(message.error_message)
            reason = well_formed(failure.reason)
            if failure.fault is None:
                return (words.Rejected(job.job_id, job.lease, reason),)
            return (words.Failed(job.job_id, job.lease, reason, failure.fault),)
        reason = without_internals(well_formed(message.error_message[:REASON_MAX]))
        started = message.code is not None or job.batch > 0
        if started and message.code not in NOT_STARTED_CODES:
            return (words.Failed(job.job_id, job.lease, reason),)
        return (words.Rejected(job.job_id, job.lease, reason),)

    def reject_dropped(self) -> Sequence[words.Event]:
        """Reject the jobs that an idle Rust node has dropped.

        It processes one message at a time, and ignores a request that it cannot decode:
        after an answer to a heartbeat that followed the request, nothing more comes.
        """
        dropped = [job for job in self._jobs.values() if job.heartbeats < self._acks]
        for job in dropped:
            self._forget(self._request_ids[job.job_id, job.lease])
        return [words.Rejected(job.job_id, job.lease, DROPPED) for job in dropped]

    def receive_ack(self, ack: messages.HeartbeatAck) -> bool:
        """Count the answer to a heartbeat; return whether the peer is idle."""
        self._acks += 1
        return not (ack.is_generating or ack.queue_depth)

    def withdraw_unread(self) -> Sequence[words.RunJob]:
        """Return jobs whose requests an idle peer could not read, to submit again.

        They were written before the peer had shown its form.
        """
        if not self._form.flat:
            return ()
        acknowledged = self._acks + self._heartbeats.unread
        unread = [
            job.unread
            for job in self._jobs.values()
            if job.unread is not None
            and job.batch == 0
            and job.heartbeats < acknowledged
        ]
        for each in unread:
            self._forget(self._request_ids[each.job_id, each.lease])
        return unread

    def fail_unreadable(self, error: BadMessage) -> Sequence[words.Event]:
        """End a job whose answer is invalid."""
        if error.kind not in ANSWER_KINDS or not error.request_id:
            return ()
        job = self._end(error.request_id)
        if job is None:
            return ()
        if job.batch == 0:
            return (words.Rejected(job.job_id, job.lease, str(error)),)
        return (words.Failed(job.job_id, job.lease, str(error)),)

    # Private parts.

    def _progress(
        self, job: _OutboundJob, pieces: list[AnswerPiece]
    ) -> Sequence[words.AnswerChunk]:
        if job.batch == self._batch:
            job.pieces += pieces
            return ()
        job.batch = self._batch
        job.pieces = pieces
        return (words.AnswerChunk(job.job_id, job.lease, pieces),)

    def _new_request_id(self) -> str:
        self._counter += 1
        counted = self._seed + self._counter.to_bytes(8, "big")
        return uuid_from(hashlib.sha256(counted).digest())

    def _find(self, request_id: str) -> _OutboundJob | None:
        # Most peers repeat the id as it was sent, in upper case.
        return self._jobs.get(request_id) or self._jobs.get(normalized_id(request_id))

    def _end(self, request_id: str) -> _OutboundJob | None:
        job = self._find(request_id)
        if job is not None:
            self._forget(self._request_ids[job.job_id, job.lease])
        return job

    def _forget(self, request_id: str) -> None:
        job = self._jobs.pop(request_id)
        del self._request_ids[job.job_id, job.lease]
        if job.template is not None and self._templates.get(job.template.key) is job:
            del self._templates[job.template.key]
