"""The two vocabularies that every worker protocol translates to and from.

The coordinator issues commands and receives events; a worker receives commands and
issues events.  Nothing beyond the protocols knows a wire format.  Everything about a
job carries the number of its lease, so that late messages of an old lease are
recognised.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import DEFAULT_TERMS, JobTerms
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, Fault, Usage, begun_answer
from shoal.domain.receipts import SignedReceipt
from shoal.domain.work import Work
from shoal.domain.worker import MachineHealth, Offer, WorkerLoad


class CallMessage:
    """A message about function calls, which only some wires can express.

    The coordinator sends ``PushCalls``, ``CancelCalls`` and ``SendBlob``; a worker
    sends ``CallProgress``, ``CallsReturned``, ``BlobMissing`` and ``SendBlob``.
    """

    __slots__ = ()


# Commands: what the coordinator asks of a worker.


class TextRoute(msgspec.Struct, frozen=True):
    """Where a worker sends the pieces of an answer past the coordinator.

    That is the process with the client's connection, at the URL ``address``; empty:
    where the worker is connected.  ``name`` names this answer there, under this lease,
    and is known to both ends alone, as the 32 bytes ``ticket`` by which they know each
    other.
    """

    address: str
    name: bytes
    ticket: bytes


class RunJob(msgspec.Struct, frozen=True):
    """Run a job.  ``continues`` is the beginning of the answer, if it exists already.

    Only a worker with ``Feature.CONTINUE`` is given one; it produces the rest.
    ``thoughts`` came before it; a worker that cannot continue them alone has others.

    With ``trim``, a conversation that exceeds the context loses its oldest messages,
    because the wire cannot report that it is too long.  ``waited`` is the time since
    the job was submitted, ``remaining`` what is left of its total limit, both in
    seconds; None: not known.  ``returnable``: another worker takes it over if this one
    gives it back.  ``trace`` is the ``traceparent`` of the attempt; empty: it is not
    traced.  ``grant`` gives its function's own calls a credential, see ``lease_grant``.
    ``resumes``: the worker still runs the job under this earlier lease, and goes on
    after the beginning, whatever its features; 0: it starts the job.  With ``text``
    the worker may send pieces there at once, and copies of them here a little later.
    """

    job_id: JobId
    lease: LeaseNumber
    work: Work
    continues: str = ""
    thoughts: str = ""
    terms: JobTerms = DEFAULT_TERMS
    trim: bool = False
    waited: float = 0.0
    remaining: float | None = None
    returnable: bool = True
    trace: str = ""
    grant: str = ""
    resumes: LeaseNumber = LeaseNumber(0)
    text: TextRoute | None = None

    def __repr__(self) -> str:
        # Neither the grant nor the ticket.
        return f"RunJob({self.job_id!r}, {self.lease}, {self.work!r})"

    @property
    def beginning(self) -> Sequence[AnswerPiece]:
        """The pieces of the answer that exist already."""
        return begun_answer(self.continues, self.thoughts)


class CancelJob(msgspec.Struct, frozen=True):
    """Stop a job whose answer is no longer wanted."""

    job_id: JobId
    lease: LeaseNumber


class Dismiss(msgspec.Struct, frozen=True):
    """Disconnect and do not reconnect.

    ``replaced``: another connection of the same name took the place of this one.
    """

    reason: str
    replaced: bool = False


class WakeMachine(msgspec.Struct, frozen=True):
    """Call a machine that may sleep, by its hardware addresses, into this network.

    Sent only to workers whose offers have such addresses, too.
    """

    addresses: tuple[str, ...]


class StreamedCall(NamedTuple):
    """A call in a call stream, by its number; its arguments are as in ``Call``."""

    number: int
    args: bytes
    kwargs: bytes


class CallResult(NamedTuple):
    """The result of a call in a call stream: a value in MessagePack, or an error.

    ``error`` is the text of a traceback, empty on success; with it, ``value`` is the
    record of the exception, or empty.
    """

    number: int
    value: bytes
    error: str = ""


CallName: TypeAlias = tuple[JobId, LeaseNumber]
"""A stored call, and the lease under which its stream carries it."""


class PushCalls(CallMessage, msgspec.Struct):
    """Run calls of a call stream, one after the other.

    ``names`` are those of the calls, if these are stored: under them another
    coordinator may give the calls to the worker again.  The first message after a
    stream was resumed repeats all its calls: what it leaves out is not wanted.

    Not frozen, because there may be one for each call.
    """

    job_id: JobId
    lease: LeaseNumber
    calls: list[StreamedCall]
    names: list[CallName] = []


class CancelCalls(CallMessage, msgspec.Struct, frozen=True):
    """Cancel calls of a call stream; they return no result."""

    job_id: JobId
    lease: LeaseNumber
    numbers: tuple[int, ...]


class SendBlob(CallMessage, msgspec.Struct, frozen=True):
    """Store a value, which later jobs name by its SHA-256 digest of 32 bytes."""

    digest: bytes
    data: memoryview | bytes


Command: TypeAlias = (
    RunJob | CancelJob | Dismiss | WakeMachine | CallMessage | ModelMessage
)


# Events: what a worker reports to the coordinator.

RunningJobNames: TypeAlias = tuple[tuple[JobId, LeaseNumber], ...]
"""Jobs, each with the lease under which its worker runs it."""


class Joined(msgspec.Struct, frozen=True):
    """A worker joined.  ``name`` is its identity, unique within its wire.

    ``running`` names the jobs that it runs since an earlier connection, which it goes
    on with if it is given them again; None: it keeps none when a connection is lost.
    """

    name: str
    offer: Offer
    running: RunningJobNames | None = None


class OffersChanged(msgspec.Struct, frozen=True):
    """The offers of a peer from now on, one for each model.

    Only on wires where one connection carries all models of a peer.
    """

    offers: tuple[Offer, ...]


class Draining(msgspec.Struct, frozen=True):
    """The worker finishes its jobs and takes no new ones."""

    reason: str


class HealthReported(msgspec.Struct, frozen=True):
    """The worker reported the health of its machine."""

    health: MachineHealth


class LoadChanged(msgspec.Struct, frozen=True):
    """The worker reported a change of its load."""

    load: WorkerLoad


class AnswerChunk(msgspec.Struct):
    """Pieces of the answer, in order: whole characters, never empty.

    ``copied``: they were sent along the ``TextRoute`` before.

    Not frozen, because that would double the cost of construction, and there is one for
    each token.
    """

    job_id: JobId
    lease: LeaseNumber
    pieces: list[AnswerPiece]
    copied: bool = False


class TextSent(msgspec.Struct):
    """Pieces that go along the route ``name``, after ``at`` characters of the lease.

    Not frozen, because there is one for each token.
    """

    name: bytes
    at: int
    pieces: list[AnswerPiece]


class Completed(msgspec.Struct, frozen=True):
    """The answer is complete.

    ``rest`` is the part not sent before; the whole answer, if a wire does not stream.
    ``copied`` is as in ``AnswerChunk``, of the rest.
    ``output``, ``value`` and ``blobs`` are as in ``Outcome``, and ``receipt`` is
    signed by the worker.
    """

    job_id: JobId
    lease: LeaseNumber
    finish_reason: str = "stop"
    usage: Usage | None = None  # None if the wire does not report it
    rest: tuple[AnswerPiece, ...] = ()
    output: str = ""
    receipt: SignedReceipt | None = None
    value: bytes = b""
    blobs: tuple[bytes, ...] = ()
    copied: bool = False


class ReceiptSent(msgspec.Struct, frozen=True):
    """A worker's receipt for a job, sent separately from its answer."""

    job_id: JobId
    receipt: SignedReceipt


class Rejected(msgspec.Struct, frozen=True):
    """The worker declined to start the job; another one may."""

    job_id: JobId
    lease: LeaseNumber
    reason: str


class Failed(msgspec.Struct, frozen=True):
    """The worker ran the job and it failed; running it again would fail again.

    ``exception`` is as in ``JobError``.
    """

    job_id: JobId
    lease: LeaseNumber
    error: str
    fault: Fault = Fault.WORKER
    exception: bytes = b""


class CallProgress(CallMessage, msgspec.Struct, frozen=True):
    """The progress of a call: a share from 0 to 1, if reported, and a remark."""

    job_id: JobId
    lease: LeaseNumber
    share: float | None = None
    remark: str = ""


class CallsReturned(CallMessage, msgspec.Struct):
    """The results of calls in a call stream, in the order of their ends.

    Not frozen, because there may be one for each call.
    """

    job_id: JobId
    lease: LeaseNumber
    results: list[CallResult]


class BlobMissing(CallMessage, msgspec.Struct, frozen=True):
    """A worker lacks a value: send it, and then the job again."""

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
