"""Anthropic's own client against a running coordinator."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import make_key
from gateway.serving import KEY, Pool, eventually, serving
from gateway.shoal_worker import offer, shoal_worker
from harness.slow_imports import anthropic as sdk
from shoal.domain.job import TimeLimits
from shoal.domain.work import JobKind

pytestmark = pytest.mark.long

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather at a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
}


def connect(pool: Pool, key: str = KEY) -> "sdk.AsyncAnthropic":
    return sdk.AsyncAnthropic(base_url=pool.url, api_key=key, max_retries=0)


@pytest.fixture
async def client(pool: Pool) -> "AsyncIterator[sdk.AsyncAnthropic]":
    async with connect(pool) as each:
        yield each


async def test_answer_is_returned(pool: Pool, client: "sdk.AsyncAnthropic") -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("Hel", "lo"))
        message = await client.messages.create(
            model="m1", max_tokens=7, system="Be brief.", messages=HI
        )

    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Hello"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 2
    assert message._request_id is not None
    assert worker.work().messages[0]["content"] == "Be brief."


async def test_answer_is_streamed_with_its_reasoning(
    pool: Pool, client: "sdk.AsyncAnthropic"
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:

        async def answer() -> None:
            job = await worker.job()
            worker.delta(job, fields={"reasoning_content": "Greet."})
            worker.write(job, "Hel", "lo")
            worker.end(job)

        tasks.create_task(answer())
        async with client.messages.stream(
            model="m1",
            max_tokens=2048,
            messages=HI,
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()

    assert "".join(texts) == "Hello"
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Greet."
    assert text.type == "text"
    kwargs = worker.work().options["chat_template_kwargs"]
    assert kwargs == {"enable_thinking": True}


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called_and_their_results_read(
    pool: Pool, client: "sdk.AsyncAnthropic", streamed: bool
) -> None:
    async def call_the_tool() -> None:
        job = await worker.job()
        function = {"name": "weather", "arguments": '{"city":'}
        first = {"index": 0, "id": "c1", "function": function}
        rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
        worker.write(job, "Let me look.")
        worker.delta(job, fields={"tool_calls": [first]})
        worker.delta(job, fields={"tool_calls": [rest]})
        worker.end(job, "tool_calls")

    async def ask(messages: Any) -> Any:
        fields: Any = {"model": "m1", "max_tokens": 64, "tools": [TOOL]}
        if not streamed:
            return await client.messages.create(messages=messages, **fields)
        async with client.messages.stream(messages=messages, **fields) as stream:
            return await stream.get_final_message()

    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(call_the_tool())
        message = await ask(HI)
        assert message.stop_reason == "tool_use"
        said, call = message.content
        assert (call.name, call.input) == ("weather", {"city": "Rome"})

        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        tasks.create_task(worker.answer("Take an umbrella.", number=1))
        message = await ask(
            [
                *HI,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
        )

    assert message.content[0].text == "Take an umbrella."
    assert [*worker.work(1).messages] == [
        *HI,
        {
            "role": "assistant",
            "content": said.text,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                }
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]


async def test_images_go_to_a_worker_with_vision(
    pool: Pool, client: "sdk.AsyncAnthropic"
) -> None:
    look: Any = {"type": "text", "text": "What is it?"}
    messages: Any = [{"role": "user", "content": [look, IMAGE]}]
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("a cat"))
        await client.messages.create(model="m1", max_tokens=9, messages=messages)

    url = {"url": "data:image/png;base64,AA=="}
    assert worker.work(0).messages[0]["content"] == [
        look,
        {"type": "image_url", "image_url": url},
    ]
    async with shoal_worker(pool, offer(JobKind.CHAT), name="blind"):
        with pytest.raises(sdk.BadRequestError, match="images"):
            await client.messages.create(model="m1", max_tokens=9, messages=messages)


async def test_beta_requests_are_answered(
    pool: Pool, client: "sdk.AsyncAnthropic"
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer('{"a":1}'))
        message = await client.beta.messages.create(
            model="m1",
            max_tokens=64,
            messages=HI,
            betas=["context-management-2025-06-27", "unknown-2030-01-01"],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            output_config={
                "effort": "low",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
        )
        counted = await client.beta.messages.count_tokens(model="m1", messages=HI)

    assert message.stop_reason == "end_turn"
    assert counted.input_tokens == 1
    options = worker.work(0).options
    assert options["reasoning_effort"] == "low"
    assert options["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_models_are_listed(pool: Pool, client: "sdk.AsyncAnthropic") -> None:
    async with pool.node(), pool.node("n2", model="org/m2"):
        await pool.wait_joined(2)

        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == ["m1", "org/m2"]
        assert [model.display_name for model in listed] == ["m1", "org/m2"]
        assert listed[0].created_at.year >= 1970
        assert (await client.models.retrieve("org/m2")).id == "org/m2"


async def test_errors_are_the_clients_exceptions(pool: Pool) -> None:
    ask: Any = {"model": "m1", "max_tokens": 5, "messages": HI}
    limited = await make_key(pool, "limited", requests_per_minute=1)
    reader = await make_key(pool, "reader", scope="read")
    async with pool.node() as node:
        await pool.wait_joined()
        async with connect(pool, limited) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(node.answer("a"))
            await client.messages.create(**ask)
            with pytest.raises(sdk.RateLimitError):
                await client.messages.create(**ask)
        for key, changes, error in (
            ("sk-wrong", {}, sdk.AuthenticationError),
            (reader, {}, sdk.PermissionDeniedError),
            (KEY, {"model": "m3"}, sdk.NotFoundError),
            (KEY, {"max_tokens": 0}, sdk.BadRequestError),
        ):
            async with connect(pool, key) as client:
                with pytest.raises(error) as caught:
                    await client.messages.create(**(ask | changes))
                assert isinstance(caught.value.body, dict)
                assert caught.value.body["type"] == "error"


async def test_a_job_without_a_worker_is_a_server_error(tmp_path: Path) -> None:
    ask: Any = {"model": "m1", "max_tokens": 5, "messages": HI}
    async with (
        serving(tmp_path, limits=TimeLimits(queue=0.2)) as pool,
        pool.node(slots="1") as node,
        connect(pool) as client,
    ):
        await pool.wait_joined()
        first = asyncio.create_task(client.messages.create(**ask))
        await node.task()
        with pytest.raises(sdk.InternalServerError) as caught:
            await client.messages.create(**ask)
        await node.answer("a")
        await first

    assert caught.value.status_code == 503
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


async def test_an_answer_that_breaks_off_is_an_error(
    pool: Pool, client: "sdk.AsyncAnthropic"
) -> None:
    async def cancel() -> None:
        task = await node.task()
        await node.write(task["id"], "Hel")
        await eventually(
            lambda: any(job.started for job in pool.hub.pool.jobs.values())
        )
        (job_id,) = pool.hub.pool.jobs
        pool.hub.cancel(job_id, "by an operator")

    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(cancel())
        with pytest.raises(sdk.APIStatusError, match="api_error"):
            async with client.messages.stream(
                model="m1", max_tokens=5, messages=HI
            ) as stream:
                await stream.get_final_message()
