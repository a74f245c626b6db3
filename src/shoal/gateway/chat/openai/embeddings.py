"""OpenAI's embeddings: texts in, a vector for each out.

Source: OpenAI's API reference, "Create embeddings".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import JSON, Embedding
from shoal.gateway.chat.inputs import (
    BODY_VALUES_MAX,
    DIMENSIONS_MAX,
    INPUTS_MAX,
    RawTextOrTokens,
    TextOrTokens,
    decode_text_or_tokens,
    vectors_of,
)
from shoal.gateway.http.decoding import EndUser, ModelName, decode, end_user


class CreateEmbedding(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: ModelName
    input: RawTextOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    user: EndUser | UnsetType = UNSET


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


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A decoded request: texts, or tokens in their place.

    ``in_base64``: the client wants vectors in base64.  ``end_user`` is as in
    ``GenerationRequest``.
    """

    model: str
    inputs: list[str] | list[list[int]]
    options: Mapping[str, JSON]
    in_base64: bool
    end_user: str = ""

    @property
    def tokens(self) -> list[list[int]]:
        """The inputs that are tokens: all of them, or none."""
        return [each for each in self.inputs if not isinstance(each, str)]

    def work(self, texts: Sequence[str]) -> Embedding:
        """Return the work; ``texts`` are those of the tokens, if there are any."""
        given = [each for each in self.inputs if isinstance(each, str)]
        return Embedding(self.model, (*given, *texts), self.options)


_decoder = msgspec.json.Decoder(CreateEmbedding)


def decode_embedding_request(data: bytes) -> EmbeddingRequest:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_decoder, data, BODY_VALUES_MAX)
    inputs = _inputs(decode_text_or_tokens(body.input, "input", INPUTS_MAX))
    for index, each in enumerate(inputs):
        if not each:
            field = "input" if len(inputs) == 1 else f"input[{index}]"
            raise InvalidRequest(f"{field}: empty", field)
    options = {} if body.dimensions is None else {"dimensions": body.dimensions}
    return EmbeddingRequest(
        body.model,
        inputs,
        options,
        body.encoding_format == "base64",
        end_user(body.user),
    )


def _inputs(given: TextOrTokens) -> list[str] | list[list[int]]:
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens:
        return [tokens]
    texts = [each for each in given if isinstance(each, str)]
    return texts or [each for each in given if isinstance(each, list)]


def encode_embeddings(
    decoded: EmbeddingRequest, outcome: Outcome, usage: Usage
) -> bytes:
    """Encode the answer, which is slow above ``LARGE_ANSWER`` vectors.

    Raises JobError if the worker did not give one valid vector for each text.
    """
    # Each for itself, so that other threads get a turn in between.
    vectors = [
        msgspec.Raw(
            msgspec.json.encode(
                EmbeddingData(index, encoded if decoded.in_base64 else values)
            )
        )
        for index, (encoded, values) in enumerate(
            vectors_of(outcome, len(decoded.inputs))
        )
    ]
    return msgspec.json.encode(
        {
            "data": vectors,
            "model": decoded.model,
            "usage": EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
            "object": "list",
        }
    )
