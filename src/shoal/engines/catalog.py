"""Finds out what kind of server answers, and what its models are.

Source: the documentation of each server's own endpoints, and their answers:
Ollama's ``/api/tags`` and ``/api/show``, llama-server's ``/props``, LM Studio's
``/api/v0/models``; else ``GET /v1/models`` with what vLLM and others add to it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from shoal.domain.errors import Unavailable
from shoal.domain.work import Feature
from shoal.domain.worker import Model
from shoal.engines.flavours import (
    EMBEDDINGS,
    LLAMA_SERVER,
    LM_STUDIO,
    MLX,
    OLLAMA,
    OWNERS,
    TEXT,
    UNKNOWN,
    Flavour,
    describe,
    kinds_by_name,
)
from shoal.engines.refusals import UNREADABLE, read_problem
from shoal.engines.server_lists import (
    MODELS_MAX,
    Entry,
    Models,
    Props,
    Tags,
    context_of,
    file_stem,
    num_ctx,
    offerable,
    tokens_in,
)

SLOTS_MAX = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer, or its beginning."""

    status: int
    body: bytes
    content_type: str = ""
    server: str = ""  # the header of that name


@dataclass(frozen=True, slots=True)
class Question:
    """A request; ``own`` means a path of the server's own, beside OpenAI's."""

    path: str
    body: bytes | None = None  # None: GET
    own: bool = False


Ask = Callable[[Question], Awaitable[Reply]]
"""Asks the server.  Raises Unavailable if there is no answer."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model, and what the server calls it."""

    model: Model
    id: str


@dataclass(slots=True)
class Catalog:
    """What is known of one server.

    ``slots`` is how many jobs it does at a time, once ``look`` has asked.
    """

    ask: Ask
    flavour: Flavour | None = None
    slots: int = UNKNOWN.slots
    _shown: dict[str, Model] = field(default_factory=dict)  # by Ollama's digest
    _embeds: bool | None = None  # whether a llama-server makes embeddings
    _contexts: dict[str, int] = field(default_factory=dict)  # LM Studio's, by model

    async def look(self) -> list[Listed]:
        """Return the models that the server has now.

        Raises Unavailable if it has no list of them.
        """
        listed = await self._listed()
        if self.flavour is None:
            self.flavour = await self._recognise(*listed)
            self.slots = self.flavour.slots
        entries = listed[1][:MODELS_MAX]
        if self.flavour is OLLAMA:
            return await self._ollama()
        if self.flavour is LLAMA_SERVER:
            return await self._llama_server(entries)
        if self.flavour is LM_STUDIO:
            return await self._lm_studio(entries)
        flavour = self.flavour
        return [
            Listed(describe(flavour, each.id, context=context_of(each)), each.id)
            for each in entries
        ]

    async def _listed(self) -> tuple[Reply, tuple[Entry, ...]]:
        reply = await self.ask(Question("/models"))
        if reply.status != 200:
            problem = read_problem(reply.body)
            said = problem.message if problem else f"it sent {reply.content_type}"
            raise NoList(
                f"it answers with status {reply.status}: {said} (a base URL usually "
                "ends in /v1)",
                reply.status,
            )
        try:
            models = msgspec.json.decode(reply.body, type=Models)
        except UNREADABLE as error:
            kind = reply.content_type or "that"
            raise NoList(f"it lists no models: {kind}: {error}", 200) from error
        entries = models.data or ()
        return reply, tuple(each for each in entries if offerable(each.id))

    async def _recognise(self, reply: Reply, entries: tuple[Entry, ...]) -> Flavour:
        owners = {str(each.owned_by) for each in entries}
        for owner, flavour in OWNERS.items():
            if owner in owners and flavour not in (OLLAMA, LM_STUDIO):
                return flavour
        if await self._own("/api/tags", Tags) is not None:
            return OLLAMA
        typed = await self._own("/api/v0/models", Models)
        if typed is not None and any(each.type for each in typed.data or ()):
            return LM_STUDIO
        # mlx_lm.server is Python's own server, and names no owners.
        if reply.server.startswith("BaseHTTP") and owners == {str(None)}:
            return MLX
        return UNKNOWN

    async def _own(
        self, path: str, type_: type[T], body: bytes | None = None
    ) -> T | None:
        """Ask for something of the server's own; None if it has no such thing."""
        reply = await self.ask(Question(path, body, own=True))
        if reply.status != 200:
            return None
        try:
            return msgspec.json.decode(reply.body, type=type_)
        except UNREADABLE:
            return None

    async def _ollama(self) -> list[Listed]:
        tags = await self._own("/api/tags", Tags)
        if tags is None:
            raise Unavailable("it has no list of models any more")
        # Its cloud models are listed too: they run elsewhere, at their user's cost.
        here = [each for each in tags.models or () if not each.remote_host]
        shown = {}
        for tag in here[:MODELS_MAX]:
            if not offerable(tag.name):
                continue
            key = f"{tag.name} {tag.digest}"
            shown[key] = self._shown.get(key) or await self._show(tag.name)
        self._shown = shown
        return [Listed(model, model.name) for model in shown.values()]

    async def _show(self, name: str) -> Model:
        body = msgspec.json.encode({"model": name})
        told: dict[str, Any] = await self._own("/api/show", dict, body) or {}
        can = told.get("capabilities")
        if not isinstance(can, list) or not can:
            return describe(OLLAMA, name)
        kinds = EMBEDDINGS if "embedding" in can and "completion" not in can else TEXT
        senses = {"vision": Feature.IMAGES, "audio": Feature.AUDIO}
        return describe(
            OLLAMA,
            name,
            kinds=kinds,
            lacks=() if "tools" in can else (Feature.TOOLS,),
            senses=[feature for sense, feature in senses.items() if sense in can],
            context=num_ctx(told.get("parameters")),
        )

    async def _llama_server(self, entries: tuple[Entry, ...]) -> list[Listed]:
        props = await self._own("/props", Props)
        if props is None or len(entries) != 1:
            # A router in front of several: each model is a server of its own.
            return [Listed(describe(LLAMA_SERVER, e.id), e.id) for e in entries]
        (entry,) = entries
        if 0 < props.total_slots <= SLOTS_MAX:
            self.slots = props.total_slots
        name = file_stem(entry.id)
        if self._embeds is None:
            body = msgspec.json.encode({"model": entry.id, "input": ["a"]})
            self._embeds = (await self.ask(Question("/embeddings", body))).status == 200
        kinds = kinds_by_name(name)
        if self._embeds and kinds != EMBEDDINGS:
            kinds |= EMBEDDINGS
        caps = props.chat_template_caps
        senses = {"vision": Feature.IMAGES, "audio": Feature.AUDIO}
        model = describe(
            LLAMA_SERVER,
            name,
            kinds=kinds,
            lacks=()
            if caps is None or caps.get("supports_tools")
            else (Feature.TOOLS,),
            senses=[f for sense, f in senses.items() if props.modalities.get(sense)],
            context=tokens_in(props.default_generation_settings.n_ctx),
        )
        return [Listed(model, entry.id)]

    async def _lm_studio(self, entries: tuple[Entry, ...]) -> list[Listed]:
        typed = await self._own("/api/v0/models", Models)
        if typed is None:
            return [Listed(describe(LM_STUDIO, e.id), e.id) for e in entries]
        models = []
        for each in typed.data or ():
            if not offerable(each.id):
                continue
            # Told only while the model is loaded; as it was, it is loaded again.
            if context := context_of(each):
                self._contexts[each.id] = context
            can = each.capabilities
            toolless = isinstance(can, list) and "tool_use" not in can
            model = describe(
                LM_STUDIO,
                each.id,
                kinds=EMBEDDINGS if each.type == "embeddings" else TEXT,
                lacks=(Feature.TOOLS,) if toolless else (),
                senses=(Feature.IMAGES,) if each.type == "vlm" else (),
                context=self._contexts.get(each.id, 0),
            )
            models.append(Listed(model, each.id))
        return models[:MODELS_MAX]


class NoList(Unavailable):
    """The server has no list of models where it should be."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
