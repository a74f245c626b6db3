"""Detects servers and their models from recorded responses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from engines.conftest import Fakes
from engines.outputs import chat_of
from shoal.domain.errors import Unavailable
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import ServedModel
from shoal.engines.catalog import has_tools, read_model_list
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.server_kinds import (
    EMBEDDINGS,
    LLAMA_SERVER,
    LM_STUDIO,
    MLX,
    OLLAMA,
    SGLANG,
    TEXT,
    TRANSFORMERS,
    UNKNOWN,
    VLLM,
    ServerKind,
)

TOOLS, IMAGES = Feature.TOOLS, Feature.IMAGES


@pytest.mark.parametrize(
    "listed",
    [
        '[{"id": "a"}, {"id": "b"}]',  # Together's
        '{"models": [{"name": "a"}, {"id": "b", "name": "B"}]}',
        '{"data": ["a", "b"]}',
        '\ufeff{"data": [null, {}, 5, {"id": 7}, {"id": "a"}, {"id": "b", "n": NaN}]}',
        '{"data": [{"id": null, "name": "a"}, {"id": "c\\ud83d"}, {"id": "b"}]}',
    ],
)
def test_lists_of_other_forms_are_read(listed: str) -> None:
    assert [each.id for each in read_model_list(listed.encode())] == ["a", "b"]


@asynccontextmanager
async def engine_at(url: str, **options: Any) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine(url, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def listing(*names: str, **fields: object) -> dict[str, object]:
    entries = [{"id": name, "object": "model", **fields} for name in names]
    return {"object": "list", "data": entries}


def by_name(engine: OpenAIEngine) -> dict[str, ServedModel]:
    return {model.name: model for model in engine.models}


def shows(capabilities: dict[str, list[str]], **more: object) -> Any:
    """Ollama's ``/api/show``; counts in ``queried``."""
    queried: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["model"]
        queried.append(name)
        if name not in capabilities:
            return web.json_response({"error": "model not found"}, status=404)
        return web.json_response({"capabilities": capabilities[name], **more})

    return handle, queried


async def test_ollama_reports_model_capabilities(fake: Fakes) -> None:
    show, queried = shows(
        {
            "llama3.2:latest": ["completion", "tools"],
            "gemma3:4b": ["completion", "vision"],
            "some-vectors:latest": ["embedding"],
        },
        parameters='stop "<|eot|>"\nnum_ctx                        8192',
    )
    names = ["llama3.2:latest", "gemma3:4b", "some-vectors:latest", "old:latest"]
    tags = [{"name": name, "digest": name} for name in names]
    cloud = {"name": "big:cloud", "remote_host": "https://ollama.com:443"}
    routes = {
        "GET /v1/models": listing(*names, "big:cloud", owned_by="library"),
        "GET /api/tags": {"models": [*tags, cloud]},
        "POST /api/show": show,
    }

    async with engine_at(await fake(routes)) as engine:
        models = by_name(engine)
        assert engine.server_kind is OLLAMA
        assert engine.slots == OLLAMA.slots
        assert list(models) == names, "what runs elsewhere is left out"
        assert TOOLS in models["llama3.2:latest"].features
        assert IMAGES not in models["llama3.2:latest"].features
        assert TOOLS not in models["gemma3:4b"].features
        assert IMAGES in models["gemma3:4b"].features
        assert models["some-vectors:latest"].kinds == EMBEDDINGS
        assert models["old:latest"].kinds == TEXT
        assert models["llama3.2:latest"].context == 8192
        assert models["old:latest"].context == 0, "it depends on what nothing tells"

        queried.clear()
        routes["GET /api/tags"] = {"models": tags[:2]}
        await engine.refresh()

        assert list(by_name(engine)) == names[:2]
        assert queried == [], "a model is looked at once"


@pytest.mark.parametrize("tags", [{"models": 5}, None, "<html>"])
async def test_ollama_without_a_list_is_unavailable(fake: Fakes, tags: object) -> None:
    show, _ = shows({})
    routes: dict[str, object] = {
        "GET /v1/models": listing("a", owned_by="library"),
        "GET /api/tags": {"models": [{"name": "a"}]},
        "POST /api/show": show,
    }
    async with engine_at(await fake(routes)) as engine:
        routes["GET /api/tags"] = tags
        with pytest.raises(Unavailable, match="lists its models"):
            await engine.refresh()

        routes["GET /api/tags"] = {"models": None}
        await engine.refresh()

        assert engine.models == [], "it has removed them"


async def test_transformers_serve_is_recognised(fake: Fakes) -> None:
    async def models(request: web.Request) -> web.Response:
        listed = listing("/models/tiny", owned_by="models")
        return web.json_response(listed, headers={"Server": "uvicorn"})

    async def load(request: web.Request) -> web.Response:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)

    url = await fake({"GET /v1/models": models, "GET /load_model": load})

    async with engine_at(url) as engine:
        assert engine.server_kind is TRANSFORMERS
        assert not by_name(engine)["tiny"].features & {
            *(Feature.SCHEMA, Feature.LOGPROBS, Feature.FIELDS, Feature.OPTIONS)
        }


async def test_real_llama_server_reports_context_and_slots(server_url: str) -> None:
    async with engine_at(server_url) as engine:
        (model,) = engine.models

        assert engine.server_kind is LLAMA_SERVER
        assert engine.slots == 4
        assert model.context == 2048
        assert model.kinds == TEXT
        assert TOOLS not in model.features, "its template has no place for them"
        assert {Feature.SCHEMA, Feature.LOGPROBS, Feature.CHOICES} <= model.features
        assert IMAGES not in model.features


PROPS = {
    "default_generation_settings": {"n_ctx": 8192},
    "total_slots": 2,
    "modalities": {"vision": True, "audio": False},
    "chat_template_caps": {"supports_tools": True},
}


@pytest.mark.parametrize(
    ("caps", "tools"),
    [
        ({}, False),
        ({"supports_tools": True}, True),
        ({"supports_tools": True, "supports_tool_calls": True}, True),
        ({"supports_tools": True, "supports_tool_calls": False}, False),
        ({"supports_tools": False, "supports_tool_calls": True}, False),
    ],
)
def test_template_with_tools_shows_their_calls(
    caps: dict[str, bool], tools: bool
) -> None:
    assert has_tools(caps) is tools


async def test_llama_server_may_support_images_tools_and_embeddings(
    fake: Fakes,
) -> None:
    routes = {
        "GET /v1/models": listing("/home/me/Some VL.Q4.gguf", owned_by="llamacpp"),
        "GET /props": PROPS,
        "POST /v1/embeddings": {"data": []},
    }
    async with engine_at(await fake(routes)) as engine:
        (model,) = engine.models

        assert model.name == "Some VL.Q4"
        assert model.kinds == TEXT | EMBEDDINGS
        assert {TOOLS, IMAGES} <= model.features
        assert Feature.AUDIO not in model.features
        assert (model.context, engine.slots) == (8192, 2)


async def test_model_named_by_its_file_is_requested_by_it(
    fake: Fakes,
) -> None:
    queried: list[str] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        queried.append((await request.json())["model"])
        return web.json_response({"choices": [{"message": {"content": "hi"}}]})

    path = "C:\\models\\tiny.gguf"
    routes = {
        "GET /v1/models": listing(path, owned_by="llamacpp"),
        "GET /props": PROPS,
        "POST /v1/chat/completions": chat,
    }
    async with engine_at(await fake(routes)) as engine:
        assert list(by_name(engine)) == ["tiny"]
        async for _ in engine.run(chat_of("hello?")):
            pass

    assert {*queried} == {path}


async def test_given_slots_are_kept(fake: Fakes) -> None:
    routes = {"GET /v1/models": listing("a", owned_by="llamacpp"), "GET /props": PROPS}
    async with engine_at(await fake(routes), slots=7) as engine:
        assert engine.slots == 7


async def test_lm_studio_reports_types_and_loaded_contexts(fake: Fakes) -> None:
    def entry(id: str, type: str, **more: object) -> dict[str, object]:
        length = {"max_context_length": 131072, "state": "not-loaded"}
        return {"id": id, "object": "model", "type": type, **length, **more}

    loaded = {"state": "loaded", "loaded_context_length": 4096}
    entries = [
        entry("llama", "llm", capabilities=["tool_use"], **loaded),
        entry("seer", "vlm", capabilities=[]),
        entry("vectors", "embeddings"),
    ]
    routes = {
        "GET /v1/models": listing("llama", "seer", owned_by="organization_owner"),
        "GET /api/v0/models": {"object": "list", "data": entries},
        # LM Studio answers so to whatever it does not know, with status 200.
        "GET /api/tags": {"error": "Unexpected endpoint or method. (GET /api/tags)"},
    }
    async with engine_at(await fake(routes)) as engine:
        models = by_name(engine)
        assert engine.server_kind is LM_STUDIO
        assert TOOLS in models["llama"].features
        assert TOOLS not in models["seer"].features
        assert IMAGES in models["seer"].features
        assert models["vectors"].kinds == EMBEDDINGS
        assert models["llama"].context == 4096
        assert models["seer"].context == 0, "it is loaded with less than there could be"

        del entries[0]["loaded_context_length"]
        await engine.refresh()

        assert by_name(engine)["llama"].context == 4096, "as it will be again"


@pytest.mark.parametrize(
    ("owner", "flavour"),
    [("vllm", VLLM), ("sglang", SGLANG), ("someone", UNKNOWN), (5, UNKNOWN)],
)
async def test_other_servers_are_recognised_by_model_owner(
    fake: Fakes, owner: object, flavour: ServerKind
) -> None:
    models = listing(
        "Qwen/Qwen3-8B",
        "BAAI/bge-m3",
        "Qwen/Qwen2.5-VL-7B",
        owned_by=owner,
        max_model_len=4096,
    )
    async with engine_at(await fake({"GET /v1/models": models})) as engine:
        found = by_name(engine)

        assert engine.server_kind is flavour
        assert engine.slots == flavour.slots
        assert {model.context for model in engine.models} == {4096}
        assert found["Qwen/Qwen3-8B"].kinds == {JobKind.CHAT, JobKind.COMPLETION}
        assert IMAGES not in found["Qwen/Qwen3-8B"].features
        assert IMAGES in found["Qwen/Qwen2.5-VL-7B"].features
        assert found["BAAI/bge-m3"] == ServedModel(
            "BAAI/bge-m3", EMBEDDINGS, context=4096
        )


async def test_mlx_is_recognised_by_its_server_header(fake: Fakes) -> None:
    async def models(_: web.Request) -> web.StreamResponse:
        headers = {"Server": "BaseHTTP/0.6 Python/3.12.1"}
        return web.json_response(listing("mlx-community/x"), headers=headers)

    async with engine_at(await fake({"GET /v1/models": models})) as engine:
        assert engine.server_kind is MLX
        assert Feature.SCHEMA not in engine.models[0].features, "it ignores schemas"


@pytest.mark.parametrize(
    "lie", [-1, 0, True, 2**40, "many", None, [], {}, 1.5], ids=str
)
async def test_implausible_context_is_ignored(fake: Fakes, lie: object) -> None:
    models = listing("a", owned_by="vllm", max_model_len=lie)
    async with engine_at(await fake({"GET /v1/models": models})) as engine:
        assert engine.models[0].context == 0


async def test_model_named_by_an_absolute_path_is_offered_by_its_last_part(
    fake: Fakes,
) -> None:
    paths = ["/srv/models/qwen3/", "C:\\models\\phi", "/a/same", "/b/same", "org/name"]

    async with engine_at(await fake({"GET /v1/models": listing(*paths)})) as engine:
        assert list(by_name(engine)) == [
            "qwen3",
            "phi",
            "/a/same",
            "/b/same",
            "org/name",
        ]


async def test_names_that_no_wire_carries_are_omitted(fake: Fakes) -> None:
    models = listing("", "x" * 257, "m\x1b[2J", "good")
    async with engine_at(await fake({"GET /v1/models": models})) as engine:
        assert list(by_name(engine)) == ["good"]


async def test_another_server_at_the_same_url_is_recognised(fake: Fakes) -> None:
    routes: dict[str, object] = {"GET /v1/models": listing("a", owned_by="vllm")}
    async with engine_at(await fake(routes)) as engine:
        del routes["GET /v1/models"]
        with pytest.raises(Unavailable):
            await engine.refresh()

        routes["GET /v1/models"] = listing("a", owned_by="sglang")
        await engine.refresh()

        assert engine.server_kind is SGLANG
