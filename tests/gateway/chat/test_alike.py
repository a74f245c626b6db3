"""What a chat promises holds in every dialect of clients."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from gateway.keys import make_key
from gateway.serving import KEY, Node, Pool, eventually
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.gateway.all_operations import OPERATIONS

pytestmark = pytest.mark.shared_pool

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
REQUIRED = {"tool_choice": "required"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A path, a body that asks for a stream or not, and where an error's text is."""

    path: str
    body: Mapping[str, Any]
    error: tuple[str, ...] = ("error", "message")
    tools: Mapping[str, Any] | None = None  # what offers the model a tool
    forced: Mapping[str, Any] | None = None  # what makes it call one

    def request(self, *, stream: bool = False) -> dict[str, Any]:
        # Without chance, so that any worker can repeat a lost answer; Ollama's name for
        # it is the second.
        settings = {"temperature": 0, "options": {"temperature": 0}}
        name = "options" if "ollama" in self.path else "temperature"
        return {**self.body, name: settings[name], "stream": stream}

    def error_in(self, answer: Any) -> str:
        for name in self.error:
            answer = answer[name]
        return str(answer)


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"model": "m1", "messages": HI},
        tools=CHAT_TOOLS,
        forced=REQUIRED,
    ),
    "responses": Dialect(
        "/v1/responses",
        {"model": "m1", "input": "hi"},
        tools={"tools": [{"type": "function", **TOOL}], "tool_choice": "auto"},
        forced=REQUIRED,
    ),
    "messages": Dialect(
        "/v1/messages",
        {"model": "m1", "messages": HI, "max_tokens": 9},
        tools={"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        forced={"tool_choice": {"type": "any"}},
    ),
    "ollama-chat": Dialect(
        "/ollama/api/chat",
        {"model": "m1", "messages": HI},
        ("error",),
        tools=CHAT_TOOLS,
    ),
    "ollama-generate": Dialect(
        "/ollama/api/generate",
        # Without it, the text is continued, which is no chat.
        {"model": "m1", "prompt": "hi", "system": "Be kind."},
        ("error",),
    ),
}


CONTINUED = "/v1/completions"  # a text, which is no chat
LOADED = "/ollama/api/pull"  # streams how a model is loaded


def test_each_operation_that_answers_chats_is_here() -> None:
    asked = {
        each.path
        for each in OPERATIONS
        if each.method == "POST"
        and each.streams
        and each.path not in (CONTINUED, LOADED)
    }

    assert asked == {each.path for each in DIALECTS.values()}


@asynccontextmanager
async def alone(pool: Pool) -> AsyncIterator[Node]:
    """Join within the block as the only node."""
    async with pool.node() as node:
        await pool.wait_joined()
        yield node
    await pool.wait_joined(0)


async def ask(
    pool: Pool,
    dialect: Dialect,
    *,
    stream: bool = False,
    key: str = KEY,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    async with pool.session.post(
        pool.url + dialect.path,
        json=dialect.request(stream=stream),
        headers={**pool.headers(key), **(headers or {})},
    ) as response:
        return response.status, response.headers, await response.read()


async def test_answer_names_its_job_which_is_explained(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        with subtests.test(name):
            async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello"))
                status, headers, body = await ask(pool, dialect)

            assert status == 200
            assert b"Hello" in body
            path = f"{pool.url}/admin/jobs/{headers['x-shoal-job']}/explain"
            async with pool.session.get(path, headers=pool.headers()) as response:
                assert response.status == 200


async def test_tools_that_no_worker_can_call_are_left_out(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        if dialect.tools is None:
            continue
        with subtests.test(name):
            asked = replace(dialect, body={**dialect.body, **dialect.tools})
            async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello"))
                status, headers, body = await ask(pool, asked)

            assert status == 200, body
            left_out = "tools: no worker with m1 calls functions"
            assert headers["x-shoal-left-out"] == left_out
            path = f"{pool.url}/admin/jobs/{headers['x-shoal-job']}/explain"
            async with pool.session.get(path, headers=pool.headers()) as response:
                lines = (await response.json())["lines"]
            assert any(line.endswith(f"left out: {left_out}") for line in lines)


async def test_tool_that_must_be_called_names_models_that_can(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        if dialect.forced is None:
            continue
        with subtests.test(name):
            fields = {**dialect.body, **(dialect.tools or {}), **dialect.forced}
            async with alone(pool):
                status, _, body = await ask(pool, replace(dialect, body=fields))

            assert status == 400
            assert "no worker has a model that does" in dialect.error_in(
                json.loads(body)
            )


async def test_repeated_request_attaches_to_its_job(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        with subtests.test(name):
            keyed = {"Idempotency-Key": name}
            async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello"))
                _, first, _ = await ask(pool, dialect, headers=keyed)
                _, again, body = await ask(pool, dialect, headers=keyed)

            assert first["x-shoal-job"] == again["x-shoal-job"]
            assert b"Hello" in body
            assert len(node.tasks) == 1


@pytest.mark.own_pool
async def test_usage_counts_for_the_key(pool: Pool, subtests: pytest.Subtests) -> None:
    for name, dialect in DIALECTS.items():
        with subtests.test(name):
            key = await make_key(pool, name=name)
            async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello"))
                await ask(pool, dialect, key=key)

            path = f"{pool.url}/admin/keys"
            async with pool.session.get(path, headers=pool.headers()) as response:
                listed = (await response.json())["data"]
            (shown,) = (each for each in listed if each["name"] == name)
            assert shown["requests"] == 1
            assert shown["completion_tokens"] > 0


async def test_limit_of_a_key_is_an_error_in_its_form(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        with subtests.test(name):
            key = await make_key(pool, name=name, requests_per_minute=1)
            async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                tasks.create_task(node.answer("Hello"))
                await ask(pool, dialect, key=key)
                status, headers, body = await ask(pool, dialect, key=key)

            assert status == 429
            assert int(headers["Retry-After"]) > 0
            assert "requests a minute" in dialect.error_in(json.loads(body))


async def test_client_that_leaves_frees_its_worker(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for (name, dialect), stream in product(DIALECTS.items(), (False, True)):
        with subtests.test(name, stream=stream):
            async with alone(pool) as node:
                asking = asyncio.create_task(ask(pool, dialect, stream=stream))
                task = await node.task()
                await node.write(task["id"], "He")

                asking.cancel()

                await node.wait_stopped(task["id"])
                await eventually(lambda: not pool.hub.pool.jobs)


async def test_an_answered_request_is_freed_at_once(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    # What is left to the garbage collector makes it run more often, for longer.
    def kept() -> int:
        return sum(type(each) is AnswerCursor for each in gc.get_objects())

    def most(number: int) -> bool:
        return kept() <= number

    gc.disable()
    try:
        for (name, dialect), stream in product(DIALECTS.items(), (False, True)):
            with subtests.test(name, stream=stream):
                gc.collect()
                before = kept()
                for _ in range(3):
                    async with alone(pool) as node, asyncio.TaskGroup() as tasks:
                        tasks.create_task(node.answer("Hello"))
                        await ask(pool, dialect, stream=stream)

                # The connection keeps its last request.
                await eventually(partial(most, before + 1))
    finally:
        gc.enable()


async def test_another_worker_takes_over_in_the_middle(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, dialect in DIALECTS.items():
        with subtests.test(name):
            status, body = await taken_over(pool, dialect)

            assert status == 200
            assert text_in(body) == "Hello"


async def taken_over(pool: Pool, dialect: Dialect) -> tuple[int, bytes]:
    """Return the answer that one worker begins, and another ends."""
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        asking = asyncio.create_task(ask(pool, dialect, stream=True))
        await eventually(lambda: bool(one.tasks or two.tasks))
        lost, heir = (one, two) if one.tasks else (two, one)
        await lost.write(lost.tasks[0]["id"], "He")
        await eventually(
            lambda: any(job.started for job in pool.hub.pool.jobs.values())
        )

        lost.abort()
        await heir.answer("He", "llo")
        status, _, body = await asking
    await pool.wait_joined(0)
    return status, body


def text_in(stream: bytes) -> str:
    """Return the text of a stream's deltas, in whichever dialect."""
    texts = []
    for line in stream.decode().splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        match event:
            case {"choices": [{"delta": {"content": str(text)}}]}:
                texts.append(text)
            case {"type": "response.output_text.delta", "delta": str(text)}:
                texts.append(text)
            case {"type": "content_block_delta", "delta": {"text": str(text)}}:
                texts.append(text)
            case {"done": False, "message": {"content": str(text)}}:
                texts.append(text)
            case {"done": False, "response": str(text)}:
                texts.append(text)
            case _:
                pass
    return "".join(texts)


async def test_unknown_model_is_an_error_in_its_form(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    async with alone(pool):
        for name, dialect in DIALECTS.items():
            unknown = replace(dialect, body={**dialect.body, "model": "m2"})
            status, _, body = await ask(pool, unknown)

            with subtests.test(name):
                assert status == 404
                assert "did you mean m1?" in dialect.error_in(json.loads(body))
