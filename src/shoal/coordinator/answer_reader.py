"""Reads an answer piece by piece: one cursor for each client."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from shoal.domain.errors import Cancelled, ShoalError
from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.vocabulary import TextRoute

if TYPE_CHECKING:
    from shoal.coordinator.answer import Answer

JOIN_AT = (
    1024  # pieces after which texts are joined: a list slot costs more than a character
)
DELTA_COST = 128  # characters that a piece counts for if it is more than text


def memory_cost(piece: AnswerPiece) -> int:
    """Return what a piece counts against memory limits, in characters."""
    return piece.size + DELTA_COST if isinstance(piece, Delta) else len(piece)


class RemoteReader(Protocol):
    """A client in another process, which may get pieces past this one.

    It is called where things happen, and must neither wait nor raise.
    """

    def on_pieces(self, pieces: Sequence[AnswerPiece], *, copied: bool) -> bool:
        """Take pieces; return whether any are on their way to the client.

        It finds in the answer what it did not take.  ``copied`` is as in
        ``AnswerChunk``.
        """

    def on_requeue(self) -> None:
        """Report that the job waits for another worker."""

    def on_lease(self, *, routable: bool, resumes: bool) -> TextRoute | None:
        """Note a new lease; return where its worker may send pieces, if ``routable``.

        ``resumes``: the worker goes on with the answer that it has begun.
        """

    def settle(self, then: Callable[[], None]) -> None:
        """Add to the answer what the client has of it, then call ``then``."""


class PieceBuffer(msgspec.Struct):
    """Pieces in order; adjacent texts are joined to save memory."""

    _old: list[AnswerPiece] = []
    _new: list[AnswerPiece] = []

    def extend(self, pieces: Sequence[AnswerPiece]) -> None:
        """Add pieces at the end."""
        self._new.extend(pieces)
        if len(self._new) >= JOIN_AT:
            self._old += _joined(self._new)
            self._new = []

    def all(self) -> list[AnswerPiece]:
        """Return the pieces as a new list."""
        return [*self._old, *self._new]


def _joined(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Join adjacent texts."""
    joined: list[AnswerPiece] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            joined.append("".join(texts))
            texts = []
        joined.append(piece)
    return [*joined, "".join(texts)] if texts else joined


UNREAD_MAX = 1 << 20  # characters a client may leave unread for a while
UNREAD_CEILING = 8 << 20  # characters at which it is slow at once
SLOW_SECONDS = 10.0  # seconds it may leave more than UNREAD_MAX unread


class AnswerCursor:
    """One reader's position in an answer; without ``counts`` it only observes.

    ``remote`` is the client, if it is in another process and follows what comes.
    ``answer`` names the worker that answers, or answered last.  ``on_cancelled`` is
    called before Cancelled is raised, and may raise another error.  ``ended`` is the
    outcome, once the reader has it.
    """

    def __init__(
        self, answer: "Answer", so_far: list[AnswerPiece], *, counts: bool
    ) -> None:
        self.counts = counts
        self.answer = answer
        self.job_id = answer.job_id
        self.ended: Outcome | None = None
        self.on_cancelled: Callable[[], None] | None = None
        self.remote: RemoteReader | None = None
        self._attentive = True  # whether it reads what comes, piece by piece
        self._unread = PieceBuffer(so_far) if so_far else None
        self._unread_size = 0
        self._full_since: float | None = None
        self._wake: asyncio.Future[None] | None = None
        self._aborted: ShoalError | None = None
        self._on_requeue: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._write: Callable[[Sequence[AnswerPiece]], bool] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or this cursor."""
        return bool(self.answer.end or self._aborted)

    async def read(self, *, once: bool = False) -> list[AnswerPiece]:
        """Wait for pieces and return them; an empty list at the end.

        ``once``: also if something else wakes the reader, and ``is_over`` tells.
        """
        while not (self._unread or self.answer.end or self._aborted):
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            if once:
                break
        unread, self._unread = self._unread, None
        self._unread_size = 0
        self._full_since = None
        if unread is None:
            return []
        self.answer.was_read = True
        return unread.all()

    async def outcome(self) -> Outcome:
        """Wait for the end.  Raises the ShoalError that the job ended with."""
        # A client that waits for the end reads nothing before it, so a successor may
        # give another answer.
        self._attentive = False
        self._unread = None
        while (self._aborted or self.answer.end) is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self.result()

    def result(self) -> Outcome:
        """Return the outcome, once it is over.  Raises as ``outcome`` does."""
        end = self._aborted or self.answer.end
        assert end is not None, "it is over"
        if isinstance(end, Outcome):
            self.ended = end
            return end
        if isinstance(end, Cancelled) and self.on_cancelled is not None:
            self.on_cancelled()
        raise end

    def follow(
        self, on_end: Callable[[], None], remote: RemoteReader | None
    ) -> list[AnswerPiece]:
        """Call ``on_end`` once it is over; return what there is to read now.

        What comes before the end goes to ``remote``; None: as with ``outcome``.
        """
        self._on_end, self.remote = on_end, remote
        unread, self._unread = self._unread, None
        if remote is None:
            self._attentive = False
            return []
        self._on_requeue = remote.on_requeue
        return [] if unread is None else unread.all()

    def on_requeue(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever the job waits for another worker."""
        self._on_requeue = call

    def on_pieces(self, write: Callable[[Sequence[AnswerPiece]], bool]) -> None:
        """Call ``write`` with pieces that come, while none are unread.

        It returns whether it took them; others are there to be read.
        """
        self._write = write

    # For the answer.

    def requeue(self) -> None:
        """Report that the job waits for another worker."""
        if self._on_requeue is not None:
            self._on_requeue()

    def push(
        self,
        pieces: Sequence[AnswerPiece],
        cost: int,
        now: float,
        *,
        copied: bool = False,
    ) -> bool:
        """Add pieces of ``cost`` characters; return whether the reader keeps up.

        ``copied`` is as in ``AnswerChunk``.
        """
        if not self._attentive:
            return True
        if self.remote is not None:
            if self.remote.on_pieces(pieces, copied=copied):
                self.answer.was_read = True
            return True
        if self._write is not None and not self._unread_size and self._write(pieces):
            self.answer.was_read = True
            return True
        if self._unread is not None:
            self._unread.extend(pieces)
        elif pieces:
            self._unread = PieceBuffer([], [*pieces])
        self._unread_size += cost
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return self._unread_size <= UNREAD_MAX or self._keeps_up(now)

    def release(self) -> None:
        """Call nothing more.

        What is called refers to the reader, so that both would stay until the garbage
        collector finds them, with all of the request.
        """
        self._on_requeue = self._on_end = self._write = self.remote = None

    def abort(self, error: ShoalError) -> None:
        """End this cursor, and no other, with an error."""
        self._aborted = error
        self.clear()
        self.end()

    def end(self) -> None:
        """Report that it is over."""
        if self._on_end is not None:
            self._on_end()
        else:
            self.wake()

    def clear(self) -> None:
        """Drop unread pieces."""
        self._unread = None
        self._unread_size = 0
        self._full_since = None

    def wake(self) -> None:
        """Wake the reader."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _keeps_up(self, now: float) -> bool:
        if self._full_since is None:
            self._full_since = now
        waited = now - self._full_since
        return waited <= SLOW_SECONDS and self._unread_size <= UNREAD_CEILING
