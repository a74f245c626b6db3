"""The jobs that a peer has from us, and what it says of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Piece
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Event,
    Failed,
    Progress,
    Rejected,
    RunJob,
)
from shoal.domain.work import Task
from shoal.protocols.session import Data, described
from shoal.protocols.tealenet.manners import Manners
from shoal.protocols.tealenet.ourselves import Ourselves, uuid_of
from shoal.protocols.tealenet.peer import Peer
from shoal.protocols.tealenet.wire.alike import KEY_SIZE, Alike, alike
from shoal.protocols.tealenet.wire.chunks import ChunkReader
from shoal.protocols.tealenet.wire.extension import (
    Ability,
    fault_of,
    read_ending,
    read_failing,
    receipt_of,
    usage_of,
)
from shoal.protocols.tealenet.wire.messages import (
    BadMessage,
    InferenceCancel,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
    encode,
)
from shoal.protocols.tealenet.wire.requests import write_request
from shoal.protocols.tealenet.wire.scalars import ErrorCode, key_of, well_formed

ANSWERS = frozenset({"inferenceChunk", "inferenceComplete", "inferenceError"})
SEED_SIZE = 32  # bytes
REASON_MAX = 1000  # characters of an error that are kept

NOT_BEGUN = frozenset(
    {ErrorCode.QUEUE_FULL, ErrorCode.UNAVAILABLE, ErrorCode.MODEL_NOT_LOADED}
)
"""Codes of errors after which another peer may still do the job."""


@dataclass(slots=True)
class _Asked:
    """A job that the peer has; ``pieces`` may grow while its ``batch`` is read."""

    job_id: JobId
    lease: LeaseNumber
    reader: ChunkReader
    pieces: list[Piece]
    batch: int = 0  # 0: nothing came of it yet
    alike: Alike | None = None


class Asking:
    """Our side as the one who asks.

    Jobs belong to the conversation: what is said of those that are over, or that were
    cancelled, is not heard.
    """

    def __init__(self, own: Ourselves, manners: Manners) -> None:
        self._flat = own.flat
        self._manners = manners
        # Ids are to be unique even if what is drawn is not.
        self._seed = own.draw(SEED_SIZE)
        self._drawn = 0
        self._asked: dict[str, _Asked] = {}  # by the request's id in upper case
        self._ids: dict[tuple[JobId, LeaseNumber], str] = {}
        self._alike: dict[Data, _Asked] = {}  # by how their chunks begin
        self._batch = 0

    @property
    def running(self) -> int:
        """How many jobs of ours the peer has."""
        return len(self._asked)

    def run(self, job: RunJob, peer: Peer) -> bytes:
        """Return how the peer is asked for a job.

        Raises PeerError if that cannot be written, or is more than the peer takes.
        """
        request_id = self._new_id()
        request = write_request(job, request_id, extended=peer.ours)
        message = encode(request, self._flat)
        at_work = peer.ours and not peer.neighbour
        limit = self._manners.request_max(to_worker=at_work)
        if len(message) > limit:
            raise LimitExceeded("request", len(message), limit)
        work = described(job.work)
        options = {} if isinstance(work, Task) else work.options
        several = options.get("n") not in (None, 1)
        reader = ChunkReader(several=several, exact=peer.ours)
        self._asked[request_id] = _Asked(job.job_id, job.lease, reader, [])
        self._ids[job.job_id, job.lease] = request_id
        return message

    def cancel(self, job: CancelJob, peer: Peer) -> bytes | None:
        """Forget a job; return how the peer is told, if it can be."""
        request_id = self._ids.get((job.job_id, job.lease))
        if request_id is None:
            return None
        self._forget(request_id)
        if Ability.CANCEL not in peer.features:
            return None
        return encode(InferenceCancel(request_id), self._flat)

    def read_on(self) -> None:
        """Begin a batch: what comes of one job in it is one event."""
        self._batch += 1

    def more(self, data: Data) -> Sequence[Progress] | None:
        """Take a message if it is one more piece of a text, as those before it were.

        Returns what it means, or None: then it is to be decoded.
        """
        asked = self._alike.get(data[:KEY_SIZE])
        if asked is None or asked.alike is None:
            return None
        text = asked.alike.text(data)
        return self._add(asked, [text]) if text else None

    def chunk(self, message: InferenceChunk, data: Data) -> Sequence[Progress]:
        """Return what a piece of an answer is; it may be a part of the last one."""
        asked = self._find(message.request_id)
        if asked is None:
            return ()  # it crossed our cancel
        pieces = asked.reader.read(message.chunk)
        if not pieces:
            return ()
        # Whatever is more than text is decoded, and what is like it as well.
        first = pieces[0] if asked.batch == 0 and len(pieces) == 1 else None
        found = alike(data, message, first) if isinstance(first, str) else None
        if found is not None:
            asked.alike = found
            self._alike[found.key] = asked
        return self._add(asked, pieces)

    def complete(self, message: InferenceComplete, peer: Peer) -> Sequence[Event]:
        """Return that an answer is whole."""
        asked = self._end(message.request_id)
        if asked is None:
            return ()
        job_id, lease, reader = asked.job_id, asked.lease, asked.reader
        if not peer.ours:
            return (Completed(job_id, lease, reader.finish_reason, reader.usage),)
        try:
            ending = read_ending(message.shoal)
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

    def fail(self, message: InferenceError, peer: Peer) -> Sequence[Event]:
        """Return that a job was not done: whether to try another peer, the peer says.

        One of ours says so itself; others by the code, or by saying nothing before.
        """
        asked = self._end(message.request_id)
        if asked is None:
            return ()
        why = well_formed(message.error_message[:REASON_MAX])
        if peer.ours:
            failing = read_failing(message.shoal)
            if not failing.failed:
                return (Rejected(asked.job_id, asked.lease, why),)
            return (Failed(asked.job_id, asked.lease, why, fault_of(failing)),)
        begun = message.code is not None or asked.batch > 0
        if begun and message.code not in NOT_BEGUN:
            return (Failed(asked.job_id, asked.lease, why),)
        return (Rejected(asked.job_id, asked.lease, why),)

    def spoil(self, error: BadMessage) -> Sequence[Event]:
        """Return what becomes of a job whose answer cannot be read."""
        if error.kind not in ANSWERS or not error.request_id:
            return ()
        asked = self._end(error.request_id)
        if asked is None:
            return ()
        if asked.batch == 0:
            return (Rejected(asked.job_id, asked.lease, str(error)),)
        return (Failed(asked.job_id, asked.lease, str(error)),)

    # Private parts.

    def _add(self, asked: _Asked, pieces: list[Piece]) -> Sequence[Progress]:
        if asked.batch == self._batch:
            asked.pieces += pieces
            return ()
        asked.batch = self._batch
        asked.pieces = pieces
        return (Progress(asked.job_id, asked.lease, pieces),)

    def _new_id(self) -> str:
        self._drawn += 1
        counted = self._seed + self._drawn.to_bytes(8, "big")
        return uuid_of(hashlib.sha256(counted).digest())

    def _find(self, request_id: str) -> _Asked | None:
        # Most peers repeat the id as it was sent: in upper case.
        return self._asked.get(request_id) or self._asked.get(key_of(request_id))

    def _end(self, request_id: str) -> _Asked | None:
        asked = self._find(request_id)
        if asked is not None:
            self._forget(self._ids[asked.job_id, asked.lease])
        return asked

    def _forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id)
        del self._ids[asked.job_id, asked.lease]
        if asked.alike is not None and self._alike.get(asked.alike.key) is asked:
            del self._alike[asked.alike.key]
