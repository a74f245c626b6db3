"""Rerankings: documents in, how relevant each is to a query out.

Not OpenAI's: the API of Jina and Cohere, which vLLM, llama-server, Infinity and their
clients share.  Source: the documentation of vLLM, "Re-rank API".
"""

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.domain.errors import JobError
from shoal.domain.ids import JobId
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import Rerank
from shoal.gateway.http.decoding import ModelName, decode
from shoal.gateway.http.ids import RERANK_ID_PREFIX

DOCUMENTS_MAX = 2048

Text = Annotated[str, Meta(min_length=1)]


class Document(msgspec.Struct, frozen=True):
    text: Text


class CreateRerank(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as with other servers."""

    model: ModelName
    query: Text
    documents: Annotated[
        list[Text | Document], Meta(min_length=1, max_length=DOCUMENTS_MAX)
    ]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document's place in the request, and its score; more is more relevant."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankTokens(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class CreateRerankResponse(msgspec.Struct, frozen=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankTokens


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A decoded request: the work, and how many documents to answer with."""

    work: Rerank
    top: int
    with_documents: bool


_decoder = msgspec.json.Decoder(CreateRerank)


def decode_rerank_request(data: bytes) -> RerankRequest:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_decoder, data)
    documents = tuple(
        each if isinstance(each, str) else each.text for each in body.documents
    )
    return RerankRequest(
        Rerank(body.model, body.query, documents),
        min(body.top_n or len(documents), len(documents)),
        bool(body.return_documents),
    )


def encode_ranking(
    job_id: JobId, decoded: RerankRequest, outcome: Outcome, usage: Usage
) -> bytes:
    """Encode the answer.

    Raises JobError if the worker did not give one score for each document.
    """
    documents = decoded.work.documents
    if len(outcome.choices) != len(documents):
        given = len(outcome.choices)
        raise JobError(f"the worker returned {given} scores for {len(documents)} texts")
    ranked = sorted(
        ((_score(choice), index) for index, choice in enumerate(outcome.choices)),
        key=lambda each: (-each[0], each[1]),
    )
    return msgspec.json.encode(
        CreateRerankResponse(
            RERANK_ID_PREFIX + job_id,
            decoded.work.model,
            [
                RankedDocument(
                    index,
                    score,
                    Document(documents[index]) if decoded.with_documents else None,
                )
                for score, index in ranked[: decoded.top]
            ],
            RerankTokens(usage.prompt_tokens, usage.prompt_tokens),
        )
    )


def _score(choice: Choice) -> float:
    score = choice.fields.get("relevance_score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise JobError("the worker returned a score that is not a number")
    if not math.isfinite(score):
        raise JobError("the worker returned a score that is not finite")
    return score
