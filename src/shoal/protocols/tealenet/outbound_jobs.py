"""Jobs that this side submits to a peer, and what the peer's answers mean."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Task
from shoal.protocols.seam.session import Data, without_calls
from shoal.protocols.tealenet.codec.chunks import (
    TEMPLATE_KEY_SIZE,
    ChunkReader,
    ChunkTemplate,
    find_template,
)
from shoal.protocols.tealenet.codec.envelope import BadMessage, encode
from shoal.protocols.tealenet.codec.extension import (
    ShoalFeature,
    fault_of,
    read_completion,
    read_error,
    receipt_of,
    usage_of,
)
from shoal.protocols.tealenet.codec.messages import (
    InferenceCancel,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
)
from shoal.protocols.tealenet.codec.requests import write_request
from shoal.protocols.tealenet.codec.scalars import ErrorCode, normalized_id, well_formed
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.local_node import TealeLocalNode, uuid_from
from shoal.protocols.tealenet.peer import TealePeer

ANSWER_KINDS = frozenset({"inferenceChunk", "inferenceComplete", "inferenceError"})
SEED_SIZE = 32  # bytes
REASON_MAX = 1000  # characters of an error that are kept

NOT_STARTED_CODES = frozenset(
    {ErrorCode.QUEUE_FULL, ErrorCode.UNAVAILABLE, ErrorCode.MODEL_NOT_LOADED}
)
"""Codes of errors after which another peer may still do the job."""


@dataclass(slots=True)
class _OutboundJob:
    """A job that the peer has; ``pieces`` may grow while its ``batch`` is read."""

    job_id: JobId
    lease: LeaseNumber
    reader: ChunkReader
    pieces: list[AnswerPiece]
    batch: int = 0  # 0: nothing came of it yet
    template: ChunkTemplate | None = None


class TealeOutboundJobs:
    """Our side as the one who asks.

    Jobs belong to the conversation: what is said of those that are over, or that were
    cancelled, is not heard.
    """

    def __init__(self, local: TealeLocalNode, profile: LinkProfile) -> None:
        self._flat = local.flat
        self._profile = profile
        # Ids are to be unique even if what is drawn is not.
        self._seed = local.random_bytes(SEED_SIZE)
        self._counter = 0
        self._jobs: dict[str, _OutboundJob] = {}  # by the request's id in upper case
        self._request_ids: dict[tuple[JobId, LeaseNumber], str] = {}
        self._templates: dict[Data, _OutboundJob] = {}  # by how their chunks begin
        self._batch = 0

    @property
    def count(self) -> int:
        """How many jobs of ours the peer has."""
        return len(self._jobs)

    def request(self, job: RunJob, peer: TealePeer) -> bytes:
        """Return how the peer is asked for a job.

        Raises PeerError if that cannot be written, or is more than the peer takes.
        """
        request_id = self._new_request_id()
        request = write_request(job, request_id, extended=peer.runs_shoal)
        message = encode(request, self._flat)
        at_work = peer.runs_shoal and not peer.is_coordinator
        limit = self._profile.request_max(to_worker=at_work)
        if len(message) > limit:
            raise LimitExceeded("request", len(message), limit)
        work = without_calls(job.work)
        options = {} if isinstance(work, Task) else work.options
        several = options.get("n") not in (None, 1)
        reader = ChunkReader(several=several, exact=peer.runs_shoal)
        self._jobs[request_id] = _OutboundJob(job.job_id, job.lease, reader, [])
        self._request_ids[job.job_id, job.lease] = request_id
        return message

    def cancel(self, job: CancelJob, peer: TealePeer) -> bytes | None:
        """Forget a job; return how the peer is told, if it can be."""
        request_id = self._request_ids.get((job.job_id, job.lease))
        if request_id is None:
            return None
        self._forget(request_id)
        if ShoalFeature.CANCEL not in peer.features:
            return None
        return encode(InferenceCancel(request_id), self._flat)

    def begin_batch(self) -> None:
        """Begin a batch: what comes of one job in it is one event."""
        self._batch += 1

    def receive_text(self, data: Data) -> Sequence[AnswerChunk] | None:
        """Take a message if it is one more piece of a text, as those before it were.

        Returns what it means, or None: then it is to be decoded.
        """
        asked = self._templates.get(data[:TEMPLATE_KEY_SIZE])
        if asked is None or asked.template is None:
            return None
        text = asked.template.text(data)
        return self._progress(asked, [text]) if text else None

    def receive_chunk(
        self, message: InferenceChunk, data: Data
    ) -> Sequence[AnswerChunk]:
        """Return what a piece of an answer is; it may be a part of the last one."""
        asked = self._find(message.request_id)
        if asked is None:
            return ()  # it crossed our cancel
        pieces = asked.reader.read(message.chunk)
        if not pieces:
            return ()
        # Whatever is more than text is decoded, and what is like it as well.
        first = pieces[0] if asked.batch == 0 and len(pieces) == 1 else None
        found = find_template(data, message, first) if isinstance(first, str) else None
        if found is not None:
            asked.template = found
            self._templates[found.key] = asked
        return self._progress(asked, pieces)

    def receive_complete(
        self, message: InferenceComplete, peer: TealePeer
    ) -> Sequence[Event]:
        """Return that an answer is whole."""
        asked = self._end(message.request_id)
        if asked is None:
            return ()
        job_id, lease, reader = asked.job_id, asked.lease, asked.reader
        if not peer.runs_shoal:
            return (Completed(job_id, lease, reader.finish_reason, reader.usage),)
        try:
            ending = read_completion(message.shoal)
        except PeerError as error:
            return (Failed(job_id, lease, str(error)),)
        return (
            Completed(
                job_id,
                lease,
                ending.finish_reason,
                usage_of(ending.usage),
                output=ending.output,
                receipt=receipt_of(ending.receipt),
            ),
        )

    def receive_error(
        self, message: InferenceError, peer: TealePeer
    ) -> Sequence[Event]:
        """Return that a job was not done: whether to try another peer, the peer says.

        One of ours says so itself; others by the code, or by saying nothing before.
        """
        asked = self._end(message.request_id)
        if asked is None:
            return ()
        why = well_formed(message.error_message[:REASON_MAX])
        if peer.runs_shoal:
            failing = read_error(message.shoal)
            if not failing.failed:
                return (Rejected(asked.job_id, asked.lease, why),)
            return (Failed(asked.job_id, asked.lease, why, fault_of(failing)),)
        begun = message.code is not None or asked.batch > 0
        if begun and message.code not in NOT_STARTED_CODES:
            return (Failed(asked.job_id, asked.lease, why),)
        return (Rejected(asked.job_id, asked.lease, why),)

    def fail_unreadable(self, error: BadMessage) -> Sequence[Event]:
        """Return what becomes of a job whose answer cannot be read."""
        if error.kind not in ANSWER_KINDS or not error.request_id:
            return ()
        asked = self._end(error.request_id)
        if asked is None:
            return ()
        if asked.batch == 0:
            return (Rejected(asked.job_id, asked.lease, str(error)),)
        return (Failed(asked.job_id, asked.lease, str(error)),)

    # Private parts.

    def _progress(
        self, job: _OutboundJob, pieces: list[AnswerPiece]
    ) -> Sequence[AnswerChunk]:
        if job.batch == self._batch:
            job.pieces += pieces
            return ()
        job.batch = self._batch
        job.pieces = pieces
        return (AnswerChunk(job.job_id, job.lease, pieces),)

    def _new_request_id(self) -> str:
        self._counter += 1
        counted = self._seed + self._counter.to_bytes(8, "big")
        return uuid_from(hashlib.sha256(counted).digest())

    def _find(self, request_id: str) -> _OutboundJob | None:
        # Most peers repeat the id as it was sent: in upper case.
        return self._jobs.get(request_id) or self._jobs.get(normalized_id(request_id))

    def _end(self, request_id: str) -> _OutboundJob | None:
        asked = self._find(request_id)
        if asked is not None:
            self._forget(self._request_ids[asked.job_id, asked.lease])
        return asked

    def _forget(self, request_id: str) -> None:
        asked = self._jobs.pop(request_id)
        del self._request_ids[asked.job_id, asked.lease]
        if (
            asked.template is not None
            and self._templates.get(asked.template.key) is asked
        ):
            del self._templates[asked.template.key]
