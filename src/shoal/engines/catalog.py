"""Detects the kind of a server and lists its models.

Source: the documentation of each server's own endpoints, and their responses:
Ollama's ``/api/tags`` and ``/api/show``, llama-server's ``/props``, LM Studio's
``/api/v0/models``; else ``GET /v1/models`` with the fields that vLLM and others add.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from shoal.domain.errors import Unavailable
from shoal.domain.work import JSON, Feature
from shoal.domain.worker import ServedModel
from shoal.engines.server_errors import DECODE_ERRORS, parse_problem
from shoal.engines.server_kinds import (
    EMBEDDINGS,
    LLAMA_SERVER,
    LM_STUDIO,
    MLX,
    OLLAMA,
    OWNERS,
    TEXT,
    TRANSFORMERS,
    UNKNOWN,
    ServerKind,
    describe_model,
    guess_kinds,
)
from shoal.engines.streams.json_values import decode_json
from shoal.engines.streams.sse import BOM

MODELS_MAX = 256  # models listed per server
CONTEXT_MAX = 2**31 - 1  # tokens
NAME_MAX = 256  # characters; the limit of the wires
LORA = "lora"  # the field by which requests choose llama-server's adapters
LATEST = ":latest"  # Ollama accepts names without it


class ListEntry(msgspec.Struct, frozen=True):
    """A model in the list that all servers have; most give only its name."""

    id: str
    owned_by: Any = None
    max_model_len: Any = None
    context_window: Any = None  # Groq, Together and others
    type: Any = None
    loaded_context_length: Any = None
    capabilities: Any = None
    parent: Any = None  # of an adapter: its base model
    root: Any = None  # what vLLM was told to serve
    status: Any = None  # whether a router of llama-server has it loaded
    meta: Any = None  # of a loaded model of a router


class ServerModelList(msgspec.Struct, frozen=True):
    data: tuple[ListEntry, ...] | None


class OllamaTag(msgspec.Struct, frozen=True):
    name: str
    digest: str = ""
    remote_host: str = ""


class OllamaTags(msgspec.Struct, frozen=True):
    models: tuple[OllamaTag, ...] | None


class LlamaSettings(msgspec.Struct, frozen=True):
    n_ctx: int = 0


class LlamaProps(msgspec.Struct, frozen=True):
    """Properties that llama-server reports."""

    default_generation_settings: LlamaSettings
    total_slots: int = 0
    modalities: dict[str, Any] = {}
    chat_template_caps: dict[str, Any] | None = None


class LlamaAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that llama-server was started with."""

    id: int
    path: str
    scale: float = 1.0


def read_model_list(body: bytes) -> tuple[ListEntry, ...]:
    """Return the models in a server's list; what is no model is left out.

    Some servers send the list alone, or call it ``models``, and some name models
    instead of giving them an id.

    Raises ValueError if there is no list.
    """
    listed = decode_json(body.removeprefix(BOM))
    if isinstance(listed, dict) and not listed.keys().isdisjoint(("data", "models")):
        listed = listed.get("data", listed.get("models")) or []
    if not isinstance(listed, list):
        raise ValueError(f"a {type(listed).__name__}, expected a list")
    found: list[ListEntry] = []
    for each in listed:
        fields = each if isinstance(each, dict) else {"id": each}
        name = fields.get("id") or fields.get("name")
        if isinstance(name, str) and is_valid_name(name):
            found.append(msgspec.convert({**fields, "id": name}, ListEntry))
    return tuple(found)


def is_valid_name(name: str) -> bool:
    """Return whether a model can be offered under this name."""
    return 0 < len(name) <= NAME_MAX and name.isprintable()


def file_stem(name: str) -> str:
    """Return the model name in the path of its file."""
    if not name.endswith(".gguf"):
        return _last_part(name)
    return name.replace("\\", "/").rpartition("/")[2].removesuffix(".gguf") or name


def _last_part(name: str) -> str:
    """Return the last part of a name that is an absolute path, else the name.

    The folders are those of one machine, and mean nothing to clients.
    """
    if not (PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()):
        return name
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2] or name


def context_length(entry: ListEntry) -> int:
    """Return the context length in tokens, if the server reports it reliably.

    LM Studio's ``max_context_length`` is the model's maximum.  The loaded context is
    smaller, and is only reported once the model is loaded.
    """
    meta = entry.meta if isinstance(entry.meta, dict) else {}
    details = (
        *(entry.max_model_len, entry.context_window, entry.loaded_context_length),
        meta.get("n_ctx"),
    )
    return next((tokens for each in details if (tokens := token_count(each))), 0)


def token_count(number: Any) -> int:
    whole = isinstance(number, int) and not isinstance(number, bool)
    return number if whole and 0 < number <= CONTEXT_MAX else 0


def ollama_context(parameters: Any) -> int:
    """Parse the context length from Ollama's model parameters, one per line.

    If it is not set there, it depends on the server's settings, which are not exposed.
    """
    lines = parameters.splitlines() if isinstance(parameters, str) else ()
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "num_ctx" and value.strip().isdecimal():
            return token_count(int(value.strip()[:10]))
    return 0


def has_tools(caps: Mapping[str, Any]) -> bool:
    """Return whether a chat template shows tools to the model, and their calls.

    llama.cpp derives from the latter how the model writes a call.
    """
    shown = caps.get("supports_tools")
    return bool(shown and caps.get("supports_tool_calls", shown))


SLOTS_MAX = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A server's response, possibly truncated."""

    status: int
    body: bytes
    content_type: str = ""
    server: str = ""  # the Server header


@dataclass(frozen=True, slots=True)
class ServerQuery:
    """A request; ``native``: the path is outside the OpenAI API."""

    path: str
    body: bytes | None = None  # None: GET
    native: bool = False


QueryServer = Callable[[ServerQuery], Awaitable[ServerReply]]
"""Queries the server.  Raises Unavailable if it does not respond."""


async def query_native(
    query: QueryServer, path: str, type_: type[T], body: bytes | None = None
) -> T | None:
    """Query an endpoint outside the OpenAI API; None if it does not exist."""
    reply = await query(ServerQuery(path, body, native=True))
    if reply.status != HTTPStatus.OK:
        return None
    try:
        return msgspec.json.decode(reply.body, type=type_)
    except DECODE_ERRORS:
        return None


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model, and its name on the server.

    ``parent`` is the base model of an adapter, and ``root`` what the model's author
    calls it; empty: unknown.  ``is_loaded``: as far as the list tells.  ``fields`` go
    with each request.
    """

    model: ServedModel
    id: str
    parent: str = ""
    root: str = ""
    is_loaded: bool = True
    fields: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(slots=True)
class ServerCatalog:
    """The known properties of one server.

    ``slots`` is its number of concurrent jobs, once ``refresh`` has queried it.
    """

    query: QueryServer
    server_kind: ServerKind | None = None
    slots: int = UNKNOWN.slots
    # Ollama's models by name and digest; whether a llama-server supports embeddings;
    # the contexts of LM Studio's models by name.
    _ollama_models: dict[str, ServedModel] = field(default_factory=dict)
    _supports_embeddings: bool | None = None
    _contexts: dict[str, int] = field(default_factory=dict)

    async def refresh(self) -> list[ListedModel]:
        """Return the current models of the server.

        Raises Unavailable if it does not list them.
        """
        listed = await self._list_models()
        if self.server_kind is None:
            self.server_kind = await self._detect_kind(*listed)
            self.slots = self.server_kind.slots
        entries = listed[1][:MODELS_MAX]
        if self.server_kind is OLLAMA:
            return await self._ollama()
        if self.server_kind is LLAMA_SERVER:
            return await self._llama_server(entries)
        if self.server_kind is LM_STUDIO:
            return await self._lm_studio(entries)
        return _listed(self.server_kind, entries)

    async def _list_models(self) -> tuple[ServerReply, tuple[ListEntry, ...]]:
        reply = await self.query(ServerQuery("/models"))
        if reply.status != 200:
            problem = parse_problem(reply.body)
            reason = problem.message if problem else f"it sent {reply.content_type}"
            raise NoModelList(
                f"it answers with status {reply.status}: {reason} (a base URL usually "
                "ends in /v1)",
                reply.status,
            )
        try:
            return reply, read_model_list(reply.body)
        except ValueError as error:
            kind = reply.content_type or "that"
            raise NoModelList(f"it lists no models: {kind}: {error}", 200) from error

    async def _detect_kind(
        self, reply: ServerReply, entries: tuple[ListEntry, ...]
    ) -> ServerKind:
        owners = {str(each.owned_by) for each in entries}
        for owner, kind in OWNERS.items():
            if owner in owners and kind not in (OLLAMA, LM_STUDIO):
                return kind
        if await query_native(self.query, "/api/tags", OllamaTags) is not None:
            return OLLAMA
        typed = await query_native(self.query, "/api/v0/models", ServerModelList)
        if typed is not None and any(each.type for each in typed.data or ()):
            return LM_STUDIO
        # mlx_lm.server runs on Python's http.server, and its models have no owners.
        if reply.server.startswith("BaseHTTP") and owners == {str(None)}:
            return MLX
        if not reply.server.startswith("uvicorn"):
            return UNKNOWN
        # It loads models by a POST of its own; a GET asks whether that exists.
        load = await self.query(ServerQuery("/load_model", native=True))
        return TRANSFORMERS if load.status == HTTPStatus.METHOD_NOT_ALLOWED else UNKNOWN

    async def _ollama(self) -> list[ListedModel]:
        tags = await query_native(self.query, "/api/tags", OllamaTags)
        if tags is None:
            raise Unavailable("it no longer lists its models")
        # Skip its cloud models: they run elsewhere, at the user's cost.
        local = [each for each in tags.models or () if not each.remote_host]
        models = {}
        for tag in local[:MODELS_MAX]:
            if not is_valid_name(tag.name):
                continue
            key = f"{tag.name} {tag.digest}"
            models[key] = self._ollama_models.get(key) or await self._show(tag.name)
        self._ollama_models = models
        return [ListedModel(model, model.name) for model in models.values()]

    async def _show(self, name: str) -> ServedModel:
        body = msgspec.json.encode({"model": name})
        details: dict[str, Any] = (
            await query_native(self.query, "/api/show", dict, body) or {}
        )
        capabilities = details.get("capabilities")
        if not isinstance(capabilities, list) or not capabilities:
            return describe_model(OLLAMA, name)
        kinds = (
            EMBEDDINGS
            if "embedding" in capabilities and "completion" not in capabilities
            else TEXT
        )
        modalities = {"vision": Feature.IMAGES, "audio": Feature.AUDIO}
        return describe_model(
            OLLAMA,
            name,
            kinds=kinds,
            lacks=() if "tools" in capabilities else (Feature.TOOLS,),
            modalities=[
                feature
                for sense, feature in modalities.items()
                if sense in capabilities
            ],
            context=ollama_context(details.get("parameters")),
        )

    async def _llama_server(self, entries: tuple[ListEntry, ...]) -> list[ListedModel]:
        # A router loads the models that it is asked about.
        is_router = any(each.status for each in entries)
        props = (
            None if is_router else await query_native(self.query, "/props", LlamaProps)
        )
        if props is None or len(entries) != 1:
            # A router in front of several servers: each model has its own.
            return _listed(LLAMA_SERVER, entries)
        (entry,) = entries
        if 0 < props.total_slots <= SLOTS_MAX:
            self.slots = props.total_slots
        name = file_stem(entry.id)
        if self._supports_embeddings is None:
            body = msgspec.json.encode({"model": entry.id, "input": ["a"]})
            self._supports_embeddings = (
                await self.query(ServerQuery("/embeddings", body))
            ).status == 200
        kinds = guess_kinds(name)
        if self._supports_embeddings and kinds != EMBEDDINGS:
            kinds |= EMBEDDINGS
        caps = props.chat_template_caps
        modalities = {"vision": Feature.IMAGES, "audio": Feature.AUDIO}
        model = describe_model(
            LLAMA_SERVER,
            name,
            kinds=kinds,
            lacks=() if caps is None or has_tools(caps) else (Feature.TOOLS,),
            modalities=[
                f for sense, f in modalities.items() if props.modalities.get(sense)
            ],
            context=token_count(props.default_generation_settings.n_ctx),
        )
        adapters = await query_native(
            self.query, "/lora-adapters", tuple[LlamaAdapter, ...]
        )
        return [*_adapted(ListedModel(model, entry.id), adapters or ())]

    async def _lm_studio(self, entries: tuple[ListEntry, ...]) -> list[ListedModel]:
        typed = await query_native(self.query, "/api/v0/models", ServerModelList)
        if typed is None:
            return [ListedModel(describe_model(LM_STUDIO, e.id), e.id) for e in entries]
        models = []
        for each in typed.data or ():
            if not is_valid_name(each.id):
                continue
            # Reported only while the model is loaded; a reload uses the same value.
            if context := context_length(each):
                self._contexts[each.id] = context
            capabilities = each.capabilities
            without_tools = (
                isinstance(capabilities, list) and "tool_use" not in capabilities
            )
            model = describe_model(
                LM_STUDIO,
                each.id,
                kinds=EMBEDDINGS if each.type == "embeddings" else TEXT,
                lacks=(Feature.TOOLS,) if without_tools else (),
                modalities=(Feature.IMAGES,) if each.type == "vlm" else (),
                context=self._contexts.get(each.id, 0),
            )
            models.append(ListedModel(model, each.id))
        return models[:MODELS_MAX]


def _listed(kind: ServerKind, entries: Sequence[ListEntry]) -> list[ListedModel]:
    """Return models that only the list names, each under its own name."""
    counts = Counter(_last_part(each.id) for each in entries)
    names = [
        last if counts[last := _last_part(each.id)] == 1 else each.id
        for each in entries
    ]
    return [
        ListedModel(
            describe_model(kind, name, context=context_length(each)),
            each.id,
            each.parent if isinstance(each.parent, str) else "",
            each.root if isinstance(each.root, str) else "",
            _is_loaded(each.status),
        )
        for name, each in zip(names, entries, strict=True)
    ]


def _adapted(
    base: ListedModel, adapters: Sequence[LlamaAdapter]
) -> Iterator[ListedModel]:
    """Yield a model, and the model with each of its adapters, which requests choose.

    A request without a choice may go on from what llama-server read with another one.
    """
    kinds = base.model.kinds & TEXT
    if not adapters or not kinds:
        yield base
        return
    scales = {each.id: each.scale for each in adapters}
    yield replace(base, fields=_choice(scales))
    for each in adapters[: MODELS_MAX - 1]:
        name = f"{base.model.name}:{file_stem(each.path)}"
        if is_valid_name(name):
            model = structs.replace(base.model, name=name, kinds=kinds)
            alone = {id: float(id == each.id) for id in scales}
            yield ListedModel(model, base.id, parent=base.id, fields=_choice(alone))


def _choice(scales: Mapping[int, float]) -> Mapping[str, JSON]:
    return {LORA: [{"id": id, "scale": scale} for id, scale in scales.items()]}


def _is_loaded(status: Any) -> bool:
    return not isinstance(status, dict) or status.get("value") == "loaded"


class NoModelList(Unavailable):
    """The server does not list its models."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
