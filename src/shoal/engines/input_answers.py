"""Decodes a server's answers to work on inputs: vectors, scores, written speech.

Source: OpenAI API reference, "Create embeddings" and "Create transcription"; for
scores, the API that vLLM, llama-server and others share.  Embeddings are requested in
base64, which takes a quarter of the time; a server without support for it sends
numbers.
"""

import base64
import binascii
import sys
from array import array
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain.errors import JobError
from shoal.domain.outcome import Delta, Usage
from shoal.domain.work import Embedding, InputWork, Rerank, Transcription
from shoal.engines.server_errors import DECODE_ERRORS, parse_problem, stream_error
from shoal.engines.stream_chunks import TOKENS_MAX, StreamUsage

INPUT_ANSWER_MAX = 256 << 20  # bytes: 2048 inputs of 4096 numbers, as text
FLOAT_SIZE = 4  # bytes

T = TypeVar("T")


def decode_input_answer(
    work: InputWork, body: bytes, secret: str = ""
) -> tuple[list[Delta], Usage | None]:
    """Decode the answer to ``work``: a piece for each input, in their order.

    ``secret`` is a text removed from the server's error messages.

    Raises JobError if the answer is invalid, and the result of ``stream_error`` if it
    is an error.
    """
    match work:
        case Embedding():
            return _decode_embeddings(body, len(work.inputs), secret)
        case Rerank():
            return _decode_scores(body, len(work.documents), secret)
        case Transcription():
            return _decode_transcription(body, secret)


class EmbeddingItem(msgspec.Struct, frozen=True):
    embedding: list[float] | str
    index: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[EmbeddingItem]
    usage: StreamUsage | None = None


def _decode_embeddings(
    body: bytes, inputs: int, secret: str
) -> tuple[list[Delta], Usage | None]:
    answer = _decode(body, EmbeddingList, "embeddings", secret)
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


def _decode_scores(
    body: bytes, documents: int, secret: str
) -> tuple[list[Delta], Usage | None]:
    answer = _decode(body, ScoreList, "scores", secret)
    scored = sorted(answer.results, key=lambda each: each.index)
    if [each.index for each in scored] != list(range(documents)):
        raise JobError(f"the server sent {len(scored)} scores for {documents}")
    pieces = [
        Delta(each.index, {"relevance_score": each.relevance_score}) for each in scored
    ]
    if (tokens := answer.usage) is None:
        return pieces, None
    return pieces, Usage(tokens.prompt_tokens or tokens.total_tokens, 0)


class WrittenSpeech(msgspec.Struct, frozen=True):
    """A transcription; all but its text come with timestamps only."""

    text: str
    language: str | None = None
    duration: float | str | None = None  # seconds
    segments: list[dict[str, Any]] | None = None
    words: list[dict[str, Any]] | None = None


def _decode_transcription(body: bytes, secret: str) -> tuple[list[Delta], Usage | None]:
    answer = _decode(body, WrittenSpeech, "transcription", secret)
    fields: dict[str, Any] = {"content": answer.text}
    for name in ("language", "segments", "words"):
        if (value := getattr(answer, name)) is not None:
            fields[name] = value
    if (duration := answer.duration) is not None:
        try:
            fields["duration"] = float(duration)
        except ValueError as error:
            raise JobError(f"the server sent a duration of {duration!r}") from error
    return [Delta(0, fields)], None


def _decode(body: bytes, type_: type[T], what: str, secret: str) -> T:
    try:
        return msgspec.json.decode(body, type=type_)
    except DECODE_ERRORS as error:
        if parse_problem(body) is not None:
            raise stream_error(body, secret) from error
        raise JobError(f"the server sent no {what}: {error}") from error
