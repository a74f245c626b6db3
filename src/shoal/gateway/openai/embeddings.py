"""OpenAI's embeddings: texts in, a vector for each out.

Source: OpenAI's API reference, "Create embeddings".
"""

import base64
import binascii
import math
import struct
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import Embedding
from shoal.gateway.http.decoding import Ignored, ModelName, decode

INPUTS_MAX = 2048  # texts in one request, as with OpenAI
DIMENSIONS_MAX = 1 << 16
FLOAT = 4  # bytes
LARGE_ANSWER = 256  # vectors: larger answers are encoded in a thread

Text = Annotated[str, Meta(min_length=1)]


class CreateEmbedding(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: ModelName
    input: Text | list[Text]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    user: Ignored | UnsetType = UNSET


class EmbeddingData(msgspec.Struct, frozen=True):
    index: int
    embedding: str | list[float]
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(msgspec.Struct, frozen=True):
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """A decoded request; ``in_base64``: the client wants vectors in base64."""

    work: Embedding
    in_base64: bool


_decoder = msgspec.json.Decoder(CreateEmbedding)


def decode_embedding_request(data: bytes) -> EmbeddingRequest:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_decoder, data)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not inputs or len(inputs) > INPUTS_MAX:
        raise InvalidRequest(f"input: expected 1 to {INPUTS_MAX} texts", "input")
    options = {} if body.dimensions is None else {"dimensions": body.dimensions}
    return EmbeddingRequest(
        Embedding(body.model, tuple(inputs), options),
        body.encoding_format == "base64",
    )


def encode_embeddings(asked: EmbeddingRequest, outcome: Outcome, usage: Usage) -> bytes:
    """Encode the answer, which is slow above ``LARGE_ANSWER`` vectors.

    Raises JobError if the worker did not give one vector for each text.
    """
    wanted = len(asked.work.inputs)
    if len(outcome.choices) != wanted:
        given = len(outcome.choices)
        raise JobError(f"the worker returned {given} vectors for {wanted} texts")
    # Each for itself, so that other threads get a turn in between.
    vectors = [
        msgspec.Raw(
            msgspec.json.encode(EmbeddingData(index, _vector(each, asked.in_base64)))
        )
        for index, each in enumerate(outcome.choices)
    ]
    return msgspec.json.encode(
        {
            "data": vectors,
            "model": asked.work.model,
            "usage": EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
            "object": "list",
        }
    )


def _vector(choice: Choice, in_base64: bool) -> str | list[float]:
    encoded = choice.fields.get("embedding")
    if not isinstance(encoded, str):
        raise _vector_error("no text")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise _vector_error(str(error)) from error
    if not data or len(data) % FLOAT:
        raise _vector_error(f"{len(data)} bytes, expected float32 numbers")
    values = struct.unpack(f"<{len(data) // FLOAT}f", data)
    # JSON cannot express others.  A sum of float32 in double precision is finite if
    # all of them are.
    if not math.isfinite(sum(values)):
        raise _vector_error("a number in it is not finite")
    return encoded if in_base64 else list(values)


def _vector_error(problem: str) -> JobError:
    return JobError(f"the worker returned an invalid vector: {problem}")
