"""What a server has loaded, and how it loads and unloads models: by its own API.

Sources: Ollama's API reference, "Load a model", "Unload a model", "List Running
Models"; LM Studio's documentation, "LM Studio API" (v1): "List your models", "Load a
model", "Unload a model"; llama.cpp's ``tools/server/README.md``, "Using multiple
models"; vLLM's documentation, "Sleep Mode".
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import structs

from shoal.domain.errors import JobError, Unavailable
from shoal.domain.worker import LoadableModel, ServedModel
from shoal.engines.adapters import Adapter
from shoal.engines.catalog import (
    LATEST,
    ListedModel,
    QueryServer,
    ServerQuery,
    query_native,
    token_count,
)
from shoal.engines.gguf_files import model_size
from shoal.engines.server_errors import parse_problem
from shoal.engines.server_kinds import (
    LLAMA_SERVER,
    LM_STUDIO,
    NO_TEXT,
    OLLAMA,
    VLLM,
    ServerKind,
)

POLL_INTERVAL = 1.0  # seconds between looks at a load that the server goes on with
SIZE_MAX = 1 << 50  # bytes
TEXT_MAX = 64  # characters of a quantization's name
SILENT = "the server no longer says what it has loaded"


@dataclass(frozen=True, slots=True)
class Resident:
    """What a server says of a model.

    ``instances`` are the ids of its copies in memory: none if it is not loaded.
    ``failure`` is why its last load failed; empty: it did not.  ``size`` is in bytes
    and ``context`` the longest, in tokens; 0: unknown.  One that ``follows`` another
    comes and goes with it: it is not loaded by itself.  An ``adapter`` is loaded into
    the model that it is for.
    """

    instances: tuple[str, ...] = ()
    is_loading: bool = False
    failure: str = ""
    size: int = 0
    context: int = 0
    quantization: str = ""
    follows: bool = False
    adapter: Adapter | None = None


Residents: TypeAlias = Mapping[str, Resident]
"""What a server says of its models, by their names on it."""


@dataclass(frozen=True, slots=True)
class ControlApi:
    """The requests by which a kind of server reports, loads and unloads its models.

    ``find`` returns None if the server lacks the API.  ``load`` returns the request for
    a model, with a context in tokens (0: the server's choice), and ``unload`` that for
    one of its instances.  ``waits``: a response to these means that it is done.
    ``whole``: all models of the server are loaded and unloaded together.
    """

    find: Callable[
        [QueryServer, Sequence[ListedModel]], Awaitable[Mapping[str, Resident] | None]
    ]
    load: Callable[[ListedModel, int], ServerQuery]
    unload: Callable[[str], ServerQuery]
    waits: bool = True
    whole: bool = False


class ServerControl:
    """Loads and unloads the models of one server.

    A server without such an API has no ``known`` models, and all that it lists counts
    as loaded.  A model that is being unloaded is ``leaving``: nothing may be sent to
    it, because servers load what they are asked for.
    """

    def __init__(
        self,
        query: QueryServer,
        find_adapters: Callable[[], Sequence[Adapter]] = list,
    ) -> None:
        self.kind: ServerKind | None = None
        self._query = query
        self._find_adapters = find_adapters
        self._answers = False  # it has said what it has loaded
        self._listed_ids: set[str] = set()
        self._api: ControlApi | None = None
        self._residents: dict[str, Resident] = {}
        self._listed: dict[str, ListedModel] = {}
        self._leaving: set[str] = set()
        self._running: Counter[str] = Counter()
        self._idle = asyncio.Event()  # set whenever a model has no job left
        # Models that were loaded at the first look: see ``LoadableModel.stays``.
        self._first: frozenset[str] | None = None

    async def refresh(
        self, kind: ServerKind | None, listed: Sequence[ListedModel]
    ) -> list[ListedModel]:
        """Ask the server what it has loaded; return these of the ``listed`` models.

        Raises Unavailable.
        """
        self.kind, self._api = kind, CONTROLS.get("" if kind is None else kind.name)
        residents: Residents | None = None
        if self._api is not None:
            residents = await self._api.find(self._query, listed)
        if residents is None and self._answers:
            raise Unavailable(SILENT)
        self._answers = residents is not None
        self._listed_ids = {each.id for each in listed}
        self._residents = {**(residents or {})}
        known = [each for each in listed if each.id in self._residents]
        if kind is VLLM:
            known += await self._adapted(listed)
        self._listed = {each.model.name: each for each in known}
        if self._first is None:
            self._first = frozenset(
                id for id, each in self._residents.items() if each.instances
            )
        return [
            each
            for each in listed
            if each.id not in self._residents or self._is_offered(each.id)
        ]

    def forget(self) -> None:
        """Another server may answer next."""
        self._answers, self._residents, self._listed = False, {}, {}

    @property
    def served(self) -> list[ServedModel]:
        """The models that the server can load, and those that it has loaded."""
        return [
            each.model
            for each in self._listed.values()
            if not self._residents[each.id].follows
        ]

    @property
    def memory(self) -> int:
        """The bytes that the loaded models need, as far as that is known."""
        return sum(
            self.need(model.name)
            for model in self.served
            if self._residents[self._listed[model.name].id].instances
        )

    def need(self, name: str) -> int:
        """Return the bytes that a model needs; 0: unknown."""
        listed = self._find(name)
        return 0 if listed is None else self._describe(listed).memory(0, 1)

    def library(
        self, select: Callable[[Sequence[ServedModel]], Sequence[ServedModel]]
    ) -> list[LoadableModel]:
        """Return the models that it can load on order, under their offered names."""
        return [
            structs.replace(self._describe(listed), name=model.name)
            for model in select(self.served)
            if (listed := self._find(model.name)) is not None
        ]

    def is_leaving(self, id: str) -> bool:
        """Return whether a model is being unloaded, by its name on the server."""
        return id in self._leaving

    def is_loaded(self, name: str) -> bool:
        """Return whether a model is loaded, and not being unloaded."""
        listed = self._find(name)
        return listed is not None and self._is_offered(listed.id)

    def begin(self, name: str) -> str:
        """Count a job of a model until ``end`` gets what this returns.

        Raises Unavailable if the model is being unloaded.
        """
        listed = self._find(name)
        id = name if listed is None else listed.id
        if id in self._leaving:
            raise Unavailable("the model is being unloaded")
        self._running[id] += 1
        return id

    def end(self, id: str) -> None:
        """Count a job no longer."""
        self._running[id] -= 1
        if not self._running[id]:
            del self._running[id]
            self._idle.set()

    async def load(self, name: str, context: int) -> None:
        """Have a model loaded.  Raises Unavailable, and JobError with its words."""
        api, listed = self._known(name)
        known = self._residents[listed.id]
        if known.adapter is not None:
            await self._load_adapter(api, listed, known.adapter)
            return
        known = await self._look(api, listed)  # another client may have begun it
        if not (known.is_loading or known.instances):
            await self._order(api.load(listed, context))
        while not api.waits:
            known = await self._look(api, listed)
            if known.instances:
                return
            if not known.is_loading:
                raise JobError(known.failure or "it did not load the model")
            await asyncio.sleep(POLL_INTERVAL)

    def withdraw(self, name: str) -> None:
        """Take no more jobs for a model, and for all that would go with it."""
        self._leaving.update(self._together(name))

    def restore(self, name: str) -> None:
        """Take jobs for a model again, if it is loaded."""
        self._leaving.difference_update(self._together(name))

    async def wait_idle(self, name: str) -> None:
        """Wait until no job uses what an unload of a model would take away."""
        while any(self._running[id] for id in self._together(name)):
            self._idle.clear()
            await self._idle.wait()

    async def unload(self, name: str) -> None:
        """Have a model unloaded.  Raises Unavailable, and JobError with its words."""
        api, listed = self._known(name)
        known = self._residents[listed.id]
        for instance in known.instances:
            if known.adapter is not None:
                order = _tell("/v1/unload_lora_adapter", lora_name=instance)
            else:
                order = api.unload(instance)
            await self._order(order)
        while not api.waits:
            if not (await self._look(api, listed)).instances:
                return
            await asyncio.sleep(POLL_INTERVAL)

    def _find(self, name: str) -> ListedModel | None:
        return self._listed.get(name) or self._listed.get(name + LATEST)

    def _together(self, name: str) -> Sequence[str]:
        """Return the names on the server of a model, and of those unloaded with it."""
        if (listed := self._find(name)) is None:
            return []
        is_base = self._residents[listed.id].adapter is None
        if self._api is not None and self._api.whole and is_base:
            return [*self._residents]
        return [listed.id]

    async def _adapted(self, listed: Sequence[ListedModel]) -> list[ListedModel]:
        """Find the adapters here for the models of a vLLM that loads adapters."""
        bases = {
            name: each
            for each in listed
            if not each.parent
            for name in (each.id, each.root)
        }
        adapters = await asyncio.to_thread(self._find_adapters)
        if not any(each.base in bases for each in adapters):
            return []
        # It is loaded by a POST; a GET asks whether that exists.
        asked = await self._query(ServerQuery("/load_lora_adapter"))
        if asked.status != HTTPStatus.METHOD_NOT_ALLOWED:
            return []
        loaded = {each.id for each in listed if each.parent}
        found = []
        for adapter in adapters:
            if (base := bases.get(adapter.base)) is None:
                continue
            name = f"{base.model.name}:{adapter.name}"
            awake = base.id not in self._residents or self._is_offered(base.id)
            self._residents[name] = Resident(
                (name,) if name in loaded and awake else (),
                size=adapter.size,
                adapter=adapter,
            )
            model = structs.replace(base.model, name=name)
            found.append(ListedModel(model, name, base.id))
        return found

    async def _load_adapter(
        self, api: ControlApi, listed: ListedModel, adapter: Adapter
    ) -> None:
        base = self._residents.get(listed.parent)
        if base is not None and not base.instances:
            await self._order(api.load(listed, 0))  # it sleeps
        if listed.id not in self._listed_ids:
            path = str(adapter.folder)
            await self._order(
                _tell("/v1/load_lora_adapter", lora_name=listed.id, lora_path=path)
            )

    def _known(self, name: str) -> tuple[ControlApi, ListedModel]:
        listed = self._find(name)
        if self._api is None or listed is None:
            raise Unavailable(f"the server no longer lists {name!a:.256}")
        return self._api, listed

    def _is_offered(self, id: str) -> bool:
        return bool(self._residents[id].instances) and id not in self._leaving

    def _describe(self, listed: ListedModel) -> LoadableModel:
        known, model = self._residents[listed.id], listed.model
        assert self.kind is not None, "it has an API"
        return LoadableModel(
            model.name,
            known.size,
            model.kinds,
            model.features,
            known.context or model.context,
            quantization=known.quantization,
            engine=self.kind.name,
            stays=self._first is not None and listed.id in self._first,
        )

    async def _look(self, api: ControlApi, listed: ListedModel) -> Resident:
        """Ask about a model now.  Raises Unavailable."""
        found = await api.find(self._query, [*self._listed.values()])
        if found is None:
            raise Unavailable(SILENT)
        self._residents.update(found)
        return found.get(listed.id, Resident(failure="the server lists it no longer"))

    async def _order(self, query: ServerQuery) -> None:
        reply = await self._query(query)
        if reply.status != HTTPStatus.OK:
            problem = parse_problem(reply.body)
            reason = f"status {reply.status}" if problem is None else problem.message
            raise JobError(f"{self.kind.name if self.kind else 'the server'}: {reason}")


def _size(number: Any) -> int:
    whole = isinstance(number, int) and not isinstance(number, bool)
    return number if whole and 0 < number <= SIZE_MAX else 0


def _text(fields: Any, name: str) -> str:
    text = fields.get(name) if isinstance(fields, dict) else None
    return text[:TEXT_MAX] if isinstance(text, str) and text.isprintable() else ""


def _tell(path: str, **body: object) -> ServerQuery:
    return ServerQuery(path, msgspec.json.encode(body), native=True)


class _OllamaEntry(msgspec.Struct, frozen=True):
    name: str
    size: Any = None
    details: Any = None


class _OllamaList(msgspec.Struct, frozen=True):
    models: tuple[_OllamaEntry, ...] | None


async def _find_ollama(
    query: QueryServer, listed: Sequence[ListedModel]
) -> Residents | None:
    running = await query_native(query, "/api/ps", _OllamaList)
    stored = await query_native(query, "/api/tags", _OllamaList)
    if running is None or stored is None:
        return None
    loaded = {each.name for each in running.models or ()}
    return {
        each.name: Resident(
            (each.name,) if each.name in loaded else (),
            size=_size(each.size),
            quantization=_text(each.details, "quantization_level"),
        )
        for each in stored.models or ()
    }


def _load_ollama(listed: ListedModel, context: int) -> ServerQuery:
    # Not the context: later requests, which cannot name one, would load it again.
    # Nor how long it stays: that is its owner's setting.
    if listed.model.kinds <= NO_TEXT:
        return _tell("/api/embed", model=listed.id, input=[])
    return _tell("/api/generate", model=listed.id, stream=False)


def _unload_ollama(instance: str) -> ServerQuery:
    return _tell("/api/generate", model=instance, keep_alive=0, stream=False)


class _Instance(msgspec.Struct, frozen=True):
    id: str


class _StudioModel(msgspec.Struct, frozen=True):
    key: str
    loaded_instances: tuple[_Instance, ...]
    size_bytes: Any = None
    max_context_length: Any = None
    quantization: Any = None


class _StudioModels(msgspec.Struct, frozen=True):
    models: tuple[_StudioModel, ...]


async def _find_lm_studio(
    query: QueryServer, listed: Sequence[ListedModel]
) -> Residents | None:
    found = await query_native(query, "/api/v1/models", _StudioModels)
    if found is None:
        return None
    return {
        each.key: Resident(
            tuple(instance.id for instance in each.loaded_instances),
            size=_size(each.size_bytes),
            context=token_count(each.max_context_length),
            quantization=_text(each.quantization, "name"),
        )
        for each in found.models
    }


def _load_lm_studio(listed: ListedModel, context: int) -> ServerQuery:
    chosen = {"context_length": context} if context else {}
    return _tell("/api/v1/models/load", model=listed.id, **chosen)


class _RouterStatus(msgspec.Struct, frozen=True):
    value: str
    args: Any = None
    failed: Any = None
    exit_code: Any = None


class _RouterModel(msgspec.Struct, frozen=True):
    id: str
    status: _RouterStatus
    meta: Any = None


class _RouterModels(msgspec.Struct, frozen=True):
    data: tuple[_RouterModel, ...]


async def _find_llama_server(
    query: QueryServer, listed: Sequence[ListedModel]
) -> Residents | None:
    found = await query_native(query, "/models", _RouterModels)
    if found is None:
        return None  # it is no router
    sizes = await asyncio.to_thread(_router_sizes, found.data)
    residents = {}
    for each in found.data:
        status = each.status
        code = "" if status.exit_code is None else f" with status {status.exit_code}"
        residents[each.id] = Resident(
            # One that sleeps wakes up by itself when it is asked.
            (each.id,) if status.value in ("loaded", "sleeping") else (),
            status.value == "loading",
            f"llama-server: its process ended{code}" if status.failed else "",
            sizes[each.id],
        )
    return residents


def _router_sizes(models: Sequence[_RouterModel]) -> Mapping[str, int]:
    """Return the sizes of models: a router reports those of loaded ones, and files."""
    sizes = {}
    for each in models:
        size = _size(each.meta.get("size")) if isinstance(each.meta, dict) else 0
        args = each.status.args if isinstance(each.status.args, list) else []
        named = next((file for name, file in pairwise(args) if name == "--model"), "")
        if not size and named and isinstance(named, str):
            size = model_size(Path(named))  # it is here if the server is
        sizes[each.id] = size
    return sizes


class _Sleep(msgspec.Struct, frozen=True):
    is_sleeping: bool


async def _find_vllm(
    query: QueryServer, listed: Sequence[ListedModel]
) -> Residents | None:
    state = await query_native(query, "/is_sleeping", _Sleep)
    if state is None:
        return None  # it runs without sleep mode, or without VLLM_SERVER_DEV_MODE
    # Adapters, and further names of the model, are no models of their own.
    first = next((each.id for each in listed if not each.parent), "")
    return {
        each.id: Resident(
            () if state.is_sleeping else (each.id,), follows=each.id != first
        )
        for each in listed
    }


CONTROLS: Mapping[str, ControlApi] = {
    OLLAMA.name: ControlApi(_find_ollama, _load_ollama, _unload_ollama),
    LM_STUDIO.name: ControlApi(
        _find_lm_studio,
        _load_lm_studio,
        lambda instance: _tell("/api/v1/models/unload", instance_id=instance),
    ),
    LLAMA_SERVER.name: ControlApi(
        _find_llama_server,
        lambda listed, context: _tell("/models/load", model=listed.id),
        lambda instance: _tell("/models/unload", model=instance),
        waits=False,
    ),
    VLLM.name: ControlApi(
        _find_vllm,
        lambda listed, context: ServerQuery("/wake_up", b"", native=True),
        lambda instance: ServerQuery("/sleep?level=1", b"", native=True),
        whole=True,
    ),
}
"""How servers are controlled, by the names of their kinds."""
