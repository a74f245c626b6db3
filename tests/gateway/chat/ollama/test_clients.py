"""Ollama's own client against a coordinator: what its programs get to see."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.chat.openai.test_embeddings import ENCODED, VECTOR
from gateway.serving import TOKEN, Pool
from gateway.shoal_worker import ShoalWorker, shoal_worker
from harness.slow_imports import ollama
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.domain.outcome import Usage

pytestmark = pytest.mark.long

CAPABILITIES = ["completion", "embedding", "tools", "vision", "audio"]
HI = [{"role": "user", "content": "hi"}]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


def weather(place: str) -> str:
    """Say what the weather is like.

    Args:
        place: where
    """
    return f"rain in {place}"


@asynccontextmanager
async def served(
    folder: Path, *, keyless: bool = False
) -> AsyncIterator[tuple[ShoalWorker, str, str]]:
    """Run a coordinator with a scripted node; give the node, the URL, and the key."""
    config = ServeConfig(
        port=0,
        join_token=TOKEN,
        data_dir=folder,
        drain=0.0,
        no_discovery=True,
        ollama_port=0,
        ollama_open=keyless,
    )
    async with (
        run_coordinator(config, {}) as running,
        ClientSession() as session,
        shoal_worker(Pool(running.url, running.hub, session)) as node,
    ):
        yield node, f"http://127.0.0.1:{running.ollama_port}", running.api_key


@asynccontextmanager
async def connected(
    folder: Path,
) -> "AsyncIterator[tuple[ShoalWorker, ollama.AsyncClient]]":
    """Run a coordinator with a scripted node, and connect Ollama's client to it."""
    async with served(folder) as (node, url, key):
        headers = {"Authorization": f"Bearer {key}"}
        async with ollama.AsyncClient(url, headers=headers) as client:
            yield node, client


async def deltas(node: ShoalWorker, number: int, *fields: Any) -> None:
    """Answer a task with pieces."""
    job = await node.job(number)
    for each in fields:
        node.delta(job, fields=each)
    node.end(job, usage=Usage(5, 2))


async def test_chats_and_prompts_are_answered_streamed_or_not(tmp_path: Path) -> None:
    async with connected(tmp_path) as (node, client), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(node.answer("Hel", "lo", number=number))
        chat = await client.chat("m1", HI, options={"temperature": 0})
        chunks = [each async for each in await client.chat("m1", HI, stream=True)]
        text = await client.generate("m1", "hi", system="be brief")
        pieces = [each async for each in await client.generate("m1", "hi", stream=True)]

    assert chat.message.content == text.response == "Hello"
    assert "".join(each.message.content or "" for each in chunks) == "Hello"
    assert "".join(each.response or "" for each in pieces) == "Hello"
    assert (chunks[-1].done, chunks[-1].done_reason) == (True, "stop")
    for last in (chat, chunks[-1], text, pieces[-1]):
        assert last.eval_count
        assert last.eval_duration
        assert last.total_duration
    system = {"role": "system", "content": "be brief"}
    assert node.work(2).messages[0] == system


async def test_a_function_is_called_and_its_result_read(tmp_path: Path) -> None:
    called = {
        "index": 0,
        "id": "c0",
        "function": {"name": "weather", "arguments": '{"place":"Kiel"}'},
    }
    messages: list[Any] = [*HI]
    async with connected(tmp_path) as (node, client), asyncio.TaskGroup() as tasks:
        tasks.create_task(deltas(node, 0, {"tool_calls": [called]}))
        asked = await client.chat("m1", messages, tools=[weather])
        (call,) = asked.message.tool_calls or ()
        messages.append(asked.message)
        result = weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": "weather", "content": result})
        tasks.create_task(node.answer("Take a coat", number=1))
        answered = await client.chat("m1", messages, tools=[weather], stream=True)
        texts = [each.message.content or "" async for each in answered]

    assert "".join(texts) == "Take a coat"
    (tool,) = node.work().options["tools"]
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["required"] == ["place"]
    call_message, result_message = node.work(1).messages[1:]
    assert result_message["content"] == "rain in Kiel"
    assert result_message["tool_call_id"] == call_message["tool_calls"][0]["id"]


async def test_images_thinking_and_schemas_are_passed_on(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    async with connected(tmp_path) as (node, client), asyncio.TaskGroup() as tasks:
        answer = ({"reasoning_content": "hm"}, {"content": '{"age":2}'})
        tasks.create_task(deltas(node, 0, *answer))
        shown = await client.chat(
            "m1",
            [{"role": "user", "content": "how old?", "images": [PNG]}],
            format=schema,
            think=True,
        )

    assert (shown.message.thinking, shown.message.content) == ("hm", '{"age":2}')
    assert (shown.prompt_eval_count, shown.eval_count) == (5, 2)
    work = node.work()
    image = work.messages[0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(image.removeprefix("data:image/png;base64,")) == PNG
    options = work.options
    assert options["response_format"]["json_schema"]["schema"] == schema
    assert options["chat_template_kwargs"] == {"enable_thinking": True}


async def test_texts_are_embedded(tmp_path: Path) -> None:
    async with connected(tmp_path) as (node, client), asyncio.TaskGroup() as tasks:
        for number in range(2):
            tasks.create_task(deltas(node, number, {"embedding": ENCODED}))
        several = await client.embed("m1", ["herring"])
        one = await client.embeddings("m1", "herring")

    assert [list(each) for each in several.embeddings] == [list(VECTOR)]
    assert list(one.embedding) == list(VECTOR)


async def test_models_are_listed_shown_and_pulled(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, client):
        listed = (await client.list()).models
        running = (await client.ps()).models
        shown = await client.show("m1")
        pulled = await client.pull("m1")
        steps = [each.status async for each in await client.pull("m1", stream=True)]
        with pytest.raises(
            ollama.ResponseError, match="shoal models get m2"
        ) as missing:
            await client.pull("m2")
        with pytest.raises(ollama.ResponseError, match="cannot be managed"):
            await client.delete("m1")

    assert [each.model for each in listed] == [each.model for each in running] == ["m1"]
    assert listed[0].modified_at is not None
    assert running[0].context_length == 4096
    assert shown.capabilities == CAPABILITIES
    assert shown.modelinfo is not None
    assert shown.modelinfo["shoal.context_length"] == 4096
    assert pulled.status == steps[-1] == "success"
    assert missing.value.status_code == 404


async def names(url: str) -> list[str | None]:
    """Return the names of the models that a client without settings sees."""
    async with ollama.AsyncClient(url) as client:
        return [each.model for each in (await client.list()).models]


async def test_key_may_come_from_the_environment_or_be_needless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path / "keyed") as (_, url, key):
        with pytest.raises(ollama.ResponseError, match="--ollama-open") as refused:
            await names(url)
        monkeypatch.setenv("OLLAMA_API_KEY", key)
        listed = await names(url)
    monkeypatch.delenv("OLLAMA_API_KEY")
    async with served(tmp_path / "open", keyless=True) as (_, url, _):
        keyless = await names(url)

    assert refused.value.status_code == 401
    assert listed == keyless == ["m1"]


async def test_client_that_forgets_the_prefix_gets_the_address(tmp_path: Path) -> None:
    config = ServeConfig(port=0, data_dir=tmp_path, drain=0.0, no_discovery=True)
    async with (
        run_coordinator(config) as running,
        ollama.AsyncClient(running.url) as client,
    ):
        with pytest.raises(ollama.ResponseError, match="/ollama") as refused:
            await client.chat("m1", HI)

    assert refused.value.status_code == 404
