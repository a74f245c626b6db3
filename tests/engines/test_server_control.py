"""Servers that load and unload models by orders, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.conftest import Fakes
from engines.model_servers import (
    GIB,
    KINDS,
    LmStudio,
    Ollama,
    Router,
    SleepingVllm,
    StandIn,
    serving,
)
from engines.outputs import ask
from engines.test_catalog import listing
from shoal.domain.errors import JobError, Unavailable
from shoal.domain.work import Chat
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.server_control import ServerControl

WITHOUT = [kind for kind in KINDS if kind is not SleepingVllm]
HI = ({"role": "user", "content": "hi"},)


@asynccontextmanager
async def controlled(
    stand_in: StandIn, *, on_order: bool = True
) -> AsyncIterator[tuple[OpenAIEngine, ServerControl]]:
    """Start an engine in front of a stand-in, which is asked for no absent model."""
    with serving(stand_in) as url:
        engine = OpenAIEngine(url, control=ServerControl if on_order else None)
        await engine.start()
        try:
            yield engine, engine.control or ServerControl(engine.query)
        finally:
            await engine.close()
    assert stand_in.misdirected == []


def offered(engine: OpenAIEngine) -> list[str]:
    return [model.name for model in engine.models]


def library(control: ServerControl) -> dict[str, Any]:
    return {each.name: each for each in control.library(lambda models: models)}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_is_loaded_and_unloaded_by_the_servers_api(
    kind: type[StandIn],
) -> None:
    server = kind("a")
    async with controlled(server) as (engine, control):
        assert offered(engine) == []
        assert list(library(control)) == ["a"]
        assert not control.is_loaded("a")

        await control.load("a", 0)
        await engine.refresh()

        assert offered(engine) == server.loaded == ["a"]
        assert control.is_loaded("a")
        assert (await ask(engine, Chat("a", HI))).text == "I am a"

        control.withdraw("a")
        assert offered(engine) == []
        with pytest.raises(Unavailable, match="being unloaded"):
            await ask(engine, Chat("a", HI))
        await control.wait_idle("a")
        await control.unload("a")
        await engine.refresh()
        control.restore("a")

        assert offered(engine) == server.loaded == []
        assert list(library(control)) == ["a"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_owner_did_not_allow_is_not_done(kind: type[StandIn]) -> None:
    server = kind("a", "b")
    async with controlled(server, on_order=False) as (engine, _):
        await engine.refresh()

        assert engine.control is None
        assert offered(engine) == ["a", "b"]
        assert server.orders == []
        if kind is SleepingVllm:
            server.misdirected.clear()  # it is tried how it continues, as if awake


@pytest.mark.parametrize("kind", WITHOUT)
async def test_models_that_others_load_are_offered(kind: type[StandIn]) -> None:
    server = kind("a", "b", loaded=("b",))
    async with controlled(server) as (engine, control):
        assert offered(engine) == ["b"]
        stays = {each.name: each.stays for each in library(control).values()}
        assert stays == {"a": False, "b": True}

        server.loaded[:] = ["a"]
        await engine.refresh()

        assert offered(engine) == ["a"]
        assert server.orders == []


@pytest.mark.parametrize(
    ("server", "size", "context"),
    [(Ollama("a"), 2 * GIB, 0), (LmStudio("a"), 2 * GIB, 32768), (Router("a"), 0, 0)],
)
async def test_the_library_says_what_the_server_knows(
    server: StandIn, size: int, context: int
) -> None:
    async with controlled(server) as (_, control):
        (model,) = library(control).values()

    assert (model.size, model.context) == (size, context)
    assert model.quantization == ("Q4_K_M" if size else "")
    assert model.engine in ("Ollama", "LM Studio", "llama-server")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_load_fails_with_the_servers_words(kind: type[StandIn]) -> None:
    server = kind("a")
    server.broken = "out of memory"
    said = "its process ended with status 1" if kind is Router else server.broken
    async with controlled(server) as (engine, control):
        with pytest.raises(JobError, match=said):
            await control.load("a", 0)
        await engine.refresh()

        assert offered(engine) == []


async def test_embedding_models_of_ollama_are_loaded_by_their_own_call() -> None:
    server = Ollama("some-embed:latest")
    async with controlled(server) as (engine, control):
        await control.load("some-embed", 8192)
        await engine.refresh()
        assert offered(engine) == ["some-embed:latest"]
        await control.unload("some-embed")

    assert server.orders == [
        ("/api/embed", {"model": "some-embed:latest", "input": []}),
        (
            "/api/generate",
            {"model": "some-embed:latest", "keep_alive": 0, "stream": False},
        ),
    ]


async def test_lm_studio_gets_the_context_and_all_copies_are_unloaded() -> None:
    server = LmStudio("a", loaded=("a", "a"))
    async with controlled(server) as (engine, control):
        await control.unload("a")
        await control.load("a", 8192)
        await engine.refresh()

        assert server.orders == [
            ("/api/v1/models/unload", {"instance_id": "a"}),
            ("/api/v1/models/unload", {"instance_id": "a:2"}),
            ("/api/v1/models/load", {"model": "a", "context_length": 8192}),
        ]


async def test_a_router_that_loads_a_model_already_is_not_told_again() -> None:
    server = Router("a")
    server.loading.append("a")
    async with controlled(server) as (_, control):
        await control.load("a", 0)

    assert server.orders == []


async def test_adapters_come_and_go_with_their_base() -> None:
    server = SleepingVllm("base", "adapter", loaded=("base", "adapter"))
    async with controlled(server) as (engine, control):
        assert offered(engine) == ["base", "adapter"]
        assert list(library(control)) == ["base"]

        running = control.begin("adapter")
        control.withdraw("base")
        assert offered(engine) == []
        waiting = asyncio.create_task(control.wait_idle("base"))
        await asyncio.sleep(0)
        assert not waiting.done()
        control.end(running)
        await waiting


async def test_a_server_that_falls_silent_offers_nothing_it_may_not_have(
    fake: Fakes,
) -> None:
    routes: dict[str, object] = {
        "GET /v1/models": listing("a", owned_by="vllm"),
        "GET /is_sleeping": {"is_sleeping": True},
    }
    engine = OpenAIEngine(await fake(routes), control=ServerControl)
    await engine.start()
    try:
        asleep = routes.pop("GET /is_sleeping")
        with pytest.raises(Unavailable, match="no longer says"):
            await engine.refresh()
        assert offered(engine) == []

        models = routes.pop("GET /v1/models")  # another version is started
        with pytest.raises(Unavailable):
            await engine.refresh()
        routes["GET /v1/models"] = models
        await engine.refresh()
        assert offered(engine) == ["a"]

        routes["GET /is_sleeping"] = asleep
        await engine.refresh()
        assert offered(engine) == []
    finally:
        await engine.close()


@pytest.mark.parametrize("owner", ["library", "organization_owner", "llamacpp", "vllm"])
async def test_a_server_without_such_an_api_offers_all_it_lists(
    fake: Fakes, owner: str
) -> None:
    routes = {
        "GET /v1/models": listing("a", "b", owned_by=owner),
        "GET /api/tags": {"models": [{"name": "a"}, {"name": "b"}]},
    }
    engine = OpenAIEngine(await fake(routes), control=ServerControl)
    await engine.start()
    try:
        assert offered(engine) == ["a", "b"]
        assert engine.control is not None
        assert engine.control.served == []
    finally:
        await engine.close()


ODD: tuple[object, ...] = (
    None,
    5,
    "x",
    [],
    {},
    {"name": 5},
    {"size": -1},
    True,
    1e300,
    "\n",
)


@pytest.mark.parametrize("odd", ODD)
async def test_odd_details_are_left_out(fake: Fakes, odd: object) -> None:
    """What only describes a model does not hide whether it is loaded."""
    ollama = {"name": "a", "size": odd, "details": odd}
    studio = {
        **{"key": "a", "size_bytes": odd, "max_context_length": odd},
        **{"quantization": odd, "loaded_instances": []},
    }
    router = {
        **{"id": "a", "meta": odd},
        "status": {"value": "unloaded", "args": odd, "failed": odd, "exit_code": odd},
    }
    for owner, routes in (
        ("library", {"GET /api/tags": [ollama], "GET /api/ps": []}),
        ("organization_owner", {"GET /api/v1/models": [studio]}),
    ):
        answers: dict[str, object] = {
            path: {"models": models} for path, models in routes.items()
        }
        answers["GET /v1/models"] = listing("a", owned_by=owner)
        answers["GET /api/v0/models"] = {"data": [{"id": "a", "type": "llm"}]}
        await _offers_nothing(await fake(answers))
    listed = {"data": [{**router, "owned_by": "llamacpp"}]}
    await _offers_nothing(await fake({"GET /v1/models": listed, "GET /models": listed}))


async def _offers_nothing(url: str) -> None:
    engine = OpenAIEngine(url, control=ServerControl)
    await engine.start()
    try:
        assert engine.control is not None
        assert list(library(engine.control)) == ["a"]
        assert offered(engine) == []
    finally:
        await engine.close()
