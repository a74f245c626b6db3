"""Anthropic's endpoints for messages.

Source: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

import msgspec
from aiohttp import web

from shoal.gateway.anthropic.message_answer import message_form
from shoal.gateway.anthropic.message_request import (
    decode_count_request,
    decode_message_request,
)
from shoal.gateway.context import Gateway
from shoal.gateway.generation.job_answers import answer
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import json_response
from shoal.gateway.model_summaries import model_summary, seen_by

REQUEST_ID = "request-id"  # where Anthropic's clients look for it


class MessageTokens(msgspec.Struct, frozen=True):
    """The tokens of a request, estimated."""

    input_tokens: int


async def create_message(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    caller.headers[REQUEST_ID] = record_of(request).id
    asked = await gateway.bodies.decode(request, caller.name, decode_message_request)
    form = message_form(asked.generation.work, shows_thinking=asked.shows_thinking)
    return await answer(
        gateway, request, caller, asked.generation, form, field="messages"
    )


async def count_message_tokens(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    caller.headers[REQUEST_ID] = record_of(request).id
    counted = await gateway.bodies.decode(request, caller.name, decode_count_request)
    model_summary(gateway.hub.pool, counted.model, seen_by(caller))
    return json_response(MessageTokens(counted.tokens))
