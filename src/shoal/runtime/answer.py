"""A job's text on its way from workers to whoever asked."""

import asyncio
from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Outcome

UNREAD_MAX = 1 << 20  # characters a client may leave unread for a while
UNREAD_CEILING = 8 << 20  # characters at which it is slow at once
SLOW_AFTER = 10.0  # seconds it may leave more than UNREAD_MAX unread
JOIN_ABOVE = 1024  # unread pieces that are joined into one: a list slot costs more
ANSWER_MAX = 32 << 20  # characters of one answer


class Slow(Exception):
    """The client reads more slowly than the worker writes."""


class Spoilt(Exception):
    """What the worker sends cannot be part of this answer.

    ``lost`` says that it would have been, had the worker before it not been lost.
    """

    def __init__(self, reason: str, *, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class Reader(Protocol):
    """What the asker sees of an answer."""

    job_id: JobId

    async def read(self) -> list[str]:
        """Wait for text; return the pieces that came, or nothing at the end."""
        ...

    async def outcome(self) -> Outcome:
        """Wait for the end.  Raises the ShoalError that the job ended with."""
        ...


class Answer:
    """The text of one job: all of it, and the part that was not read yet.

    All of it is kept because a lost worker's successor needs it: one that can continue
    is told it, and from one that starts over it is expected again and dropped.

    Several leases may write one after the other; ``lease`` is the present one.
    """

    def __init__(self, job_id: JobId, *, attended: bool = True) -> None:
        self.job_id = job_id
        self.lease = LeaseNumber(0)
        self.last_output: float | None = None  # of the present lease
        self._attended = attended  # whether anybody reads what comes, piece by piece
        self._given = False  # whether anybody has
        self._pieces: list[str] = []
        self._size = 0
        self._unread: list[str] = []
        self._unread_size = 0
        self._full_since: float | None = None
        self._expected = ""  # text that the present worker has to repeat
        self._repeated = 0  # characters of it that it has
        self._wake: asyncio.Future[None] | None = None
        self._end: Outcome | ShoalError | None = None

    @property
    def text(self) -> str:
        """Everything so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def ended(self) -> bool:
        return self._end is not None

    # The hub's side.

    def grant(self, lease: LeaseNumber, *, continues: bool) -> None:
        """Let ``lease`` write from now on.

        Unless it ``continues``, it starts over, and must repeat what the asker was
        given already.
        """
        self.lease = lease
        self.last_output = None
        self._expected = ""
        self._repeated = 0
        if continues:
            return
        if self._given:
            self._expected = self.text
        else:
            self._pieces.clear()
            self._unread.clear()
            self._size = self._unread_size = 0
            self._full_since = None

    def put(self, text: str, now: float) -> bool:
        """Add text of the present lease; say whether it was the first.

        Raises Spoilt if it is not what it must be or too much, Slow if the client
        does not keep up: a worker must never wait for a client.
        """
        first = self.last_output is None
        self.last_output = now
        if self._expected:
            text = self._without_repetition(text)
            if not text:
                return first
        self._size += len(text)
        if self._size > ANSWER_MAX:
            limit = f"the answer exceeds the limit of {ANSWER_MAX} characters"
            raise Spoilt(limit, lost=False)
        self._pieces.append(text)
        if self._attended:
            self._unread.append(text)
            self._unread_size += len(text)
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)
            if len(self._unread) > JOIN_ABOVE:
                self._unread = ["".join(self._unread)]
            if self._unread_size > UNREAD_MAX:
                self._check_pace(now)
        return first

    def finish(self, outcome: Outcome) -> None:
        """Say that the answer is whole."""
        self._close(outcome)

    def fail(self, error: ShoalError) -> None:
        """Say how the job ended instead."""
        self._close(error)

    def check_whole(self) -> None:
        """Raise Spoilt if the present worker stopped before where the last one was."""
        if self._expected:
            raise Spoilt(
                "the worker that took over ended before where the lost one had been",
                lost=True,
            )

    # The asker's side.

    async def read(self) -> list[str]:
        while not self._unread and self._end is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        pieces, self._unread = self._unread, []
        self._given = self._given or bool(pieces)
        self._unread_size = 0
        self._full_since = None
        return pieces

    async def outcome(self) -> Outcome:
        # Whoever waits for the end is given nothing before it, so a worker that takes
        # over may as well give another answer.
        self._attended = False
        self._unread.clear()
        self._unread_size = 0
        while self._end is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if isinstance(self._end, Outcome):
            return self._end
        assert self._end is not None
        raise self._end

    def _without_repetition(self, text: str) -> str:
        rest = len(self._expected) - self._repeated
        if not self._expected.startswith(text[:rest], self._repeated):
            raise Spoilt(
                "the worker that took over gives another answer than the lost one "
                "began",
                lost=True,
            )
        self._repeated += len(text)
        if self._repeated >= len(self._expected):
            self._expected = ""
        return text[rest:]

    def _check_pace(self, now: float) -> None:
        if self._full_since is None:
            self._full_since = now
        waited = now - self._full_since
        if waited > SLOW_AFTER or self._unread_size > UNREAD_CEILING:
            raise Slow(f"{self._unread_size} characters unread")

    def _close(self, end: Outcome | ShoalError) -> None:
        if self._end is None:
            self._end = end
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)
