"""OpenAI's API: the models there are, and chat."""

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from shoal.domain.errors import InvalidRequest, ShoalError, UnknownModel
from shoal.domain.ids import JobId
from shoal.domain.work import Outcome, text_of
from shoal.gateway import problems
from shoal.gateway.body import read_body
from shoal.gateway.chat_answer import KEEPALIVE, Chunks, completion
from shoal.gateway.chat_request import ChatRequest, decode_chat_request
from shoal.gateway.moderation import REFUSED, Moderation
from shoal.gateway.parts import Gateway
from shoal.gateway.stream import ClientGone, relay, write
from shoal.runtime.answer import Reader

HEADERS_AFTER = 10.0  # seconds for an error to become the status instead of an event

SSE = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx keeps tokens back
}


class _Model(msgspec.Struct, frozen=True):
    id: str
    object: str = "model"
    created: int = 0  # nobody knows
    owned_by: str = "shoal"


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]
    object: str = "list"


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/v1/models", partial(_list_models, gateway)),
        # Names may contain slashes.
        web.get("/v1/models/{model:.+}", partial(_show_model, gateway)),
        web.post("/v1/chat/completions", partial(_chat, gateway)),
    ]


async def _list_models(gateway: Gateway, request: web.Request) -> web.Response:
    gateway.keyring.owner(request.headers.get("Authorization"))
    return _json(_Models([_Model(model) for model in sorted(gateway.models)]))


async def _show_model(gateway: Gateway, request: web.Request) -> web.Response:
    gateway.keyring.owner(request.headers.get("Authorization"))
    model = request.match_info["model"]
    if model not in gateway.models:
        raise UnknownModel(f"no worker has the model {model}: GET /v1/models lists all")
    return _json(_Model(model))


async def _chat(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    # Whose it is comes first: a stranger's body is not worth its memory.
    owner = gateway.keyring.owner(request.headers.get("Authorization"))
    asked = decode_chat_request(await read_body(request))
    moderation = gateway.moderation_for(owner)
    if moderation is not None and moderation.refuses(
        [text_of(message) for message in asked.chat.messages]
    ):
        raise InvalidRequest("the messages match the moderation list", "messages")
    if asked.stream:
        return await _stream(gateway, request, asked, owner, moderation)
    return await _answer(gateway, asked, owner, moderation)


async def _answer(
    gateway: Gateway, asked: ChatRequest, owner: str, moderation: Moderation | None
) -> web.Response:
    async with gateway.hub.answering(asked.chat, gateway.limits, owner) as reader:
        outcome = await reader.outcome()
    if moderation is not None and moderation.matches(outcome.text):
        outcome = Outcome("", "content_filter", outcome.usage)
    created = int(gateway.clock.wall())
    body = completion(reader.job_id, asked.chat, outcome, created)
    return web.Response(body=body, content_type="application/json")


async def _stream(
    gateway: Gateway,
    request: web.Request,
    asked: ChatRequest,
    owner: str,
    moderation: Moderation | None,
) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE)
    try:
        async with gateway.hub.answering(asked.chat, gateway.limits, owner) as reader:
            first = await _first(reader)
            if first == []:
                await reader.outcome()  # an error is still this request's status
            chunks = _chunks(gateway, asked, reader.job_id)
            await response.prepare(request)
            if first is None:
                await write(request, response, KEEPALIVE)
            whole = await relay(
                request,
                response,
                reader,
                chunks.pieces,
                first=first,
                keepalive=KEEPALIVE,
                watch=moderation.watch() if moderation else None,
            )
            if not whole:
                gateway.hub.withdraw(reader.job_id, REFUSED)
            last = await _end(chunks, reader, whole=whole)
        # Only now, so that the worker of an answer that was refused is stopped first.
        await write(request, response, last, last=True)
    except ClientGone:
        pass
    return response


async def _first(reader: Reader) -> list[str] | None:
    """Return the first text, nothing at the end, or None if it takes too long."""
    try:
        async with asyncio.timeout(HEADERS_AFTER):
            return await reader.read()
    except TimeoutError:
        return None


def _chunks(gateway: Gateway, asked: ChatRequest, job_id: JobId) -> Chunks:
    created = int(gateway.clock.wall())
    return Chunks(job_id, asked.chat, created, include_usage=asked.include_usage)


async def _end(chunks: Chunks, reader: Reader, *, whole: bool) -> bytes:
    """Return the last event: without [DONE], the answer is not whole."""
    if not whole:
        return chunks.end(Outcome("", "content_filter"))
    try:
        return chunks.end(await reader.outcome())
    except ShoalError as error:
        return b"data: " + problems.body(error) + b"\n\n"


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json"
    )
