"""OpenAI's embeddings: texts in, a vector for each out.

Source: OpenAI's API reference, "Create embeddings".
"""

import base64
import binascii
import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.work import Choice, Embedding, Outcome, Usage
from shoal.gateway.decoding import Name, decode, options_of

INPUTS_MAX = 2048  # texts in one request, as with OpenAI
DIMENSIONS_MAX = 1 << 16


class CreateEmbedding(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: Name
    input: Annotated[str, Meta(min_length=1)] | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    user: str | None = None


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
    """What a client asked for; ``in_base64`` says how it wants the vectors."""

    work: Embedding
    in_base64: bool


_decoder = msgspec.json.Decoder(CreateEmbedding)


def decode_embedding_request(data: bytes) -> EmbeddingRequest:
    """Decode a body.

    Raises InvalidRequest naming the field that is no good.
    """
    body = decode(_decoder, data)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not inputs or len(inputs) > INPUTS_MAX:
        raise InvalidRequest(f"input: expected 1 to {INPUTS_MAX} texts", "input")
    for index, text in enumerate(inputs):
        if not isinstance(text, str) or not text:
            field = f"input[{index}]"
            raise InvalidRequest(f"{field}: expected a text that is not empty", field)
    return EmbeddingRequest(
        Embedding(body.model, tuple(inputs), options_of(body, ("dimensions",))),
        body.encoding_format == "base64",
    )


def embeddings(asked: EmbeddingRequest, outcome: Outcome, usage: Usage) -> bytes:
    """Write the answer.

    Raises JobError if the worker did not give one vector for each text.
    """
    wanted = len(asked.work.inputs)
    if len(outcome.choices) != wanted:
        given = len(outcome.choices)
        raise JobError(f"the worker gave {given} vectors for {wanted} texts")
    return msgspec.json.encode(
        CreateEmbeddingResponse(
            [
                EmbeddingData(index, _vector(choice, asked.in_base64))
                for index, choice in enumerate(outcome.choices)
            ],
            asked.work.model,
            EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
        )
    )


def _vector(choice: Choice, in_base64: bool) -> str | list[float]:
    encoded = choice.fields.get("embedding")
    try:
        if not isinstance(encoded, str):
            raise ValueError("no text")
        data = base64.b64decode(encoded, validate=True)
        values = struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, binascii.Error, struct.error) as error:
        raise JobError(
            f"the worker gave something that is no vector: {error}"
        ) from error
    return encoded if in_base64 else list(values)
