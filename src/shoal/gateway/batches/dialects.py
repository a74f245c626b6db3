"""The requests that a batch may have: for each endpoint how to read and answer them.

Another dialect is another row of ``DIALECTS``.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from shoal.domain.credentials import usage_of
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Inference
from shoal.gateway.chat.openai.answers import answer_form
from shoal.gateway.chat.openai.chat_request import decode_chat_request
from shoal.gateway.chat.openai.completion_request import decode_completion_request
from shoal.gateway.chat.openai.embeddings import (
    decode_embedding_request,
    encode_embeddings,
)
from shoal.gateway.chat.responses.request import decode_response_request
from shoal.gateway.chat.responses.response_object import ResponseDraft
from shoal.gateway.chat.responses.stored_responses import chat_of, storable
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.responses import encode_json


@dataclass(frozen=True, slots=True)
class DecodedLine:
    """The request of a line.

    What moderation reads is in the ``field`` of the body.  ``encode`` encodes the whole
    answer of a job, created at a time in Unix seconds.  ``api_fields`` is as in
    ``JobTerms``.
    """

    work: Inference
    field: str
    encode: Callable[[JobId, Outcome, int], bytes]
    api_fields: str = ""


LineDecoder: TypeAlias = Callable[[Gateway, ApiCaller, bytes], Awaitable[DecodedLine]]
"""Decodes the body of a caller's request.

Raises InvalidRequest naming the invalid field.
"""


async def _chat(gateway: Gateway, caller: ApiCaller, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(body, caller.name, decode_chat_request)
    work = asked.work
    return DecodedLine(work, "messages", answer_form(work).encode)


async def _completion(gateway: Gateway, caller: ApiCaller, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(
        body, caller.name, decode_completion_request
    )
    work = asked.work
    return DecodedLine(work, "prompt", answer_form(work).encode)


async def _embeddings(gateway: Gateway, caller: ApiCaller, body: bytes) -> DecodedLine:
    asked = await gateway.bodies.decode_bytes(
        body, caller.name, decode_embedding_request
    )
    texts: list[str] = []
    if asked.tokens:
        texts = await gateway.token_texts.decode(asked.tokens, "input")
    work = asked.work(texts)

    def encode(job_id: JobId, outcome: Outcome, created: int) -> bytes:
        return encode_embeddings(asked, outcome, usage_of(work, outcome))

    return DecodedLine(work, "input", encode)


async def _response(gateway: Gateway, caller: ApiCaller, body: bytes) -> DecodedLine:
    created = int(gateway.clock.wall())
    decode = partial(decode_response_request, created=created)
    asked = storable(
        caller, await gateway.bodies.decode_bytes(body, caller.name, decode)
    )
    chat = await chat_of(gateway, caller, asked)

    def encode(job_id: JobId, outcome: Outcome, created: int) -> bytes:
        draft = ResponseDraft(job_id, chat, asked.fields, asked.stored)
        return encode_json(draft.answered(outcome))

    fields = asked.fields.encode() if asked.stored else ""
    return DecodedLine(chat, "input", encode, fields)


DIALECTS: Mapping[str, LineDecoder] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embeddings,
    "/v1/responses": _response,
}
"""By the path that a line names."""
