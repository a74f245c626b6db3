"""Ollama's endpoints: its chats, completions and embeddings, and the models.

Source: Ollama's API reference.
"""

import asyncio
from collections.abc import Iterable

import msgspec
from aiohttp import web
from msgspec.structs import replace

from shoal.coordinator.placer import submit_order
from shoal.domain.credentials import Scope
from shoal.domain.errors import CannotDo, NotFound, UnknownModel
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat, Completion, Embedding, JobKind
from shoal.gateway.chat.inputs import LARGE_ANSWER, vectors_of
from shoal.gateway.chat.job_answers import AnswerForm, answer, answer_inputs, run_whole
from shoal.gateway.chat.ollama import bodies, embeddings, models
from shoal.gateway.chat.ollama.answers import AnswerShape, OllamaAnswer, Stopwatch
from shoal.gateway.chat.ollama.requests import (
    ModelLoad,
    OllamaRequest,
    decode_ollama_chat,
    decode_ollama_prompt,
)
from shoal.gateway.context import ChatGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import decode, missing
from shoal.gateway.http.errors import PLAIN_ERRORS
from shoal.gateway.http.operation import Operation, Operations
from shoal.gateway.http.responses import NDJSON_TYPE, TEXT_TYPE, json_bytes_response
from shoal.gateway.jobs.job_options import build_job
from shoal.gateway.models import listing
from shoal.ledger.canonical import to_time
from shoal.pool.models.aliases import real_model
from shoal.pool.models.demand import orders_to_unload

api = Operations(PLAIN_ERRORS)

REFUSAL = "Refuse to manage models"
RUNNING = "Ollama is running"  # clients compare it

LEAST = "1"  # what a model reads that is only to be loaded

PULLED = b'{"status":"success"}\n'
PULLING = b'{"status":"pulling manifest"}\n'


@api.get("/", "Check that Ollama's API is here", media=TEXT_TYPE, documented=False)
async def show_running() -> web.Response:
    return web.Response(text=RUNNING, content_type=TEXT_TYPE)


@api.get("/api/version", "Show Ollama's version")
async def show_version() -> models.OllamaVersion:
    return models.OllamaVersion()


@api.post(
    "/api/chat",
    "Answer a chat as Ollama does",
    Scope.USE,
    body=bodies.OllamaChat,
    streams=NDJSON_TYPE,
)
async def create_ollama_chat(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    decoded = await gateway.bodies.decode(request, caller.name, decode_ollama_chat)
    return await _answer(
        gateway, request, caller, decoded, AnswerShape.CHAT, "messages"
    )


@api.post(
    "/api/generate",
    "Complete a prompt as Ollama does",
    Scope.USE,
    body=bodies.OllamaGenerate,
    streams=NDJSON_TYPE,
)
async def create_ollama_completion(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    decoded = await gateway.bodies.decode(request, caller.name, decode_ollama_prompt)
    shape = AnswerShape.GENERATE
    return await _answer(gateway, request, caller, decoded, shape, "prompt")


@api.post(
    "/api/embed",
    "Embed texts as Ollama does",
    Scope.USE,
    answer=embeddings.OllamaEmbeddings,
    body=bodies.OllamaEmbed,
)
async def embed_texts(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    watch = Stopwatch(gateway.clock.now)
    decoded = await gateway.bodies.decode(request, caller.name, embeddings.decode_embed)
    outcome, prompt_tokens = await _embed(gateway, request, caller, decoded, "input")
    wanted = 0 if decoded.work is None else len(decoded.work.inputs)

    def encode() -> bytes:
        vectors = [values for _, values in vectors_of(outcome, wanted)]
        return embeddings.encode_embed(decoded.model, vectors, prompt_tokens, watch)

    large = wanted > LARGE_ANSWER
    return json_bytes_response(await asyncio.to_thread(encode) if large else encode())


@api.post(
    "/api/embeddings",
    "Embed a text as Ollama did",
    Scope.USE,
    answer=embeddings.OllamaEmbedding,
    body=bodies.OllamaEmbedOne,
)
async def embed_text(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    decoded = await gateway.bodies.decode(
        request, caller.name, embeddings.decode_embed_one
    )
    outcome, _ = await _embed(gateway, request, caller, decoded, "prompt")
    wanted = 0 if decoded.work is None else 1
    vectors = [values for _, values in vectors_of(outcome, wanted)]
    return json_bytes_response(embeddings.encode_embed_one(vectors))


@api.get("/api/tags", "List the models as Ollama does", Scope.READ)
async def list_ollama_models(
    gateway: ChatGateway, caller: ApiCaller
) -> models.OllamaModels:
    listed = listing.listed_models(
        gateway.hub.pool,
        listing.seen_by(caller),
        loadable=gateway.lists_loadable,
    )
    return models.OllamaModels(
        [models.listed_model(each, gateway.created_at) for each in listed]
    )


@api.get("/api/ps", "List the models that workers have loaded", Scope.READ)
async def list_loaded_models(
    gateway: ChatGateway, caller: ApiCaller
) -> models.OllamaLoadedModels:
    listed = listing.model_summaries(gateway.hub.pool, listing.seen_by(caller))
    return models.OllamaLoadedModels(
        [models.loaded_model(each) for each in listed if each.workers]
    )


@api.post(
    "/api/show",
    "Describe a model as Ollama does",
    Scope.READ,
    body=bodies.OllamaModelName,
)
async def show_ollama_model(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> models.OllamaModelInfo:
    decoded = await gateway.bodies.decode(request, caller.name, decode_model_name)
    name = _resolved(gateway, decoded.model)
    shown = listing.model_summary(gateway.hub.pool, name, listing.seen_by(caller))
    return models.described_model(shown, gateway.created_at)


@api.post(
    "/api/pull",
    "Check that the pool has a model",
    Scope.READ,
    body=bodies.OllamaModelName,
    streams=NDJSON_TYPE,
)
async def pull_model(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    """Answer that a model of the pool is there; others are copied to workers."""
    decoded = await gateway.bodies.decode(request, caller.name, decode_model_name)
    name = _resolved(gateway, decoded.model)
    try:
        listing.model_summary(gateway.hub.pool, name, listing.seen_by(caller))
    except UnknownModel as error:
        raise UnknownModel(
            f"{error}. Models cannot be pulled through this API: on the machine that "
            f"should run it, `shoal models get {decoded.model}` copies it from a peer, "
            "and `shoal join` offers it"
        ) from error
    if decoded.stream is False:
        return json_bytes_response(PULLED)
    return _lines(PULLING + PULLED)


@api.post("/api/create", REFUSAL, Scope.USE, documented=False)
@api.post("/api/copy", REFUSAL, Scope.USE, documented=False)
@api.delete("/api/delete", REFUSAL, Scope.USE, documented=False)
@api.post("/api/push", REFUSAL, Scope.USE, documented=False)
@api.add("HEAD", "/api/blobs/{digest}", REFUSAL, Scope.USE, documented=False)
@api.post("/api/blobs/{digest}", REFUSAL, Scope.USE, documented=False)
async def refuse_management(request: web.Request) -> web.Response:
    raise CannotDo(
        f"{request.method} {request.path}: models cannot be managed through this API, "
        "only on the machines that run them: `shoal models --help`, `shoal join "
        "--help`",
        "model",
    )


_names = msgspec.json.Decoder(bodies.OllamaModelName)


def decode_model_name(data: bytes) -> bodies.OllamaModelName:
    """Decode a body that is about a model.

    Raises InvalidRequest.
    """
    body = decode(_names, data)
    if not (name := body.model or body.name):
        raise missing("model")
    return replace(body, model=name)


def _resolved(gateway: ChatGateway, name: str) -> str:
    return models.resolve_model(name, gateway.jobs.models, gateway.jobs.aliases)


async def _answer(
    gateway: ChatGateway,
    request: web.Request,
    caller: ApiCaller,
    decoded: OllamaRequest,
    shape: AnswerShape,
    field: str,
) -> web.StreamResponse:
    if isinstance(decoded, ModelLoad):
        return await _manage(gateway, request, caller, decoded, shape)
    name = decoded.work.model
    work = replace(decoded.work, model=_resolved(gateway, name))
    watch, at = Stopwatch(gateway.clock.now), gateway.clock.wall()
    decoded = replace(decoded, work=work)

    def form(work: Chat | Completion) -> AnswerForm:
        return OllamaAnswer(shape, name, work, watch).form(at)

    return await answer(gateway, request, caller, decoded, form, field=field)


async def _manage(
    gateway: ChatGateway,
    request: web.Request,
    caller: ApiCaller,
    decoded: ModelLoad,
    shape: AnswerShape,
) -> web.Response:
    """Load or unload a model, as far as the caller may, and answer that it was done."""
    name = _resolved(gateway, decoded.model)
    if decoded.reason == "load":
        await _load(gateway, request, caller, name)
    else:
        _unload(gateway, caller, name)
    answer = {
        "model": decoded.model,
        "created_at": to_time(gateway.clock.wall()),
        **shape.fields(""),
        "done": True,
        "done_reason": decoded.reason,
    }
    encoded = msgspec.json.encode(answer) + b"\n"
    return _lines(encoded) if decoded.stream else json_bytes_response(encoded)


async def _load(
    gateway: ChatGateway, request: web.Request, caller: ApiCaller, name: str
) -> None:
    """Have a model loaded by the least of requests, unless a worker has it.

    So it waits, fails, and counts like one.  Raises as ``answer``.
    """
    shown = listing.model_summary(gateway.hub.pool, name, listing.seen_by(caller))
    if shown.state != "loadable":
        return
    work: Chat | Completion | Embedding
    if JobKind.CHAT in shown.kinds:
        work = Chat(name, ({"role": "user", "content": LEAST},), 1)
    elif JobKind.COMPLETION in shown.kinds:
        work = Completion(name, LEAST, 1)
    else:
        work = Embedding(name, (LEAST,))
    await run_whole(gateway, request, caller, build_job(gateway, request, work, caller))


def _unload(gateway: ChatGateway, caller: ApiCaller, name: str) -> None:
    """Unload a model that nobody uses, if the caller decides for all.

    Otherwise nothing happens: clients free memory in passing, and others use the model.
    """
    hub = gateway.hub
    listing.model_summary(hub.pool, name, listing.seen_by(caller))
    if not caller.has_scope(Scope.ADMIN):
        return
    model = real_model(hub.pool, name, None, None)
    for each in orders_to_unload(hub.pool, model, gateway.clock.now()):
        submit_order(hub, each)


async def _embed(
    gateway: ChatGateway,
    request: web.Request,
    caller: ApiCaller,
    decoded: embeddings.OllamaTexts,
    field: str,
) -> tuple[Outcome, int]:
    """Return the outcome, and the number of tokens that were read."""
    name = _resolved(gateway, decoded.model)
    if decoded.work is None:
        await _load(gateway, request, caller, name)
        return Outcome(""), 0
    work: Embedding = replace(decoded.work, model=name)
    answered = await answer_inputs(gateway, request, caller, work, field=field)
    return answered.outcome, answered.usage.prompt_tokens


def _lines(data: bytes) -> web.Response:
    return web.Response(body=data, content_type=NDJSON_TYPE, charset="utf-8")


PREFIX_MISSING = "Name the address of Ollama's API"
OLLAMA_AGENT = "ollama"  # begins the user agent of Ollama's own clients

OLLAMA_FIELDS = frozenset(
    {"stream", "options", "keep_alive", "format", "think", "tools"}
)
"""Fields of Ollama's chats that are in no other body for the same path."""


class OllamaMisdirected(NotFound):
    """A request for Ollama's API lacks its prefix."""

    def __init__(self) -> None:
        super().__init__(
            "Ollama's API is not at the root of this port: add /ollama to the address "
            "(http://HOST:PORT/ollama), or use the port of `shoal serve --ollama-port`"
        )


def is_ollama_client(request: web.Request) -> bool:
    """Say whether a client of Ollama sends the request, by its own account."""
    return request.headers.get("User-Agent", "").lower().startswith(OLLAMA_AGENT)


def misdirected(
    operations: Iterable[Operation], others: Iterable[Operation]
) -> Operations:
    """Return operations that refuse requests for ``operations`` without the prefix.

    Clients of Ollama are configured with an address without a path.  The error names
    the right one, in the form that they show.  The paths of ``others`` are left out.
    """

    async def refuse() -> web.Response:
        raise OllamaMisdirected

    refused = Operations(PLAIN_ERRORS)
    taken = {each.path for each in others}
    for each in operations:
        if each.documented and each.path not in taken:
            add = refused.add(each.method, each.path, PREFIX_MISSING, documented=False)
            add(refuse)
    return refused
