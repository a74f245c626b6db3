"""A job's answer on its way from workers to whoever asked."""

from collections.abc import Sequence

from shoal.domain.assembly import assemble, disassemble
from shoal.domain.errors import Cancelled, ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome, Piece, Usage
from shoal.domain.vocabulary import LaneReturn
from shoal.runtime.asker import Asker
from shoal.runtime.peers import Peer
from shoal.runtime.pieces import Pieces, cost_of
from shoal.runtime.reading import Reading

ANSWER_MAX = 32 << 20  # characters of one answer
TOKENS_MAX = 2**31 - 1  # that a worker is believed to have read or written for one


class Slow(Exception):
    """The client reads more slowly than the worker writes."""


class Spoilt(Exception):
    """What the worker sends cannot be part of this answer.

    ``lost`` says that it would have been, had the worker before it not been lost.
    """

    def __init__(self, reason: str, *, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class Answer:
    """What came of one job so far, for any number of readers.

    All of it is kept because a lost worker's successor needs it: one that can continue
    is told it, and from one that starts over it is expected again and dropped.

    Several leases may write one after the other; ``lease`` is the present one.  While
    two workers have the job, it is that of the one which was given it first, until one
    of them begins.

    ``asker`` is told of what becomes of the job, besides whoever reads.
    """

    def __init__(self, job_id: JobId, asker: Asker | None = None) -> None:
        self.job_id = job_id
        self.asker = asker
        self.lease = LeaseNumber(0)
        self.worker_id: WorkerId | None = None
        self.last_output: float | None = None  # of the present lease
        self._rival: tuple[LeaseNumber, WorkerId] | None = None
        self._given = False  # whether any reader has seen a piece
        self._pieces = Pieces()
        self._plain = True  # whether all of them are texts
        self._size = 0  # characters, as people count them
        self._cost = 0  # characters, as memory is counted
        self._expected = ""  # text that the present worker has to repeat
        self._repeated = 0  # characters of it that it has
        self._readings: list[Reading] = []
        self._end: Outcome | ShoalError | None = None

    @classmethod
    def ended_with(cls, job_id: JobId, outcome: Outcome) -> "Answer":
        """Return the answer of a job that was done earlier."""
        answer = cls(job_id)
        answer._pieces.replace(disassemble(outcome))
        answer._end = outcome
        return answer

    @property
    def text(self) -> str:
        """Everything so far, if it is only text."""
        if not self._plain:
            return ""
        text = "".join(str(piece) for piece in self._pieces.all())
        self._pieces.replace([text] if text else [])
        return text

    @property
    def size(self) -> int:
        """How many characters there are so far, about."""
        return self._size

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def end(self) -> Outcome | ShoalError | None:
        return self._end

    @property
    def wanted(self) -> bool:
        """Whether anybody who asked for it still reads."""
        return any(reading.asked for reading in self._readings)

    def reading(self, *, asked: bool = True) -> Reading:
        """Begin to read, from the beginning; who has not ``asked`` only looks on."""
        reading = Reading(self, self._pieces.all(), asked=asked)
        self._readings.append(reading)
        return reading

    def leave(self, reading: Reading) -> None:
        """Let a reader go."""
        if reading in self._readings:
            self._readings.remove(reading)

    # Leases.

    def grant(self, lease: LeaseNumber, worker_id: WorkerId, *, continues: bool) -> str:
        """Let ``lease`` write from now on; return the beginning that it goes on from.

        Only one that ``continues`` is given a beginning.  Without one it starts over,
        and must repeat what an asker was given already.

        Raises Spoilt if that can be done by nobody.
        """
        self.lease = lease
        self.worker_id = worker_id
        self.last_output = None
        self._rival = None
        self._expected = ""
        self._repeated = 0
        if continues and self._plain:
            return self.text
        if not self._given:
            self._begin_anew()
        elif self._plain:
            self._expected = self.text
        else:
            raise Spoilt(
                "the worker was lost in the middle of an answer that is more than text",
                lost=True,
            )
        return ""

    def hedge(self, lease: LeaseNumber, worker_id: WorkerId) -> None:
        """Let a second lease write as well, if the first has not begun."""
        if self.last_output is None:
            self._rival = (lease, worker_id)

    def unhedge(self, lease: LeaseNumber) -> None:
        """Let the other of two leases write, unless one of them has begun."""
        if self._rival is not None and lease == self.lease:
            self.lease, self.worker_id = self._rival
        self._rival = None

    def admits(self, lease: LeaseNumber) -> bool:
        """Say whether ``lease`` may write.  Of two, the first that does is the one."""
        if self._rival is not None and lease in (self.lease, self._rival[0]):
            if lease != self.lease:
                self.lease, self.worker_id = self._rival
            self._rival = None
        return lease == self.lease

    # What the present lease says.

    def put(self, pieces: Sequence[Piece], now: float) -> bool:
        """Add pieces of the present lease; say whether they were the first.

        Raises Spoilt if it is not what it must be or too much, Slow if the last reader
        does not keep up: a worker must never wait for a client.
        """
        first = self.last_output is None
        self.last_output = now
        if self._expected:
            pieces = self._beyond_repetition(pieces)
            if not pieces:
                return first
        cost = 0
        for piece in pieces:
            if isinstance(piece, str):
                cost += len(piece)
                self._size += len(piece)
            else:
                cost += cost_of(piece)
                self._size += piece.size
                self._plain = False
        self._cost += cost
        if self._cost > ANSWER_MAX:
            limit = f"the answer exceeds the limit of {ANSWER_MAX} characters"
            raise Spoilt(limit, lost=False)
        self._pieces.extend(pieces)
        slow = [each for each in self._readings if not each.put(pieces, cost, now)]
        if slow:
            self._cut_off(slow)
        return first

    def check_whole(self) -> None:
        """Raise Spoilt if the present worker stopped before where the last one was."""
        if self._expected:
            raise Spoilt(
                "the worker that took over ended before where the lost one had been",
                lost=True,
            )

    def whole(self, finish_reason: str, usage: Usage | None) -> Outcome:
        """Put together what came; ``usage`` is what the worker says it took."""
        return assemble(self._pieces.all(), finish_reason, _believed(usage))

    def leased(self, peer: Peer) -> None:
        """Say which worker has the present lease, once it was told."""
        if self.asker is not None:
            self.asker.leased(self.job_id, self.lease, peer)

    def advance(self, share: float | None, remark: str, now: float) -> None:
        """Pass on how far a call has come, which is a sign of life as well."""
        self.last_output = now
        if self.asker is not None:
            self.asker.advanced(self.job_id, share, remark)

    def put_returns(self, returns: list[LaneReturn]) -> None:
        """Pass on what came of calls in a lane."""
        if self.asker is not None and self._end is None:
            self.asker.returned(returns)

    # The end.

    def finish(self, outcome: Outcome) -> None:
        """Say that the answer is whole."""
        self._close(outcome)

    def fail(self, error: ShoalError) -> None:
        """Say how the job ended instead."""
        self._close(error)

    # A reading's side.

    def given(self) -> None:
        """Note that a reader has seen what there is."""
        self._given = True

    def _begin_anew(self) -> None:
        self._pieces.replace([])
        self._plain = True
        self._size = self._cost = 0
        for reading in self._readings:
            reading.forget()

    def _beyond_repetition(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return what of ``pieces`` was not there already."""
        beyond: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, str):
                if self._expected:
                    raise _another_answer()
                beyond.append(piece)
            elif not self._expected:
                beyond.append(piece)
            elif text := self._without_repetition(piece):
                beyond.append(text)
        return beyond

    def _without_repetition(self, text: str) -> str:
        rest = len(self._expected) - self._repeated
        if not self._expected.startswith(text[:rest], self._repeated):
            raise _another_answer()
        self._repeated += len(text)
        if self._repeated >= len(self._expected):
            self._expected = ""
        return text[rest:]

    def _cut_off(self, slow: list[Reading]) -> None:
        for reading in slow:
            self.leave(reading)
            reading.cut(Cancelled("the client reads too slowly"))
        if any(reading.asked for reading in slow) and not self.wanted:
            raise Slow

    def _close(self, end: Outcome | ShoalError) -> None:
        if self._end is None:
            self._end = end
            for reading in self._readings:
                reading.wake()
            if self.asker is not None:
                self.asker.ended(self)


def _believed(usage: Usage | None) -> Usage | None:
    """Return usage that can be reckoned with, whatever the worker said."""
    if usage is None:
        return None
    read, written = usage.prompt_tokens, usage.completion_tokens
    return Usage(_within(read), _within(written))


def _within(tokens: int) -> int:
    return min(max(0, tokens), TOKENS_MAX)


def _another_answer() -> Spoilt:
    return Spoilt(
        "the worker that took over gives another answer than the lost one began",
        lost=True,
    )
