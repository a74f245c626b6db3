"""The requests that a batch may have: for each endpoint how to read and answer them.

Another dialect is another row of ``DIALECTS``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.credentials import usage_of
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Inference
from shoal.gateway.context import Gateway
from shoal.gateway.generation.answering import texts_of
from shoal.gateway.openai.chat_request import decode_chat_request
from shoal.gateway.openai.completion_request import decode_completion_request
from shoal.gateway.openai.embeddings import decode_embedding_request, encode_embeddings
from shoal.gateway.openai.endpoints import answer_form


@dataclass(frozen=True, slots=True)
class DecodedLine:
    """The request of a line.

    ``texts`` are moderated, and found in the ``field`` of the body.  ``encode`` encodes
    the whole answer of a job, created at a time in Unix seconds.
    """

    work: Inference
    field: str
    texts: Sequence[str]
    encode: Callable[[JobId, Outcome, int], bytes]


LineDecoder: TypeAlias = Callable[[Gateway, str, bytes], Awaitable[DecodedLine]]
"""Decodes the body of an owner's request.

Raises InvalidRequest naming the invalid field.
"""


async def _chat(gateway: Gateway, owner: str, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(body, owner, decode_chat_request)
    work = asked.work
    return DecodedLine(work, "messages", texts_of(work), answer_form(work).encode)


async def _completion(gateway: Gateway, owner: str, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(body, owner, decode_completion_request)
    work = asked.work
    return DecodedLine(work, "prompt", texts_of(work), answer_form(work).encode)


async def _embeddings(gateway: Gateway, owner: str, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(body, owner, decode_embedding_request)
    texts: list[str] = []
    if asked.tokens:
        texts = await gateway.token_texts.decode(asked.tokens, "input")
    work = asked.work(texts)

    def encode(job_id: JobId, outcome: Outcome, created: int) -> bytes:
        return encode_embeddings(asked, outcome, usage_of(work, outcome))

    return DecodedLine(work, "input", work.inputs, encode)


DIALECTS: Mapping[str, LineDecoder] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embeddings,
}
"""By the path that a line names."""
