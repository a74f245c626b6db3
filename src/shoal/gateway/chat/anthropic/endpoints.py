"""Anthropic's endpoints for messages.

Source: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

from functools import partial

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.gateway.chat.anthropic.message_answer import (
    ANTHROPIC_ERRORS,
    AnsweredMessage,
    message_form,
)
from shoal.gateway.chat.anthropic.message_body import CountMessageTokens, CreateMessage
from shoal.gateway.chat.anthropic.message_request import (
    decode_count_request,
    decode_message_request,
)
from shoal.gateway.chat.job_answers import answer
from shoal.gateway.context import ChatGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import SSE_TYPE
from shoal.gateway.models.listing import model_summary, seen_by

api = Operations(ANTHROPIC_ERRORS)

REQUEST_ID = "request-id"  # where Anthropic's clients look for it


class MessageTokens(msgspec.Struct, frozen=True):
    """The tokens of a request, estimated."""

    input_tokens: int


@api.post(
    "/v1/messages",
    "Create a message",
    Scope.USE,
    by_calls=True,
    answer=AnsweredMessage,
    body=CreateMessage,
    streams=SSE_TYPE,
)
async def create_message(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    caller.headers[REQUEST_ID] = record_of(request).id
    decoded = await gateway.bodies.decode(request, caller.name, decode_message_request)
    form = partial(message_form, shows_thinking=decoded.shows_thinking)
    return await answer(
        gateway, request, caller, decoded.generation, form, field="messages"
    )


@api.post(
    "/v1/messages/count_tokens",
    "Count the tokens of a message",
    Scope.USE,
    by_calls=True,
    body=CountMessageTokens,
)
async def count_message_tokens(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> MessageTokens:
    caller.headers[REQUEST_ID] = record_of(request).id
    counted = await gateway.bodies.decode(request, caller.name, decode_count_request)
    model_summary(gateway.hub.pool, counted.model, seen_by(caller))
    return MessageTokens(counted.tokens)
