"""Decodes a server's answers to work on inputs: vectors, scores, written speech.

Source: OpenAI API reference, "Create embeddings" and "Create transcription"; for
scores, the API that vLLM, llama-server and others share; the APIs of Ollama and of
Hugging Face's text-embeddings-inference.  Embeddings are requested in base64, which
takes a quarter of the time; a server without support for it sends numbers.
"""

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Delta, Usage
from shoal.domain.work import JSON, Embedding, InputWork, Rerank, Transcription
from shoal.engines import server_errors
from shoal.engines.streams.json_values import decode_json, expressible, integer
from shoal.engines.streams.stream_chunks import StreamUsage, read_usage

INPUT_ANSWER_MAX = 256 << 20  # bytes: 2048 inputs of 4096 numbers, as text
FLOAT_SIZE = 4  # bytes

T = TypeVar("T")


def decode_input_answer(
    work: InputWork, body: bytes, secret: str = ""
) -> tuple[list[Delta], Usage | None]:
    """Decode the answer to ``work``: a piece for each input, in their order.

    ``secret`` is a text removed from the server's error messages.

    Raises JobError if the answer is invalid, InvalidRequest if its vectors are not of
    the size that the work asks for, and the result of ``stream_error`` if it is an
    error.
    """
    match work:
        case Embedding():
            return _decode_embeddings(body, work, secret)
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


_embeddings = msgspec.json.Decoder(EmbeddingList)


def _decode_embeddings(
    body: bytes, work: Embedding, secret: str
) -> tuple[list[Delta], Usage | None]:
    inputs = len(work.inputs)
    try:
        answer = _embeddings.decode(body)
    except server_errors.DECODE_ERRORS:
        answer = _odd_embeddings(_decode_odd(body, "embeddings", secret))
    vectors = sorted(answer.data, key=lambda vector: vector.index)
    indices = [vector.index for vector in vectors]
    # Some servers have the index 0 for all, which are then in order.
    if indices not in (list(range(inputs)), [0] * inputs):
        raise JobError(f"the server sent {len(vectors)} embeddings for {inputs}")
    pieces = [
        Delta(index, {"embedding": encode_vector(vector.embedding)})
        for index, vector in enumerate(vectors)
    ]
    _check_dimensions(pieces, work.options.get("dimensions"))
    return pieces, _usage(answer.usage)


def _check_dimensions(pieces: Sequence[Delta], wanted: JSON) -> None:
    """Raise InvalidRequest if the server ignored the option; many do."""
    if not isinstance(wanted, int):
        return
    for piece in pieces:
        given = len(base64.b64decode(str(piece.fields["embedding"]))) // FLOAT_SIZE
        if given != wanted:
            raise InvalidRequest(
                f"dimensions: the model's vectors have {given} numbers, not {wanted}, "
                "and its server does not shorten them",
                "dimensions",
            )


def encode_vector(vector: list[float] | str) -> str:
    """Return little-endian float32 numbers in base64.

    Raises JobError if the text is not in that format, or the vector is empty.
    """
    if isinstance(vector, str):
        try:
            size = len(base64.b64decode(vector, validate=True))
        except ValueError as error:  # also of texts that are not ASCII
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


def _odd_embeddings(answer: Any) -> EmbeddingList:
    """Return the vectors of an answer in another form than OpenAI's.

    Some servers leave out the index, some send the vectors alone, or in a list of one.
    """
    usage = None
    if isinstance(answer, dict):
        usage = read_usage(answer.get("usage"))
        for name in ("data", "embeddings", "embedding"):
            if (vectors := answer.get(name)) is not None:
                answer = [vectors] if name == "embedding" else vectors
                break
    if not isinstance(answer, list):
        raise JobError("the server sent no embeddings")
    items = []
    for position, given in enumerate(answer):
        index, vector = position, given
        if isinstance(given, dict):
            vector = given.get("embedding")
            if (named := integer(given.get("index"))) is not None:
                index = named
        items.append(EmbeddingItem(_odd_vector(vector), index))
    return EmbeddingList(items, usage)


def _odd_vector(vector: Any) -> list[float] | str:
    while isinstance(vector, list) and len(vector) == 1 and isinstance(vector[0], list):
        (vector,) = vector
    if isinstance(vector, str):
        return "".join(vector.split())
    if not isinstance(vector, list):
        raise JobError("the server sent no embeddings")
    numbers = [number for each in vector if (number := _number(each)) is not None]
    if len(numbers) < len(vector):
        raise JobError("the server sent no embeddings: not all are finite numbers")
    return numbers


class ScoredDocument(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float


class ScoreList(msgspec.Struct, frozen=True):
    results: list[ScoredDocument]
    usage: StreamUsage | None = None


_scores = msgspec.json.Decoder(ScoreList)


def _decode_scores(
    body: bytes, documents: int, secret: str
) -> tuple[list[Delta], Usage | None]:
    try:
        answer = _scores.decode(body)
    except server_errors.DECODE_ERRORS:
        answer = _odd_scores(_decode_odd(body, "scores", secret))
    scored = sorted(answer.results, key=lambda each: each.index)
    if [each.index for each in scored] != list(range(documents)):
        raise JobError(f"the server sent {len(scored)} scores for {documents}")
    pieces = [
        Delta(each.index, {"relevance_score": each.relevance_score}) for each in scored
    ]
    return pieces, _usage(answer.usage)


def _odd_scores(answer: Any) -> ScoreList:
    """Return the scores of an answer in another form than most servers'."""
    usage = None
    if isinstance(answer, dict):
        usage = read_usage(answer.get("usage"))
        answer = answer.get("results") or answer.get("data")
    found = []
    for given in answer if isinstance(answer, list) else ():
        each = given if isinstance(given, dict) else {}
        index = integer(each.get("index"))
        score = each.get("relevance_score", each.get("score"))
        number = _number(score)
        if index is None or number is None:
            raise JobError("the server sent no scores: one lacks its index or score")
        found.append(ScoredDocument(index, number))
    if not found:
        raise JobError("the server sent no scores")
    return ScoreList(found, usage)


def _decode_transcription(body: bytes, secret: str) -> tuple[list[Delta], Usage | None]:
    """Decode a transcription; all but its text come with timestamps only."""
    answer = _decode_odd(body, "transcription", secret)
    text = answer.get("text") if isinstance(answer, dict) else answer
    if not isinstance(text, str):
        raise JobError("the server sent no transcription")
    fields: dict[str, Any] = {"content": expressible(text)}
    details: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
    if isinstance(language := details.get("language"), str):
        fields["language"] = expressible(language)
    if (duration := _number(details.get("duration"))) is not None:
        fields["duration"] = duration
    for name in ("segments", "words"):
        value = details.get(name)
        if isinstance(value, list) and all(isinstance(each, dict) for each in value):
            fields[name] = expressible(value)
    return [Delta(0, fields)], None


def _decode_odd(body: bytes, what: str, secret: str) -> Any:
    """Decode a body that may be an error.  Raises it, or JobError."""
    if server_errors.describes_error(body):
        raise server_errors.stream_error(body, secret)
    try:
        return decode_json(body)
    except ValueError as error:
        raise JobError(f"the server sent no {what}: {error}") from error


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _usage(tokens: StreamUsage | None) -> Usage | None:
    """Return the tokens that were read; servers give either of the counts, or both."""
    read = None if tokens is None else tokens.read()
    return None if read is None else Usage(read, 0)
