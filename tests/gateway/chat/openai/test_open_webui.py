"""Requests as Open WebUI sends them to an OpenAI connection.

Source: its ``backend/open_webui``, ``routers/openai.py`` and ``utils/payload.py``.  It
uses no client of OpenAI's, sends options of its own, and reads a stream's lines itself.
"""

import asyncio
import json
from typing import Any

import pytest

from gateway.serving import Pool
from gateway.shoal_worker import shoal_worker

pytestmark = pytest.mark.shared_pool

WHO = {
    "X-OpenWebUI-User-Name": "Ann Lee",
    "X-OpenWebUI-User-Id": "6a1c",
    "X-OpenWebUI-User-Email": "ann@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "b7d0",
}
SAID: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "And you?"}]},
]
CHAT: dict[str, Any] = {
    "model": "m1",
    "messages": SAID,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "repeat_penalty": 1.1,
    "max_tokens": 128,
    "num_ctx": 4096,
    "user": {"name": "Ann Lee", "id": "6a1c", "email": "ann@example.com"},
}


async def test_open_webui_lists_models(pool: Pool) -> None:
    headers = pool.headers() | WHO
    async with pool.node():
        await pool.wait_joined()

        async with pool.session.get(f"{pool.url}/v1/models", headers=headers) as answer:
            listed = await answer.json()

    assert [model["id"] for model in listed["data"]] == ["m1"]


async def test_open_webui_streams_a_chat(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Fi", "ne."))

        async with pool.session.post(
            f"{pool.url}/v1/chat/completions",
            data=json.dumps(CHAT),
            headers=pool.headers() | WHO | {"Content-Type": "application/json"},
        ) as answer:
            type_ = answer.headers["Content-Type"]
            lines = [line.decode().strip() async for line in answer.content]

    assert "text/event-stream" in type_
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    texts = [
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert "".join(texts) == "Fine."
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    (task,) = node.tasks
    assert task["system"] == "Be brief."
    assert [message["content"] for message in task["messages"]] == [
        "hi",
        "Hello.",
        "And you?",
    ]
    assert task["max_new_tokens"] == 128


async def test_open_webui_requests_a_title(pool: Pool) -> None:
    asked = {
        "model": "m1",
        "messages": [{"role": "user", "content": "### Task:\nName this chat."}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer('{"title": "Greetings"}'))

        async with pool.session.post(
            f"{pool.url}/v1/chat/completions", json=asked, headers=pool.headers() | WHO
        ) as answer:
            whole = await answer.json()

    content = whole["choices"][0]["message"]["content"]
    assert json.loads(content) == {"title": "Greetings"}


async def test_open_webui_can_show_an_error(pool: Pool) -> None:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions",
        json=CHAT | {"model": "gone"},
        headers=pool.headers() | WHO,
    ) as answer:
        problem = await answer.json()

    assert answer.status == 404
    assert "no worker has the model gone" in problem["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "6a1c", "chat_id": "b7d0", "files": [], "tools": {}}},
        {"files": [{"type": "file", "id": "f1"}], "features": {"web_search": False}},
        {"chat_id": "b7d0", "session_id": "s1", "id": "m1", "background_tasks": {}},
        {"seed": 7, "stop": ["###", "User:"], "frequency_penalty": 0.5},
        {
            "presence_penalty": -0.5,
            "logit_bias": {"413": 100},
            "reasoning_effort": "low",
        },
        {"mirostat": 1, "mirostat_eta": 0.1, "tfs_z": 1, "num_ctx": 8192, "num_gpu": 1},
        {"keep_alive": "5m", "think": True, "format": "json", "use_mmap": True},
        {"user": "6a1c", "options": {"num_keep": 4}, "function_calling": "native"},
        {"max_tokens": None, "temperature": None, "stop": None, "tools": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_open_webui_fields_are_accepted(
    pool: Pool, fields: dict[str, Any]
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("Fine."))

        async with pool.session.post(
            f"{pool.url}/v1/chat/completions",
            json=CHAT | fields,
            headers=pool.headers() | WHO,
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert len(worker.jobs) == 1
    for name in fields.keys() & {"mirostat", "think"}:  # which an engine may know
        assert worker.work().options[name] == fields[name]


async def test_open_webui_tools_and_images_round_trip(pool: Pool) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    # It sends back what it read from the stream, index and all.
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "look_up", "arguments": "{}"},
    }
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Who?"}, picture]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Ann"},
    ]
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            _lines(pool, CHAT | {"messages": said, "tools": [tool]})
        )
        job = await worker.job()
        worker.delta(job, fields={"tool_calls": [call]})
        worker.end(job, "tool_calls")
        events = await asking

    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert [each["tool_calls"] for each in deltas if "tool_calls" in each] == [[call]]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    given = worker.work()
    assert given.options["tools"] == [tool]
    assert picture in given.messages[0]["content"]
    assert given.messages[2] == said[2]


async def _lines(pool: Pool, asked: dict[str, Any]) -> list[dict[str, Any]]:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions", json=asked, headers=pool.headers() | WHO
    ) as answer:
        text = await answer.text()
    *events, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]
