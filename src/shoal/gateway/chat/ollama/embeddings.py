"""Ollama's embeddings: the vectors of several texts, or in the older form of one.

Source: Ollama's API reference, "Generate Embeddings" and "Generate Embedding".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Embedding
from shoal.gateway.chat.inputs import INPUTS_MAX
from shoal.gateway.chat.ollama.answers import Stopwatch
from shoal.gateway.chat.ollama.bodies import OllamaEmbed, OllamaEmbedOne
from shoal.gateway.http.decoding import decode

_several = msgspec.json.Decoder(OllamaEmbed)
_one = msgspec.json.Decoder(OllamaEmbedOne)


class OllamaEmbeddings(msgspec.Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True):
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class OllamaTexts:
    """The texts to embed; without any, the model is to be loaded."""

    model: str
    work: Embedding | None


def decode_embed(data: bytes) -> OllamaTexts:
    """Decode a body with several texts.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_several, data)
    given = body.input or []
    texts = (given,) if isinstance(given, str) else tuple(given)
    if len(texts) > INPUTS_MAX:
        raise InvalidRequest(f"input: expected at most {INPUTS_MAX} texts", "input")
    if "" in texts:
        raise InvalidRequest("input: expected texts that are not empty", "input")
    options = {} if body.dimensions is None else {"dimensions": body.dimensions}
    work = Embedding(body.model, texts, options) if texts else None
    return OllamaTexts(body.model, work)


def decode_embed_one(data: bytes) -> OllamaTexts:
    """Decode a body with one text.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_one, data)
    work = Embedding(body.model, (body.prompt,)) if body.prompt else None
    return OllamaTexts(body.model, work)


def encode_embed(
    model: str, vectors: Sequence[list[float]], prompt_tokens: int, watch: Stopwatch
) -> bytes:
    """Encode the vectors of several texts."""
    took = watch.durations()
    return msgspec.json.encode(
        OllamaEmbeddings(
            model,
            list(vectors),
            took["total_duration"],
            took["load_duration"],
            prompt_tokens,
        )
    )


def encode_embed_one(vectors: Sequence[list[float]]) -> bytes:
    """Encode the vector of one text, empty if there was none."""
    return msgspec.json.encode(OllamaEmbedding(vectors[0] if vectors else []))
