"""Decodes a server's responses: streamed pieces, embeddings, and scores.

Source: OpenAI API reference, "Streaming" and "Create embeddings".  Embeddings are
requested in base64, which takes a quarter of the time; a server without support for it
sends numbers.
"""

import base64
import binascii
import sys
from array import array
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.domain.errors import JobError, LimitExceeded, Unavailable
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.engines.engine import Finished
from shoal.engines.server_errors import (
    DECODE_ERRORS,
    ServerLost,
    parse_problem,
    stream_error,
)
from shoal.engines.sse import EventReader
from shoal.engines.stream_chunks import (
    ABORTED,
    TOKENS_MAX,
    StreamChunk,
    StreamUsage,
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


EMBEDDINGS_MAX = 256 * 1024 * 1024  # bytes: 2048 inputs of 4096 numbers, as text
FLOAT_SIZE = 4  # bytes


class EmbeddingItem(msgspec.Struct, frozen=True):
    embedding: list[float] | str
    index: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[EmbeddingItem]
    usage: StreamUsage | None = None


def decode_embeddings(
    body: bytes, inputs: int, secret: str = ""
) -> tuple[list[Delta], Usage | None]:
    """Return a piece for each of the ``inputs``, in their order.

    Raises JobError if the vectors are invalid, and the result of ``stream_error`` if
    the response is an error.
    """
    try:
        answer = msgspec.json.decode(body, type=EmbeddingList)
    except DECODE_ERRORS as error:
        if parse_problem(body) is not None:
            raise stream_error(body, secret) from error
        raise JobError(f"the server sent no embeddings: {error}") from error
    if sorted(vector.index for vector in answer.data) != list(range(inputs)):
        raise JobError(f"the server sent {len(answer.data)} embeddings for {inputs}")
    pieces = [
        Delta(vector.index, {"embedding": encode_vector(vector.embedding)})
        for vector in sorted(answer.data, key=lambda vector: vector.index)
    ]
    tokens = answer.usage
    if tokens is None or not tokens.plausible:
        return pieces, None
    return pieces, Usage(tokens.prompt_tokens, 0)


def encode_vector(vector: list[float] | str) -> str:
    """Return little-endian float32 numbers in base64.

    Raises JobError if the text is not in that format, or the vector is empty.
    """
    if isinstance(vector, str):
        try:
            size = len(base64.b64decode(vector, validate=True))
        except binascii.Error as error:
            raise JobError(f"the server sent an embedding: {error}") from error
        if not size or size % FLOAT_SIZE:
            raise JobError(f"the server sent an embedding of {size} bytes")
        return vector
    if not vector:
        raise JobError("the server sent an embedding without numbers")
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


class ScoredDocument(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float


class ScoreUsage(msgspec.Struct, frozen=True):
    """The tokens that were read: servers give either of the counts, or both."""

    prompt_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0
    total_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0


class ScoreList(msgspec.Struct, frozen=True):
    results: list[ScoredDocument]
    usage: ScoreUsage | None = None


def decode_scores(
    body: bytes, documents: int, secret: str = ""
) -> tuple[list[Delta], Usage | None]:
    """Return a piece for each of the ``documents`` of a reranking, in their order.

    Raises JobError if the scores are invalid, and the result of ``stream_error`` if the
    response is an error.
    """
    try:
        answer = msgspec.json.decode(body, type=ScoreList)
    except DECODE_ERRORS as error:
        if parse_problem(body) is not None:
            raise stream_error(body, secret) from error
        raise JobError(f"the server sent no scores: {error}") from error
    scored = sorted(answer.results, key=lambda each: each.index)
    if [each.index for each in scored] != list(range(documents)):
        raise JobError(f"the server sent {len(scored)} scores for {documents}")
    pieces = [
        Delta(each.index, {"relevance_score": each.relevance_score}) for each in scored
    ]
    if (tokens := answer.usage) is None:
        return pieces, None
    return pieces, Usage(tokens.prompt_tokens or tokens.total_tokens, 0)
