"""Anthropic's API over HTTP, from the request to the bytes of the answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from msgspec.structs import replace

from gateway.chat.anthropic.test_message_answer import events_in, read
from gateway.keys import make_key
from gateway.serving import KEY, WAIT_MAX, Pool, eventually, serving
from gateway.shoal_worker import shoal_worker
from shoal.domain.moderation import Moderation

pytestmark = pytest.mark.shared_pool

BODY: dict[str, Any] = {
    "model": "m1",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "hi"}],
}


async def post(
    pool: Pool,
    path: str = "/v1/messages",
    key: str = KEY,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> tuple[ClientResponse, bytes]:
    async with pool.session.post(
        pool.url + path,
        json={**BODY, **fields},
        headers={
            "x-api-key": key,
            "anthropic-version": "2023-06-01",
            **(headers or {}),
        },
    ) as response:
        return response, await response.read()


def message_in(data: bytes) -> dict[str, Any]:
    return read(events_in(data))


def text_in(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"])


async def test_answer_is_a_message(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))
        response, data = await post(
            pool,
            "/v1/messages?beta=true",
            headers={"anthropic-beta": "a-2025-01-01,b-2026-01-01"},
        )

    message = json.loads(data)
    assert response.status == 200
    assert text_in(message) == "Hello"
    assert message["id"] == f"msg_{response.headers['x-shoal-job']}"
    assert message["usage"]["output_tokens"] == 2
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert node.tasks[0]["max_new_tokens"] == 64


async def test_answer_is_streamed(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))
        response, data = await post(pool, stream=True)

    assert response.content_type == "text/event-stream"
    assert text_in(message_in(data)) == "Hello"


async def test_an_answer_that_breaks_off_ends_with_an_error(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(post(pool, stream=True))
        task = await node.task()
        await node.write(task["id"], "Hel")
        await eventually(
            lambda: any(job.started for job in pool.hub.pool.jobs.values())
        )
        (job_id,) = pool.hub.pool.jobs
        pool.hub.cancel(job_id, "by an operator")
        response, data = await asking

    *_, last = events_in(data)
    assert response.status == 200
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "by an operator"}


async def test_a_client_that_leaves_frees_its_worker(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(post(pool, stream=True))
        task = await node.task()
        await node.write(task["id"], "a")

        asking.cancel()

        await node.wait_stopped(task["id"])
        await eventually(lambda: not pool.hub.pool.jobs)


async def test_hidden_reasoning_does_not_silence_a_stream(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.http.responses.WRITE_TIMEOUT", 0.02)
    monkeypatch.setattr("shoal.gateway.http.responses.KEEPALIVE_EVERY", 0.03)

    async def think() -> None:
        job = await worker.job()
        async with asyncio.timeout(WAIT_MAX):
            while not pinged.is_set():
                worker.delta(job, fields={"reasoning_content": "hm"})
                # Not faster than the coordinator reads.
                async with pool.session.get(f"{pool.url}/healthz"):
                    pass
        worker.write(job, "Hello")
        worker.end(job)

    pinged = asyncio.Event()
    data = b""
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(think())
        async with pool.session.post(
            f"{pool.url}/v1/messages",
            json={**BODY, "stream": True},
            headers=pool.headers(),
        ) as response:
            async for part in response.content.iter_any():
                data += part
                if data.count(b"event: ping") > 1:
                    pinged.set()

    assert text_in(message_in(data)) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_answer_is_a_refusal(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, moderation=Moderation("nuclear")) as pool:
        async with pool.node() as node, asyncio.TaskGroup() as tasks:
            await pool.wait_joined()
            tasks.create_task(node.answer("the nuclear", " codes"))
            _, data = await post(pool, stream=stream)
        message = message_in(data) if stream else json.loads(data)
        assert message["stop_reason"] == "refusal"

        response, data = await post(pool, system="nuclear")
        assert response.status == 400
        assert b"the messages match" in data


async def test_errors_have_anthropics_form(pool: Pool) -> None:
    reader = await make_key(pool, "reader", scope="read")
    rows: list[tuple[dict[str, Any], str, int, str]] = [
        ({"messages": []}, KEY, 400, "invalid_request_error"),
        ({"model": "m3"}, KEY, 404, "not_found_error"),
        ({}, "sk-wrong", 401, "authentication_error"),
        ({}, reader, 403, "permission_error"),
    ]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for fields, key, status, kind in rows:
            response, data = await post(pool, path, key, **fields)

            error = json.loads(data)
            assert response.status == status
            assert (error["type"], error["error"]["type"]) == ("error", kind)
            assert error["request_id"] == response.headers["x-request-id"]

    for path, status in (("/v1/messages", 405), ("/v1/messages/batches", 404)):
        async with pool.session.get(pool.url + path) as got:
            assert got.status == status
            assert (await got.json())["type"] == "error"


async def test_two_keys_in_one_request_are_refused(pool: Pool) -> None:
    response, data = await post(pool, headers={"Authorization": "Bearer other"})

    assert response.status == 401
    assert b"different keys" in data


async def test_repeated_request_gets_the_same_answer(pool: Pool) -> None:
    again = {"Idempotency-Key": "k1"}
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("a"))
        _, first = await post(pool, headers=again)
        _, second = await post(pool, headers=again)

    assert first == second
    assert len(node.tasks) == 1
    # The id of a message is that of its job, too.
    path = f"{pool.url}/admin/jobs/{json.loads(first)['id']}/explain"
    async with pool.session.get(path, headers=pool.headers()) as got:
        assert got.status == 200


async def test_tokens_are_counted(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        response, data = await post(
            pool, "/v1/messages/count_tokens?beta=true", system="x" * 400
        )

    assert response.status == 200
    assert json.loads(data) == {"input_tokens": 101}


async def test_tokens_of_a_model_of_other_keys_are_not_counted(pool: Pool) -> None:
    other = await make_key(pool, "other")
    async with pool.node():
        await pool.wait_joined()
        (worker,) = pool.hub.pool.workers.values()
        worker.offer = replace(worker.offer, only_for=frozenset({"ada"}))

        response, data = await post(pool, "/v1/messages/count_tokens", other)

    assert response.status == 403
    assert b"work for other keys only" in data
