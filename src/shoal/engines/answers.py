"""Decodes a server's streamed answers.

Source: OpenAI API reference, "Streaming".
"""

import msgspec

from shoal.domain.errors import JobError, LimitExceeded, Unavailable
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.engines.engine import Finished
from shoal.engines.server_errors import (
    DECODE_ERRORS,
    ServerLost,
    stream_error,
)
from shoal.engines.sse import EventReader
from shoal.engines.stream_chunks import (
    ABORTED,
    StreamChunk,
    UsageTally,
    known_finish_reason,
    piece_from_choice,
)

TRUNCATED = "the server's answer ended in the middle"

# llama-server sends null while it reads one of several prompts.
_decoder: msgspec.json.Decoder[StreamChunk | None] = msgspec.json.Decoder(
    StreamChunk | None
)


class AnswerReader:
    """Decodes one answer; ``done`` once it is complete.

    Args:
        choices: for each of the ``prompts``.
        secret: text removed from the server's error messages.
    """

    def __init__(self, choices: int = 1, prompts: int = 1, secret: str = "") -> None:
        self.done = False
        self._choices = choices * prompts
        self._tally = UsageTally(choices, prompts)
        self._secret = secret
        self._events = EventReader()
        self._seen_choices: set[int] = set()
        self._ended_choices: set[int] = set()
        self._finish_reason: str | None = None

    def feed(self, data: bytes) -> list[AnswerPiece]:
        """Decode received bytes; return the complete pieces, joined where possible.

        Raises JobError if the format is invalid, and the result of ``stream_error`` if
        the server reports an error.
        """
        batch = PieceBatch()
        try:
            for event in self._events.feed(data):
                if not self.done:
                    self._receive(event, batch)
        except LimitExceeded as error:
            raise JobError(f"the server sent too much: {error}") from error
        return batch.pieces()

    def finished(self) -> Finished:
        """Return how the answer ended.

        Raises ServerLost if the stream broke off, and JobError if choices are missing.
        """
        if not self.done and len(self._ended_choices) < self._choices:
            raise ServerLost(TRUNCATED)
        missing = self._choices - len(self._seen_choices | self._ended_choices)
        if self._choices > 1 and missing > 0:
            raise JobError(f"the server left out {missing} of {self._choices} choices")
        return Finished(
            known_finish_reason(self._finish_reason) or "stop", self._tally.usage()
        )

    def _receive(self, event: bytes, batch: "PieceBatch") -> None:
        if event == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decoder.decode(event)
        except DECODE_ERRORS as error:
            raise JobError(f"the server sent no chunk of an answer: {error}") from error
        if chunk is None:
            return
        if chunk.is_error:
            raise stream_error(event, self._secret)
        several = self._choices > 1
        for choice in chunk.choices:
            if several:
                self._seen_choices.add(choice.index)
            if choice.finish_reason is not None:
                if choice.finish_reason in ABORTED:
                    raise Unavailable("the server gave the answer up")
                self._ended_choices.add(choice.index)
                self._finish_reason = choice.finish_reason
            if (piece := piece_from_choice(choice, several)) is not None:
                batch.add(piece)
        if chunk.usage is not None:
            self._tally.add(chunk.usage)


class PieceBatch:
    """Pieces in order; adjacent pieces of the same text are joined.

    The cost of forwarding depends on the number of pieces far more than on their size.
    """

    def __init__(self) -> None:
        self._pieces: list[AnswerPiece] = []
        self._texts: list[str] = []
        self._texts_of: tuple[int, str] | None = None  # None: the only choice

    def add(self, piece: AnswerPiece) -> None:
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

    def pieces(self) -> list[AnswerPiece]:
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
