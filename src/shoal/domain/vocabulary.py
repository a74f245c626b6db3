"""The two vocabularies that every worker protocol translates to and from.

The coordinator issues commands and receives events; a worker receives commands and
issues events.  Nothing beyond the protocols knows a wire format.  Everything about a
job carries the number of its lease, so that late words of an old lease are recognised.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, Fault, Usage
from shoal.domain.receipts import SignedReceipt
from shoal.domain.work import DEFAULT_TERMS, JobTerms, Work
from shoal.domain.worker import MachineHealth, Offer, WorkerLoad


class CallMessage:
    """Something about functions that are called; only some wires can express it.

    The coordinator says ``PushCalls``, ``CancelCalls`` and ``SendBlob``, a worker says
    ``CallProgress``, ``CallsReturned``, ``BlobMissing`` and ``SendBlob``.
    """

    __slots__ = ()


# Commands: what the coordinator asks of a worker.


@dataclass(frozen=True, slots=True)
class RunJob:
    """Do this.  ``continues`` is the beginning of the answer that exists already.

    Only a worker with ``Feature.CONTINUE`` is given one; it produces what comes after.
    """

    job_id: JobId
    lease: LeaseNumber
    work: Work
    continues: str = ""
    terms: JobTerms = DEFAULT_TERMS


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Stop working on this; nobody waits for it any more."""

    job_id: JobId
    lease: LeaseNumber


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Go away, and stay away: another connection has taken this one's place."""

    reason: str


class StreamedCall(NamedTuple):
    """A call in a lane, by its number there; the rest is as in ``Call``."""

    number: int
    args: bytes
    kwargs: bytes


class CallResult(NamedTuple):
    """What came of a call in a lane: a value in MessagePack, or why there is none.

    ``error`` is the text of a traceback; empty: there is none.
    """

    number: int
    value: bytes
    error: str = ""


@dataclass(slots=True)
class PushCalls(CallMessage):
    """Call the function of a lane, one call after the other.

    Not frozen, for there may be one for each call.
    """

    job_id: JobId
    lease: LeaseNumber
    calls: list[StreamedCall]


@dataclass(frozen=True, slots=True)
class CancelCalls(CallMessage):
    """Do not make these calls, or stop in the middle; nothing comes back of them."""

    job_id: JobId
    lease: LeaseNumber
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendBlob(CallMessage):
    """Keep this: jobs that follow name it by its SHA-256 digest of 32 bytes."""

    digest: bytes
    data: memoryview | bytes


Command: TypeAlias = RunJob | CancelJob | Dismiss | CallMessage | ModelMessage


# Events: what a worker tells the coordinator.


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is there.  ``name`` is its identity, unique within its wire."""

    name: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class OffersChanged:
    """What a peer can run from now on: an offer for each model, and no others.

    Only on wires where one connection stands for all of a peer's models.
    """

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker finishes what it has and takes nothing new."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealthReported:
    """How the worker's machine is doing."""

    health: MachineHealth


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """How much the worker can take has changed."""

    load: WorkerLoad


@dataclass(slots=True)
class AnswerChunk:
    """Pieces of the answer, in order: whole characters, never empty.

    Not frozen, for that would double what it costs to make, and there is one for each
    token.
    """

    job_id: JobId
    lease: LeaseNumber
    pieces: list[AnswerPiece]


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is whole.

    ``rest`` is what of it was not sent before; all of it, where a wire does not stream.
    ``output``, ``value`` and ``blobs`` are as in ``Outcome``, and ``receipt`` is what
    the worker signed.
    """

    job_id: JobId
    lease: LeaseNumber
    finish_reason: str = "stop"
    usage: Usage | None = None  # None where the wire cannot tell
    rest: tuple[AnswerPiece, ...] = ()
    output: str = ""
    receipt: SignedReceipt | None = None
    value: bytes = b""
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiptSent:
    """A worker's receipt for a job, apart from its answer.  Nothing else is claimed."""

    job_id: JobId
    receipt: SignedReceipt


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker would not start the job; another one may."""

    job_id: JobId
    lease: LeaseNumber
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ran the job and it failed; running it again would fail again."""

    job_id: JobId
    lease: LeaseNumber
    error: str
    fault: Fault = Fault.WORKER


@dataclass(frozen=True, slots=True)
class CallProgress(CallMessage):
    """How far a call has come: a share from 0 to 1, if it says so, and a remark."""

    job_id: JobId
    lease: LeaseNumber
    share: float | None = None
    remark: str = ""


@dataclass(slots=True)
class CallsReturned(CallMessage):
    """What came of calls in a lane, in the order in which they ended.

    Not frozen, for there may be one for each call.
    """

    job_id: JobId
    lease: LeaseNumber
    results: list[CallResult]


@dataclass(frozen=True, slots=True)
class BlobMissing(CallMessage):
    """A worker was never given this, or has let go of it: give it, and the job anew."""

    digest: bytes


Event: TypeAlias = (
    Joined
    | OffersChanged
    | Draining
    | HealthReported
    | LoadChanged
    | AnswerChunk
    | Completed
    | Rejected
    | Failed
    | ReceiptSent
    | CallMessage
    | ModelMessage
)
