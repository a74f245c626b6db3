"""The OpenAI API through OpenAI's client."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import (
    ClientResponse,
    ClientSession,
    HttpVersion,
    HttpVersion10,
    HttpVersion11,
)

from gateway.keys import client
from gateway.serving import Node, Pool, eventually, serving
from harness.slow_imports import openai as sdk
from shoal.domain.job import TimeLimits
from shoal.domain.moderation import Moderation

pytestmark = pytest.mark.shared_pool

HI: Any = [{"role": "user", "content": "hi"}]


async def test_models_are_those_of_connected_workers(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    assert [model.id async for model in openai.models.list()] == []

    async with pool.node(model="org/m2"), pool.node("n2"):
        await pool.wait_joined(2)

        assert [model.id async for model in openai.models.list()] == ["m1", "org/m2"]
        assert (await openai.models.retrieve("org/m2")).owned_by == "shoal"
        with pytest.raises(sdk.NotFoundError, match="no worker has the model m3"):
            await openai.models.retrieve("m3")


async def test_model_tells_what_its_workers_can_do(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node(), pool.node("n2", slots="2"):
        await pool.wait_joined(2)

        (listed,) = (await openai.models.list()).data

    assert listed.to_dict() == {
        "id": "m1",
        "object": "model",
        "created": 0,
        "owned_by": "shoal",
        "kinds": ["chat"],
        "features": [],
        "context_window": None,
        "workers": 2,
        "slots": 10,
        "alias_of": None,
        # What Anthropic's clients read.
        "type": "model",
        "display_name": "m1",
        "created_at": "1970-01-01T00:00:00Z",
        "state": "loaded",
    }


async def test_answer_is_returned(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo", " 日本"))

        answer = await openai.chat.completions.create(
            model="m1", messages=HI, max_tokens=7, temperature=0.5
        )

    (choice,) = answer.choices
    assert choice.message.content == "Hello 日本"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "m1"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == 4
    (task,) = node.tasks
    assert task["messages"] == HI
    assert task["max_new_tokens"] == 7
    assert task["temperature"] == 0.5


async def test_answer_is_streamed(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))

        stream = await openai.chat.completions.create(
            model="m1", messages=HI, stream=True
        )
        chunks = [chunk async for chunk in stream]

    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert [delta.content for delta in deltas] == ["", "Hel", "lo", None]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_requested_usage_is_the_last_chunk(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("four", "bytes"))

        stream = await openai.chat.completions.create(
            model="m1",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 1 + 3
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_empty_answer_is_valid(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer())

        stream = await openai.chat.completions.create(
            model="m1", messages=HI, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]

    assert [chunk.delta.role for chunk in chunks] == ["assistant", None]
    assert chunks[-1].finish_reason == "stop"


async def test_stream_matches_the_reference(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer('"\u2028\n'))
        text = await _streamed(pool)

    events = text.split("\n\n")
    assert len(events) == 5
    assert all(event.startswith("data: {") for event in events[:3])
    assert r'"delta":{"content":"\"\u2028\n"}' in events[1]
    assert events[3:] == ["data: [DONE]", ""]


async def test_a_wrong_key_is_an_authentication_error(pool: Pool) -> None:
    async with client(pool, "constructor") as stranger:
        with pytest.raises(sdk.AuthenticationError, match="shoal serve") as raised:
            await stranger.models.list()
        with pytest.raises(sdk.AuthenticationError):
            await stranger.chat.completions.create(model="m1", messages=HI)

    assert raised.value.code == "invalid_api_key"
    assert raised.value.response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("name", ["*", "*task", "*call"])
async def test_name_of_a_queue_is_no_model(
    pool: Pool, openai: "sdk.AsyncOpenAI", name: str
) -> None:
    async with pool.node():
        await pool.wait_joined()

        with pytest.raises(sdk.NotFoundError) as raised:
            await openai.chat.completions.create(model=name, messages=HI)

    assert raised.value.code == "model_not_found"


async def test_unknown_model_is_not_found_with_a_suggestion(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node(model="qwen3-8b"):
        await pool.wait_joined()

        with pytest.raises(sdk.NotFoundError, match="did you mean qwen3-8b") as raised:
            await openai.chat.completions.create(model="qwen3-8", messages=HI)

    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_a_rate_limit_error(tmp_path: Path, stream: bool) -> None:
    async with (
        serving(tmp_path, queue_max=1) as pool,
        client(pool) as openai,
        pool.node(slots="0"),
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        waiting = tasks.create_task(
            openai.chat.completions.create(model="m1", messages=HI)
        )
        await eventually(lambda: pool.hub.pool.queued == 1)

        with pytest.raises(sdk.RateLimitError, match="waiting already") as raised:
            await openai.chat.completions.create(model="m1", messages=HI, stream=stream)
        waiting.cancel()

    assert raised.value.code == "queue_full"
    assert int(raised.value.response.headers["retry-after"]) > 0
    assert "x-shoal-job" not in raised.value.response.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_expired_request_lists_the_reasons(tmp_path: Path, stream: bool) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(queue=0.05)) as pool,
        client(pool) as openai,
        pool.node(slots="0"),
        pool.node("n2", "m2"),
    ):
        await pool.wait_joined(2)

        with pytest.raises(sdk.InternalServerError, match="offers no slots") as raised:
            await openai.chat.completions.create(model="m1", messages=HI, stream=stream)

    assert raised.value.status_code == 503
    assert raised.value.code == "no_worker"
    assert "does not have m1 (1 worker)" in str(raised.value)
    assert int(raised.value.response.headers["retry-after"]) > 0


async def test_stop_strings_need_a_worker_with_the_feature(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(queue=0.05)) as pool,
        client(pool) as openai,
        pool.node(),
    ):
        await pool.wait_joined()

        with pytest.raises(sdk.BadRequestError, match="none of the workers") as raised:
            await openai.chat.completions.create(model="m1", messages=HI, stop="\n")

        assert (raised.value.param, raised.value.code) == ("stop", "unsupported_value")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"n": 0}, "n"),
    ],
)
async def test_a_bad_request_names_the_field(
    openai: "sdk.AsyncOpenAI", more: dict[str, Any], field: str
) -> None:
    arguments: dict[str, Any] = {"model": "m1", "messages": HI} | more

    with pytest.raises(sdk.BadRequestError) as raised:
        await openai.chat.completions.create(**arguments)

    assert raised.value.param == field
    assert field in raised.value.message


async def test_a_job_over_its_limit_is_a_server_error(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(first_output=0.05)) as pool,
        client(pool) as openai,
        pool.node() as node,
    ):
        await pool.wait_joined()

        with pytest.raises(sdk.InternalServerError, match="first output") as raised:
            await openai.chat.completions.create(model="m1", messages=HI)

        assert raised.value.status_code == 504
        await node.wait_stopped((await node.task())["id"])


async def test_an_error_after_text_is_an_event_without_done(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(silence=0.05)) as pool,
        pool.node() as node,
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        tasks.create_task(_write(node, "a"))
        text = await _streamed(pool)

    *_, last, rest = text.split("\n\n")
    assert '"content":"a"' in text
    assert last.startswith('data: {"error":{"message":"waiting for more output')
    assert '"code":"output_stalled"' in last
    assert rest == ""
    assert "[DONE]" not in text


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
async def test_pieces_that_outrun_their_client_arrive_in_order(
    pool: Pool, version: HttpVersion
) -> None:
    body = {"model": "m1", "messages": HI, "stream": True}
    texts = [f"{number}:{'x' * 65536};" for number in range(48)]
    url = f"{pool.url}/v1/chat/completions"
    async with (
        pool.node() as node,
        ClientSession(version=version) as session,
        asyncio.TaskGroup() as tasks,
    ):
        asking = tasks.create_task(session.post(url, json=body, headers=pool.headers()))
        task = await node.task()
        await node.write(task["id"], "begun;")
        response = await asking
        for text in texts:  # each alone, which nobody reads
            await node.write(task["id"], text)
        await node.end(task["id"])
        events = (await response.text()).split("\n\n")

    chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-2]]
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert "".join(each.get("content", "") for each in deltas) == "begun;" + "".join(
        texts
    )
    assert events[-2:] == ["data: [DONE]", ""]


async def test_long_wait_has_keepalive_comments(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.chat.job_answers.HEADERS_AFTER", 0.01)
    monkeypatch.setattr("shoal.gateway.http.responses.KEEPALIVE_EVERY", 0.01)
    body = {"model": "m1", "messages": HI, "stream": True}
    async with (
        pool.node() as node,
        pool.session.post(
            f"{pool.url}/v1/chat/completions", json=body, headers=pool.headers()
        ) as response,
    ):
        signs = [await response.content.readline() for _ in range(6)]
        await node.answer("a")
        text = await response.text()

    assert response.status == 200
    assert signs == [b": keep-alive\n", b"\n"] * 3
    assert '"content":"a"' in text
    assert text.count("assistant") == 1
    assert text.endswith("data: [DONE]\n\n")


async def test_stream_of_a_queued_job_says_how_many_are_ahead(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.chat.job_answers.HEADERS_AFTER", 0.01)
    monkeypatch.setattr("shoal.gateway.http.responses.KEEPALIVE_EVERY", 0.01)
    body = {"model": "m1", "messages": HI, "stream": True}

    async with AsyncExitStack() as stack:

        async def ask() -> ClientResponse:
            return await stack.enter_async_context(
                pool.session.post(
                    f"{pool.url}/v1/chat/completions", json=body, headers=pool.headers()
                )
            )

        node = await stack.enter_async_context(pool.node(slots="1"))
        first, second, third = await ask(), await ask(), await ask()
        for place, waiting in enumerate((second, third)):
            sign = f": waits for a worker, jobs ahead: {place}\n".encode()
            assert await waiting.content.readline() == sign
        assert await first.content.readline() == b": keep-alive\n"
        for number, each in enumerate((first, second, third)):
            await node.answer("a", number=number)
            assert (await each.text()).endswith("data: [DONE]\n\n")


@pytest.mark.own_pool
async def test_stream_that_lost_the_last_worker_says_what_it_waits_for(
    pool: Pool,
) -> None:
    body = {"model": "m1", "messages": HI, "stream": True, "temperature": 0}
    asking = pool.session.post(
        f"{pool.url}/v1/chat/completions", json=body, headers=pool.headers()
    )
    async with AsyncExitStack() as stack:
        async with pool.node() as node, asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(_write(node, "a"))
            response = await stack.enter_async_context(asking)
            await writing
        lines = [await response.content.readline() for _ in range(5)]
        async with pool.node() as node:
            await node.answer("a", "b")
            rest = await response.text()

    assert lines[-1] == (
        b": waits for a worker, no worker for m1: no worker is connected\n"
    ), lines
    assert '"content":"b"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_an_error_event_is_an_error_of_the_client(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(silence=0.05)) as pool,
        client(pool) as openai,
        pool.node() as node,
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        tasks.create_task(_write(node, "a"))
        stream = await openai.chat.completions.create(
            model="m1", messages=HI, stream=True
        )

        with pytest.raises(sdk.APIError, match="waiting for more output"):
            [chunk async for chunk in stream]


@pytest.mark.own_pool
async def test_cancelled_job_is_not_retryable(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    patient = openai.with_options(max_retries=2)
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(_refused(patient))
        await node.task()
        async with pool.session.delete(
            f"{pool.url}/admin/jobs/job1", headers=pool.headers()
        ) as response:
            assert response.status == 200

    assert asked.result().status_code == 499
    assert "cancelled by an operator" in asked.result().message
    assert len(node.tasks) == 1


async def test_moderation_rejects_prompts_and_cuts_answers(tmp_path: Path) -> None:
    bad: Any = [{"role": "user", "content": "BADWORD"}]
    async with (
        serving(tmp_path, moderation=Moderation("badword")) as pool,
        client(pool) as openai,
        pool.node() as node,
        asyncio.TaskGroup() as tasks,
    ):
        await pool.wait_joined()
        with pytest.raises(sdk.BadRequestError, match="moderation"):
            await openai.chat.completions.create(model="m1", messages=bad)
        tasks.create_task(node.answer("a badword"))
        whole = await openai.chat.completions.create(model="m1", messages=HI)
        fetched = await openai.get(f"/chat/completions/{whole.id}", cast_to=object)
        tasks.create_task(_write(node, "x" * 60, "badword" + "y" * 60, number=1))
        stream = await openai.chat.completions.create(
            model="m1", messages=HI, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        await node.wait_stopped(node.tasks[1]["id"])

    assert whole.choices[0].finish_reason == "content_filter"
    assert whole.choices[0].message.content == ""
    assert whole.to_dict()["choices"] == cast("Any", fetched)["choices"]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "x" * 60
    assert chunks[-1].finish_reason == "content_filter"


async def _write(node: Node, *texts: str, number: int = 0) -> None:
    task = await node.task(number)
    await node.write(task["id"], *texts)


async def _streamed(pool: Pool) -> str:
    body = {"model": "m1", "messages": HI, "stream": True}
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions", json=body, headers=pool.headers()
    ) as response:
        return await response.text()


async def _refused(openai: "sdk.AsyncOpenAI") -> "sdk.APIStatusError":
    with pytest.raises(sdk.APIStatusError) as raised:
        await openai.chat.completions.create(model="m1", messages=HI)
    return raised.value
