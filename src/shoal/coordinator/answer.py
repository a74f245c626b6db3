"""The answer to one job, from the workers that write it to the clients that read it."""

import math
from collections.abc import Sequence
from typing import Protocol

from shoal.coordinator.answer_reader import (
    AnswerCursor,
    PieceBuffer,
    RemoteReader,
    memory_cost,
)
from shoal.coordinator.connections import WorkerConnection
from shoal.domain.answer_assembly import assemble, is_thought, pieces_after, replay
from shoal.domain.errors import Cancelled, ShoalError, WorkerLost
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Delta, Outcome, Usage
from shoal.domain.vocabulary import CallResult, TextRoute

ANSWER_MAX = 32 << 20  # characters of one answer
NOT_CONTINUED = (
    "the worker was lost in the middle of the answer, and no other worker can continue "
    "it. Repeat the request. Answers survive on engines that continue them (`shoal "
    "status` says which do); with temperature 0 or a seed, any worker with the model "
    "can repeat them"
)
OTHER_ANSWER = (
    "the coordinator was lost in the middle of the answer, and the next one has a "
    "different beginning of it. Repeat the request"
)
TOKENS_MAX = 2**31 - 1  # the most that a worker may report for one answer


class EndedJob(Protocol):
    """A job that has ended: its outcome, and the worker that had it last."""

    @property
    def job_id(self) -> JobId: ...

    @property
    def worker_id(self) -> WorkerId | None: ...

    @property
    def lease(self) -> LeaseNumber: ...

    @property
    def end(self) -> Outcome | ShoalError | None: ...


class JobListener(Protocol):
    """Callbacks for the events of a job.  They must neither wait nor raise.

    A task and a future per job would be most of the cost of a short call.
    """

    def on_accepted(self, job_id: JobId) -> None:
        """The job is accepted; if it is durable, it is in the store."""

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        """A worker got the job."""

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        """The worker reports progress of a call."""

    def on_results(self, results: list[CallResult]) -> None:
        """Calls in a call stream returned."""

    def on_end(self, job: EndedJob) -> None:
        """The job has ended: done, failed, or refused at once."""

    def runs(self, number: int) -> bool:
        """Return whether a call of a call stream is with its worker."""


class ReaderTooSlow(Exception):
    """The client reads more slowly than the worker writes."""


class UnusableOutput(Exception):
    """The worker's output cannot be part of this answer.

    ``lost`` says that the cause is the loss of the worker before it.
    """

    def __init__(self, reason: str, *, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class Answer:
    """The output of one job so far, for any number of readers.

    The whole output is kept, because the successor of a lost worker needs it: a worker
    that can continue gets its text as the beginning; from a worker that repeats it, the
    text is expected again, and dropped.

    Several leases may write one after the other; ``lease`` is the current one.  While a
    job is hedged, it is the first worker's until one of the two begins.

    ``text_max`` is the most characters of text that the job's limit can mean.
    """

    def __init__(
        self,
        job_id: JobId,
        listener: JobListener | None = None,
        text_max: float = math.inf,
    ) -> None:
        self.job_id = job_id
        self.listener = listener
        self.lease = LeaseNumber(0)
        self.worker_id: WorkerId | None = None
        self.last_output: float | None = None  # of the present lease
        self.progress: tuple[float | None, str] = (None, "")  # that was reported last
        self.left_at: float | None = None  # when it lost its last reader
        self.end: Outcome | ShoalError | None = None  # None: it has not ended
        self.refused = False  # whether it ended because the job was not accepted
        self._rival: tuple[LeaseNumber, WorkerId] | None = None
        self.was_read = False  # whether any reader has seen a piece
        self._pieces = PieceBuffer()
        self._joinable = True  # whether all of them are text, or thoughts before it
        self.size = 0  # characters so far, about as many as people count
        self._written = 0  # characters of texts alone
        self._text_max = text_max  # of these
        self._cost = 0  # characters, as memory is counted
        self._expected = ""  # text that the present worker has to repeat
        self._repeated = 0  # characters of it that it has
        self._repeats_all = False  # whether its first output is all it has so far
        self._readings: list[AnswerCursor] = []

    @classmethod
    def completed(cls, job_id: JobId, outcome: Outcome) -> "Answer":
        """Return the answer of a job that is done."""
        answer = cls(job_id)
        answer._pieces = PieceBuffer(replay(outcome))
        answer.end = outcome
        return answer

    @property
    def text(self) -> str:
        """The text so far, without the thoughts before it."""
        return "".join(each for each in self._pieces.all() if isinstance(each, str))

    @property
    def pieces(self) -> list[AnswerPiece]:
        """All that was written so far."""
        return self._pieces.all()

    @property
    def thoughts(self) -> str:
        """The thoughts so far, of an answer of nothing but these and text."""
        pieces = self._pieces.all() if self._joinable else ()
        return "".join(
            str(each.fields[THOUGHTS]) for each in pieces if isinstance(each, Delta)
        )

    @property
    def has_readers(self) -> bool:
        """Whether a client that requested the job still reads."""
        return any(reading.counts for reading in self._readings)

    def open_reader(
        self, *, counts: bool = True, after: Sequence[AnswerPiece] = ()
    ) -> AnswerCursor:
        """Return a cursor at the beginning; without ``counts`` it only observes.

        ``after``: begin after these pieces, which the client has.  Raises WorkerLost if
        the answer does not begin so.
        """
        so_far: list[AnswerPiece] | None = self._pieces.all()
        if after:
            so_far = pieces_after(so_far or (), after)
            if so_far is None:
                raise WorkerLost(OTHER_ANSWER)
            self.was_read = True  # elsewhere
        reading = AnswerCursor(self, so_far or [], counts=counts)
        self._readings.append(reading)
        return reading

    def remove_reader(self, reading: AnswerCursor) -> None:
        """Detach a cursor."""
        reading.release()
        if reading in self._readings:
            self._readings.remove(reading)

    def seed(self, begun: Sequence[AnswerPiece], now: float) -> None:
        """Begin with what a client has of the answer from another coordinator.

        Its reader begins ``after`` that.  Of several clients, the longest beginning
        counts.  Nothing changes if it is of another answer, or once a worker has had
        the job here.
        """
        if self.lease or self.end is not None:
            return
        if rest := pieces_after(begun, self._pieces.all()):
            self.append(rest, now)
            self.last_output = None  # no worker's

    # Leases.

    def grant(
        self,
        lease: LeaseNumber,
        worker_id: WorkerId,
        *,
        continues: bool,
        repeats: bool = True,
        resumes: bool = False,
    ) -> str:
        """Let ``lease`` write from now on; return the text that it continues.

        Only a worker that ``continues`` gets a beginning.  Any other starts over; if a
        client has read text already, it must repeat that.  An answer that was read in
        its thoughts restarts after them, unless the worker continues these.  One that
        ``resumes`` has given this very answer: if it is more than text, it comes again
        as a whole.

        Raises UnusableOutput if the worker cannot do that, as it ``repeats`` none.
        """
        self.lease = lease
        self.worker_id = worker_id
        self.last_output = None
        self._rival = None
        self._expected = ""
        self._repeated = 0
        self._repeats_all = False
        if not self._cost:  # nothing was written yet
            return ""
        text = self.text
        if continues and self._joinable and (text or self.thoughts):
            return text
        if not self.was_read:
            self._begin_anew()
        elif not self._joinable and resumes:
            self._repeats_all = True
        elif not self._joinable:
            raise UnusableOutput(
                "the worker was lost in the middle of an answer that is more than text "
                "(tool calls, log probabilities, several choices): two halves of it "
                "cannot be joined. Repeat the request",
                lost=True,
            )
        elif text and not repeats:
            raise UnusableOutput(NOT_CONTINUED, lost=True)
        else:
            self._expected = text
        return ""

    def route(self, *, resumes: bool, alone: bool) -> TextRoute | None:
        """Return where the worker of the new lease may send pieces to its client.

        None: only here, as another may write as well unless it is ``alone``, as what it
        sends has to be compared with what is here, or as several clients read it.
        """
        repeats = resumes or self._expected or self._repeats_all
        routable = alone and not repeats and len(self._readings) == 1
        route = None
        for each in self._readings:
            if each.remote is not None:
                route = each.remote.on_lease(routable=routable, resumes=resumes)
        return route

    @property
    def remote_readers(self) -> list[RemoteReader]:
        """Those of its readers that are in other processes."""
        return [each.remote for each in self._readings if each.remote is not None]

    def hedge(self, lease: LeaseNumber, worker_id: WorkerId) -> None:
        """Let a second lease write as well, if the first has not begun."""
        if self.last_output is None:
            self._rival = (lease, worker_id)

    def unhedge(self, lease: LeaseNumber) -> None:
        """Let the other of two leases write, unless one has begun."""
        if self._rival is not None and lease == self.lease:
            self.lease, self.worker_id = self._rival
        self._rival = None

    def accepts_lease(self, lease: LeaseNumber) -> bool:
        """Say whether ``lease`` may write; of two, the first to write wins."""
        if self._rival is not None and lease in (self.lease, self._rival[0]):
            if lease != self.lease:
                self.lease, self.worker_id = self._rival
            self._rival = None
        return lease == self.lease

    def requeue(self) -> None:
        """Let the readers know that the job waits for another worker."""
        for reading in self._readings:
            reading.requeue()

    # Output of the current lease.

    def append(
        self, pieces: Sequence[AnswerPiece], now: float, *, copied: bool = False
    ) -> bool:
        """Append pieces of the current lease; return whether they were the first.

        ``copied`` is as in ``AnswerChunk``.

        Raises UnusableOutput if they do not repeat what they must or exceed the limit,
        ReaderTooSlow if the last reader does not keep up: a worker never waits for a
        client.
        """
        first = self.last_output is None
        self.last_output = now
        if self._expected or self._repeats_all:
            pieces = self._skip_repeated(pieces)
            if not pieces:
                return first
        cost = 0
        for piece in pieces:
            if isinstance(piece, str):
                cost += len(piece)
                self.size += len(piece)
                self._written += len(piece)
            else:
                self._written += piece.written
                cost += memory_cost(piece)
                self.size += piece.size or 1
                self._joinable = self._joinable and is_thought(piece)
        self._cost += cost
        if self._cost > ANSWER_MAX:
            limit = f"the answer exceeds the limit of {ANSWER_MAX} characters"
            raise UnusableOutput(limit, lost=False)
        if self._written > self._text_max:
            raise UnusableOutput(
                f"the worker wrote far beyond max_tokens ({self._written} characters): "
                "it ignores the limit",
                lost=False,
            )
        self._pieces.extend(pieces)
        slow: list[AnswerCursor] = []
        for each in self._readings:
            if not each.push(pieces, cost, now, copied=copied):
                slow.append(each)
        if slow:
            self._drop_slow(slow)
        return first

    def check_complete(self) -> None:
        """Raise UnusableOutput if a successor ended before it had repeated all."""
        if self._expected or self._repeats_all:
            raise UnusableOutput(
                "the worker that took over ended its answer before the place where the "
                "lost worker was",
                lost=True,
            )

    def assemble(self, finish_reason: str, usage: Usage | None) -> Outcome:
        """Assemble the outcome; ``usage`` is as reported by the worker."""
        counted = None if usage is None else usage.bounded(TOKENS_MAX)
        return assemble(self._pieces.all(), finish_reason, counted)

    def notify_leased(self, peer: WorkerConnection) -> None:
        """Notify the listener that ``peer`` has the current lease."""
        if self.listener is not None and self.end is None:
            assert self.worker_id is not None, "a lease names a worker"
            self.listener.on_leased(self.job_id, self.lease, self.worker_id, peer)

    def report_progress(self, share: float | None, remark: str, now: float) -> None:
        """Pass on the progress of a call; it counts as output for time limits."""
        self.last_output = now
        self.progress = (share, remark)
        if self.listener is not None and self.end is None:
            self.listener.on_progress(self.job_id, share, remark)

    def deliver_results(self, returns: list[CallResult]) -> None:
        """Pass on results of calls in a call stream."""
        if self.listener is not None and self.end is None:
            self.listener.on_results(returns)

    # The end.

    def finish(self, end: Outcome | ShoalError) -> None:
        """End the answer with its outcome or an error; the first end counts."""
        if self.end is None:
            self.end = end
            for reading in [*self._readings]:  # one may leave at once
                reading.end()
            if self.listener is not None:
                self.listener.on_end(self)

    def refuse(self, error: ShoalError) -> None:
        """End the answer to a job that is not accepted."""
        self.refused = True
        self.finish(error)

    def interrupt(self, error: ShoalError) -> None:
        """End all cursors with an error; the answer itself goes on."""
        readings, self._readings = self._readings, []
        for reading in readings:
            reading.abort(error)

    def _begin_anew(self) -> None:
        self._pieces = PieceBuffer()
        self._joinable = True
        self.size = self._written = self._cost = 0
        for reading in self._readings:
            reading.clear()

    def _skip_repeated(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        """Return the part of ``pieces`` that goes beyond what is repeated."""
        if self._repeats_all:
            self._repeats_all = False
            rest = pieces_after(pieces, self._pieces.all())
            if rest is None:
                raise _different_answer()
            return rest
        beyond: list[AnswerPiece] = []
        for piece in pieces:
            if not isinstance(piece, str):
                if not self._expected:
                    beyond.append(piece)
                elif not is_thought(piece):
                    raise _different_answer()
            elif not self._expected:
                beyond.append(piece)
            elif text := self._skip_repeated_text(piece):
                beyond.append(text)
        return beyond

    def _skip_repeated_text(self, text: str) -> str:
        rest = len(self._expected) - self._repeated
        if not self._expected.startswith(text[:rest], self._repeated):
            raise _different_answer()
        self._repeated += len(text)
        if self._repeated >= len(self._expected):
            self._expected = ""
        return text[rest:]

    def _drop_slow(self, slow: list[AnswerCursor]) -> None:
        for reading in slow:
            self.remove_reader(reading)
            reading.abort(Cancelled("the client reads too slowly"))
        if any(reading.counts for reading in slow) and not self.has_readers:
            raise ReaderTooSlow


def _different_answer() -> UnusableOutput:
    return UnusableOutput(
        "the answer of the worker that took over differs from the one that the lost "
        "worker began",
        lost=True,
    )
