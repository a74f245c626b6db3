"""OpenAI's endpoints, as its official clients know them.

A finished chat or completion can be fetched by its id, for clients whose connection
broke before the answer came.

Source: OpenAI's API reference, "Chat", "Completions", "Embeddings" and "Models".
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope, usage_of
from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    JobError,
    NotFound,
    ShoalError,
    StillRunning,
    TimedOut,
    UnknownModel,
)
from shoal.domain.ids import JobId
from shoal.domain.moderation import Moderation
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat, Completion, Job, Work, message_text
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import json_bytes_response, json_response
from shoal.gateway.jobs.job_options import build_job
from shoal.gateway.openai.chat_answer import ChatChunkEncoder, encode_chat_completion
from shoal.gateway.openai.chat_request import decode_chat_request
from shoal.gateway.openai.completion_answer import (
    CompletionChunkEncoder,
    encode_text_completion,
)
from shoal.gateway.openai.completion_request import decode_completion_request
from shoal.gateway.openai.embeddings import (
    LARGE_ANSWER,
    decode_embedding_request,
    encode_embeddings,
)
from shoal.gateway.openai.event_stream import ChunkEncoder, stream_answer
from shoal.pool.job_admission import unknown_model
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob


class ModelObject(msgspec.Struct, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0  # nobody knows
    owned_by: str = "shoal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class StreamableRequest(Protocol):
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
class AnswerFormat:
    """How the answers to one kind of work are written."""

    encode: Callable[[JobId, Outcome, int], bytes]
    chunk_encoder: Callable[[JobId, int], ChunkEncoder]


async def list_models(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    return json_response(
        ModelList([ModelObject(model) for model in sorted(gateway.models)])
    )


async def show_model(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    model = request.match_info["model"]
    if model not in gateway.models:
        raise UnknownModel(unknown_model(gateway.hub.pool, model))
    return json_response(ModelObject(model))


async def create_chat_completion(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    asked = decode_chat_request(await gateway.bodies.read(request))
    texts = [message_text(message) for message in asked.work.messages]
    form = chat_format(asked.work, include_usage=asked.include_usage)
    return await _answer(gateway, request, caller, asked.work, asked, form, texts)


async def create_completion(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    asked = decode_completion_request(await gateway.bodies.read(request))
    form = completion_format(asked.work, include_usage=asked.include_usage)
    texts = [asked.work.text]
    return await _answer(gateway, request, caller, asked.work, asked, form, texts)


async def create_embeddings(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    asked = decode_embedding_request(await gateway.bodies.read(request))
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and any(map(moderation.matches, asked.work.inputs)):
        raise _moderation_error("input")
    job = build_job(gateway, request, asked.work, caller.name)
    async with gateway.access.submit(job, caller) as reader:
        record_of(request).set_reader(reader)
        outcome = await reader.outcome()
    usage = record_of(request).usage = usage_of(asked.work, outcome)
    if len(outcome.choices) <= LARGE_ANSWER:
        return json_bytes_response(encode_embeddings(asked, outcome, usage))
    return json_bytes_response(
        await asyncio.to_thread(encode_embeddings, asked, outcome, usage)
    )


async def _answer(
    gateway: Gateway,
    request: web.Request,
    caller: ApiCaller,
    work: Work,
    asked: StreamableRequest,
    form: AnswerFormat,
    texts: list[str],
) -> web.StreamResponse:
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and moderation.blocks(texts):
        raise _moderation_error("messages" if isinstance(work, Chat) else "prompt")
    job = build_job(
        gateway, request, work, caller.name, session=asked.session, tier=asked.tier
    )
    if asked.stream:
        return await stream_answer(
            gateway, request, caller, job, form.chunk_encoder, moderation
        )
    return await _answer_whole(gateway, request, caller, job, form, moderation)


async def _answer_whole(
    gateway: Gateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    form: AnswerFormat,
    moderation: Moderation | None,
) -> web.Response:
    record = record_of(request)
    async with gateway.access.submit(job, caller) as reader:
        record.set_reader(reader)
        outcome = await reader.outcome()
    record.usage = usage_of(job.work, outcome)
    if moderation is not None and moderation.blocks_outcome(outcome):
        outcome = Outcome("", "content_filter", outcome.usage)
    return json_bytes_response(
        form.encode(reader.job_id, outcome, int(gateway.clock.wall()))
    )


def chat_format(chat: Chat, *, include_usage: bool) -> AnswerFormat:
    """Return how answers to a chat are written."""
    return AnswerFormat(
        lambda job_id, outcome, created: encode_chat_completion(
            job_id, chat, outcome, created
        ),
        lambda job_id, created: ChatChunkEncoder(
            job_id, chat, created, include_usage=include_usage
        ),
    )


def completion_format(work: Completion, *, include_usage: bool) -> AnswerFormat:
    """Return how answers to a completion are written."""
    return AnswerFormat(
        lambda job_id, outcome, created: encode_text_completion(
            job_id, work, outcome, created
        ),
        lambda job_id, created: CompletionChunkEncoder(
            job_id, work, created, include_usage=include_usage
        ),
    )


def _moderation_error(field: str) -> InvalidRequest:
    return InvalidRequest(f"the {field} match the moderation list", field)


RESULT_WAIT = 55.0  # seconds for a job that still runs: less than proxies bear

END_ERRORS: dict[JobState, type[ShoalError]] = {
    JobState.FAILED: JobError,
    JobState.CANCELLED: Cancelled,
    JobState.EXPIRED: TimedOut,
}


async def show_result(
    gateway: Gateway,
    request: web.Request,
    caller: ApiCaller,
    *,
    prefix: str,
    type_: type[Chat | Completion],
) -> web.Response:
    job_id = JobId(request.match_info["id"].removeprefix(prefix))
    stored = await _ended_job(gateway, job_id, caller)
    record_of(request).job_id = job_id
    work = stored.job.work
    if not isinstance(work, type_):
        raise NotFound(f"job {job_id} is of another kind: {stored.job.kind.value}")
    if stored.outcome is None:
        raise END_ERRORS[stored.state](stored.error or stored.state.value)
    return json_bytes_response(
        _encoded_result(stored.job, stored.outcome, int(stored.submitted_at))
    )


async def _ended_job(gateway: Gateway, job_id: JobId, caller: ApiCaller) -> StoredJob:
    """Return a job of the caller's that has ended, waiting a while if it has not.

    Raises NotFound, or StillRunning.
    """
    stored = await _owned_job(gateway, job_id, caller)
    if stored.ended_at is not None:
        return stored
    try:
        with gateway.hub.observe_job(job_id) as reader:
            if reader is not None:
                async with asyncio.timeout(RESULT_WAIT):
                    await reader.outcome()
    except TimeoutError:
        raise StillRunning(f"job {job_id} has not ended yet: ask again") from None
    except ShoalError:
        pass  # the store knows it better
    gateway.access.ensure_active(caller)  # who may have been shut out while this waited
    stored = await _owned_job(gateway, job_id, caller)
    if stored.ended_at is None:
        raise StillRunning(f"job {job_id} has not ended yet: ask again")
    return stored


async def _owned_job(gateway: Gateway, job_id: JobId, caller: ApiCaller) -> StoredJob:
    stored = await gateway.store.job(job_id)
    mine = stored is not None and stored.job.owner == caller.name
    if stored is None or not (mine or caller.has_scope(Scope.ADMIN)):
        raise NotFound(f"there is no job {job_id}: it never was, or was pruned")
    return stored


def _encoded_result(job: Job, outcome: Outcome, created: int) -> bytes:
    match job.work:
        case Chat() as chat:
            form = chat_format(chat, include_usage=False)
        case Completion() as completion:
            form = completion_format(completion, include_usage=False)
        case _:
            raise AssertionError(f"no such path for {job.kind}")
    return form.encode(job.id, outcome, created)
