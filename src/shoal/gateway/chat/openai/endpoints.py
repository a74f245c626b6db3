"""OpenAI's endpoints.

A finished chat or completion can be fetched by its id, for clients whose connection
broke before the answer came.

Source: OpenAI's API reference, "Chat", "Completions" and "Embeddings".
"""

import asyncio
import dataclasses
from functools import partial

from aiohttp import web
from msgspec.structs import replace

from shoal.domain.credentials import Scope
from shoal.domain.errors import NotFound, ShoalError, StillRunning
from shoal.domain.work import Chat, Completion
from shoal.gateway.chat.inputs import LARGE_ANSWER
from shoal.gateway.chat.job_answers import answer, answer_inputs, stored_end
from shoal.gateway.chat.openai import answers, embeddings, rerank, transcription
from shoal.gateway.chat.openai.chat_request import (
    CreateChatCompletion,
    decode_chat_request,
)
from shoal.gateway.chat.openai.completion_request import (
    CreateCompletion,
    decode_completion_request,
)
from shoal.gateway.context import JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import SSE_TYPE, json_bytes_response
from shoal.gateway.jobs.endpoints import awaited_job

api = Operations()


@api.post(
    "/v1/chat/completions",
    "Create a chat completion",
    Scope.USE,
    by_calls=True,
    answer=answers.ChatCompletion,
    body=CreateChatCompletion,
    streams=SSE_TYPE,
)
async def create_chat_completion(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    owner = caller.key.name
    decoded = await gateway.bodies.decode(request, owner, decode_chat_request)
    form = partial(answers.answer_form, include_usage=decoded.include_usage)
    return await answer(gateway, request, caller, decoded, form, field="messages")


@api.get(
    "/v1/chat/completions/{id}",
    "Fetch a chat completion",
    Scope.READ,
    by_calls=True,
    answer=answers.ChatCompletion,
)
async def show_chat_completion(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    return await _show_result(gateway, request, caller, Chat)


@api.post(
    "/v1/completions",
    "Create a text completion",
    Scope.USE,
    by_calls=True,
    answer=answers.TextCompletion,
    body=CreateCompletion,
    streams=SSE_TYPE,
)
async def create_completion(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    decoded = await gateway.bodies.decode(
        request, caller.name, decode_completion_request
    )
    form = partial(answers.answer_form, include_usage=decoded.include_usage)
    return await answer(gateway, request, caller, decoded, form, field="prompt")


@api.get(
    "/v1/completions/{id}",
    "Fetch a text completion",
    Scope.READ,
    by_calls=True,
    answer=answers.TextCompletion,
)
async def show_completion(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    return await _show_result(gateway, request, caller, Completion)


@api.post(
    "/v1/embeddings",
    "Create embeddings",
    Scope.USE,
    by_calls=True,
    answer=embeddings.CreateEmbeddingResponse,
    body=embeddings.CreateEmbedding,
)
async def create_embeddings(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    decoded = await gateway.bodies.decode(
        request, caller.name, embeddings.decode_embedding_request
    )
    texts: list[str] = []
    if decoded.tokens:
        texts = await gateway.token_texts.decode(decoded.tokens, "input")
    work = decoded.work(texts)
    _, outcome, usage, model = await answer_inputs(
        gateway, request, caller, work, field="input", end_user=decoded.end_user
    )
    decoded = dataclasses.replace(decoded, model=model)
    if len(outcome.choices) <= LARGE_ANSWER:
        return json_bytes_response(
            embeddings.encode_embeddings(decoded, outcome, usage)
        )
    return json_bytes_response(
        await asyncio.to_thread(embeddings.encode_embeddings, decoded, outcome, usage)
    )


@api.post(
    "/v1/rerank",
    "Rank documents",
    Scope.USE,
    by_calls=True,
    answer=rerank.CreateRerankResponse,
    body=rerank.CreateRerank,
)
async def create_rerank(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    decoded = await gateway.bodies.decode(
        request, caller.name, rerank.decode_rerank_request
    )
    job_id, outcome, usage, model = await answer_inputs(
        gateway, request, caller, decoded.work, field="documents"
    )
    work = replace(decoded.work, model=model)
    decoded = dataclasses.replace(decoded, work=work)
    return json_bytes_response(rerank.encode_ranking(job_id, decoded, outcome, usage))


@api.post(
    "/v1/audio/transcriptions",
    "Transcribe speech",
    Scope.USE,
    by_calls=True,
    answer=transcription.TranscriptionAnswer,
)
async def create_transcription(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    form, audio = await gateway.bodies.receive_form(
        request, caller.name, transcription.AUDIO_MAX
    )
    decode = partial(transcription.decode_transcription_request, form)
    decoded = await gateway.bodies.decode_bytes(audio, caller.name, decode)
    _, outcome, usage, _ = await answer_inputs(
        gateway, request, caller, decoded.work, field="prompt"
    )
    encoded = transcription.encode_transcription(decoded.answer_format, outcome, usage)
    return web.Response(body=encoded.body, content_type=encoded.media, charset="utf-8")


MISSING = "there is no job {}: it never existed, or was pruned"
RESULT_WAIT = 55.0  # seconds for a job that still runs: below the limits of proxies


async def _show_result(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    type_: type[Chat | Completion],
) -> web.Response:
    stored = await awaited_job(gateway, request, caller, RESULT_WAIT, MISSING)
    job_id, work = stored.job.id, stored.job.work
    if stored.ended_at is None:
        raise StillRunning(f"job {job_id} has not ended yet: try again later")
    if not isinstance(work, type_):
        raise NotFound(f"job {job_id} is of another kind: {stored.job.kind.value}")
    end = stored_end(gateway, stored)
    if isinstance(end, ShoalError):
        raise end
    return json_bytes_response(
        answers.answer_form(work).encode(job_id, end, int(stored.submitted_at))
    )
