"""OpenAI's HTTP face, as its official clients know it.

Source: OpenAI's API reference, "Chat", "Completions", "Embeddings" and "Models".
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope, usage_of
from shoal.domain.errors import InvalidRequest, UnknownModel
from shoal.domain.ids import JobId
from shoal.domain.moderation import Moderation
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat, Completion, Job, Work, text_of
from shoal.gateway.access import Caller
from shoal.gateway.asking import job_of
from shoal.gateway.chat_answer import ChatChunks, completion
from shoal.gateway.chat_request import decode_chat_request
from shoal.gateway.completion_answer import CompletionChunks, text_completion
from shoal.gateway.completion_request import decode_completion_request
from shoal.gateway.embeddings import LARGE, decode_embedding_request, embeddings
from shoal.gateway.parts import Gateway
from shoal.gateway.record import record_of
from shoal.gateway.respond import json_answer, json_bytes
from shoal.gateway.streaming import Chunks, stream
from shoal.pool.admit import unknown


class Model(msgspec.Struct, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0  # nobody knows
    owned_by: str = "shoal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Asked(Protocol):
    """A request that can be answered as a stream."""

    @property
    def stream(self) -> bool: ...
    @property
    def include_usage(self) -> bool: ...
    @property
    def session(self) -> str: ...
    @property
    def tier(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Form:
    """How the answers to one kind of work are written."""

    whole: Callable[[JobId, Outcome, int], bytes]
    chunks: Callable[[JobId, int], Chunks]


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/v1/models", partial(_list_models, gateway)),
        # Names may contain slashes.
        web.get("/v1/models/{model:.+}", partial(_show_model, gateway)),
        web.post("/v1/chat/completions", partial(_chat, gateway)),
        web.post("/v1/completions", partial(_complete, gateway)),
        web.post("/v1/embeddings", partial(_embed, gateway)),
    ]


async def _list_models(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.READ)
    return json_answer(ModelList([Model(model) for model in sorted(gateway.models)]))


async def _show_model(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.READ)
    model = request.match_info["model"]
    if model not in gateway.models:
        raise UnknownModel(unknown(gateway.hub.pool, model))
    return json_answer(Model(model))


async def _chat(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    # Whose it is comes first: a stranger's body is not worth its memory.
    caller = await gateway.access.admit(request, Scope.USE)
    asked = decode_chat_request(await gateway.bodies.read(request))
    texts = [text_of(message) for message in asked.work.messages]
    form = chat_form(asked.work, include_usage=asked.include_usage)
    return await _answer(gateway, request, caller, asked.work, asked, form, texts)


async def _complete(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    caller = await gateway.access.admit(request, Scope.USE)
    asked = decode_completion_request(await gateway.bodies.read(request))
    form = completion_form(asked.work, include_usage=asked.include_usage)
    texts = [asked.work.text]
    return await _answer(gateway, request, caller, asked.work, asked, form, texts)


async def _embed(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    caller = await gateway.access.admit(request, Scope.USE)
    asked = decode_embedding_request(await gateway.bodies.read(request))
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and any(map(moderation.matches, asked.work.inputs)):
        raise _refused("input")
    job = job_of(gateway, request, asked.work, caller.name)
    async with gateway.access.answering(job, caller) as reader:
        record_of(request).reading(reader)
        outcome = await reader.outcome()
    usage = record_of(request).usage = usage_of(asked.work, outcome)
    if len(outcome.choices) <= LARGE:
        return json_bytes(embeddings(asked, outcome, usage))
    return json_bytes(await asyncio.to_thread(embeddings, asked, outcome, usage))


async def _answer(
    gateway: Gateway,
    request: web.Request,
    caller: Caller,
    work: Work,
    asked: Asked,
    form: Form,
    texts: list[str],
) -> web.StreamResponse:
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and moderation.refuses(texts):
        raise _refused("messages" if isinstance(work, Chat) else "prompt")
    job = job_of(
        gateway, request, work, caller.name, session=asked.session, tier=asked.tier
    )
    if asked.stream:
        return await stream(gateway, request, caller, job, form.chunks, moderation)
    return await _whole(gateway, request, caller, job, form, moderation)


async def _whole(
    gateway: Gateway,
    request: web.Request,
    caller: Caller,
    job: Job,
    form: Form,
    moderation: Moderation | None,
) -> web.Response:
    record = record_of(request)
    async with gateway.access.answering(job, caller) as reader:
        record.reading(reader)
        outcome = await reader.outcome()
    record.usage = usage_of(job.work, outcome)
    if moderation is not None and moderation.refuses_outcome(outcome):
        outcome = Outcome("", "content_filter", outcome.usage)
    return json_bytes(form.whole(reader.job_id, outcome, int(gateway.clock.wall())))


def chat_form(chat: Chat, *, include_usage: bool) -> Form:
    """Return how answers to a chat are written."""
    return Form(
        lambda job_id, outcome, created: completion(job_id, chat, outcome, created),
        lambda job_id, created: ChatChunks(
            job_id, chat, created, include_usage=include_usage
        ),
    )


def completion_form(work: Completion, *, include_usage: bool) -> Form:
    """Return how answers to a completion are written."""
    return Form(
        lambda job_id, outcome, created: text_completion(
            job_id, work, outcome, created
        ),
        lambda job_id, created: CompletionChunks(
            job_id, work, created, include_usage=include_usage
        ),
    )


def _refused(field: str) -> InvalidRequest:
    return InvalidRequest(f"the {field} match the moderation list", field)
