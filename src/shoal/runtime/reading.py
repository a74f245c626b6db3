"""One asker's place in an answer."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome, Piece
from shoal.runtime.pieces import Pieces

UNREAD_MAX = 1 << 20  # characters a client may leave unread for a while
UNREAD_CEILING = 8 << 20  # characters at which it is slow at once
SLOW_AFTER = 10.0  # seconds it may leave more than UNREAD_MAX unread


class Reader(Protocol):
    """What one asker sees of an answer."""

    job_id: JobId

    @property
    def worker_id(self) -> WorkerId | None:
        """Who is answering, or did so last."""
        ...

    @property
    def attempts(self) -> int:
        """How many workers were given the job so far."""
        ...

    async def read(self) -> list[Piece]:
        """Wait for the answer; return the pieces that came, or nothing at the end."""
        ...

    async def outcome(self) -> Outcome:
        """Wait for the end.  Raises the ShoalError that the job ended with."""
        ...


class Source(Protocol):
    """What a reading needs of its answer."""

    job_id: JobId
    worker_id: WorkerId | None
    lease: LeaseNumber

    @property
    def end(self) -> Outcome | ShoalError | None: ...

    def given(self) -> None:
        """Note that a reader has seen what there is."""
        ...


class Reading:
    """One asker's place in an answer; who has not ``asked`` only looks on."""

    def __init__(self, answer: Source, so_far: list[Piece], *, asked: bool) -> None:
        self.asked = asked
        self.job_id = answer.job_id
        self._answer = answer
        self._attentive = True  # whether it reads what comes, piece by piece
        self._unread = Pieces()
        self._unread.replace(so_far)
        self._unread_size = 0
        self._full_since: float | None = None
        self._wake: asyncio.Future[None] | None = None
        self._cut: ShoalError | None = None

    @property
    def worker_id(self) -> WorkerId | None:
        return self._answer.worker_id

    @property
    def attempts(self) -> int:
        return self._answer.lease

    async def read(self) -> list[Piece]:
        while not (self._unread or self._answer.end or self._cut):
            await self._awake()
        pieces = self._unread.take()
        if pieces:
            self._answer.given()
        self._unread_size = 0
        self._full_since = None
        return pieces

    async def outcome(self) -> Outcome:
        # Whoever waits for the end is given nothing before it, so a worker that takes
        # over may as well give another answer.
        self._attentive = False
        self.forget()
        while (end := self._cut or self._answer.end) is None:
            await self._awake()
        if isinstance(end, Outcome):
            return end
        raise end

    # The answer's side.

    def put(self, pieces: Sequence[Piece], cost: int, now: float) -> bool:
        """Take pieces; say whether the reader keeps up.  ``cost`` is in characters."""
        if not self._attentive:
            return True
        self._unread.extend(pieces)
        self._unread_size += cost
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return self._unread_size <= UNREAD_MAX or self._keeps_up(now)

    def cut(self, error: ShoalError) -> None:
        """End the reading with an error of its own."""
        self._cut = error
        self.forget()
        self.wake()

    def forget(self) -> None:
        """Drop what was not read."""
        self._unread.replace([])
        self._unread_size = 0
        self._full_since = None

    def wake(self) -> None:
        """Let whoever waits look again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _awake(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _keeps_up(self, now: float) -> bool:
        if self._full_since is None:
            self._full_since = now
        waited = now - self._full_since
        return waited <= SLOW_AFTER and self._unread_size <= UNREAD_CEILING
