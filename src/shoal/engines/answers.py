"""Turns the bytes of a streamed answer into its pieces."""

import msgspec

from shoal.domain.errors import JobError, LimitExceeded, Unavailable
from shoal.domain.outcome import Delta, Piece
from shoal.engines.chunks import ABORTED, Chunk, Tally, piece_of, reason_of
from shoal.engines.port import Finished
from shoal.engines.refusals import UNREADABLE, failure
from shoal.engines.sse import EventReader

BROKEN_OFF = "the server's answer ended in the middle"

# llama-server sends null where it reads one of several prompts.
_decoder: msgspec.json.Decoder[Chunk | None] = msgspec.json.Decoder(Chunk | None)


class AnswerReader:
    """Reads one answer; ``done`` once nothing follows.

    Args:
        choices: to each of the ``prompts``.
        secret: kept out of whatever the server says went wrong.
    """

    def __init__(self, choices: int = 1, prompts: int = 1, secret: str = "") -> None:
        self.done = False
        self._choices = choices * prompts
        self._tally = Tally(choices, prompts)
        self._secret = secret
        self._events = EventReader()
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._finish_reason: str | None = None

    def feed(self, data: bytes) -> list[Piece]:
        """Take a read; return what it completes, as few pieces as keep the order.

        Raises JobError if the server breaks the format, and whatever ``failure`` makes
        of an error that it reports.
        """
        batch = Batch()
        try:
            for event in self._events.feed(data):
                if not self.done:
                    self._take(event, batch)
        except LimitExceeded as error:
            raise JobError(f"the server sent too much: {error}") from error
        return batch.pieces()

    def finished(self) -> Finished:
        """Say how the answer ended.

        Raises Unavailable if it only broke off, and JobError if choices are missing.
        """
        if not self.done and len(self._ended) < self._choices:
            raise Unavailable(BROKEN_OFF)
        missing = self._choices - len(self._seen | self._ended)
        if self._choices > 1 and missing > 0:
            raise JobError(f"the server left out {missing} of {self._choices} choices")
        return Finished(reason_of(self._finish_reason) or "stop", self._tally.usage())

    def _take(self, event: bytes, batch: "Batch") -> None:
        if event == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decoder.decode(event)
        except UNREADABLE as error:
            raise JobError(f"the server sent no chunk of an answer: {error}") from error
        if chunk is None:
            return
        if chunk.bad:
            raise failure(event, self._secret)
        several = self._choices > 1
        for choice in chunk.choices:
            if several:
                self._seen.add(choice.index)
            if choice.finish_reason is not None:
                if choice.finish_reason in ABORTED:
                    raise Unavailable("the server gave the answer up")
                self._ended.add(choice.index)
                self._finish_reason = choice.finish_reason
            if (piece := piece_of(choice, several)) is not None:
                batch.add(piece)
        if chunk.usage is not None:
            self._tally.add(chunk.usage)


class Batch:
    """Pieces in their order, with neighbours joined that go on with the same text.

    To whoever passes them on, a piece costs far more than a character.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._texts_of: tuple[int, str] | None = None  # None: the only choice

    def add(self, piece: Piece) -> None:
        if isinstance(piece, str):
            if self._texts_of is not None:
                self._flush()
            self._texts.append(piece)
            return
        text = None
        if len(piece.fields) == 1 and piece.logprobs is None:
            ((name, text),) = piece.fields.items()
        if not isinstance(text, str) or piece.finish_reason is not None:
            self._flush()
            self._pieces.append(piece)
            return
        if self._texts_of != (piece.choice, name):
            self._flush()
            self._texts_of = piece.choice, name
        self._texts.append(text)

    def pieces(self) -> list[Piece]:
        self._flush()
        return self._pieces

    def _flush(self) -> None:
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            if self._texts_of is None:
                self._pieces.append(text)
            else:
                choice, name = self._texts_of
                self._pieces.append(Delta(choice, {name: text}))
        self._texts_of = None
