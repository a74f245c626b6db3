"""Aliases of models, as operators set them and clients use them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from gateway.keys import make_key
from gateway.serving import KEY, Pool, serving
from gateway.shoal_worker import offer, shoal_worker
from shoal.domain.work import JobKind

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[False, True], ids=["hub", "front"])
async def pool(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    async with serving(tmp_path, front=request.param) as pool:
        yield pool


async def call(
    pool: Pool, method: str, path: str, body: Any = None, key: str = KEY, **more: str
) -> tuple[int, Any, Any]:
    headers = pool.headers(key) | more
    async with pool.session.request(
        method, pool.url + path, json=body, headers=headers
    ) as answer:
        return answer.status, await answer.json(content_type=None), answer.headers


async def set_alias(pool: Pool, name: str, *models: str) -> Any:
    path = f"/admin/aliases/{name}"
    status, answer, _ = await call(pool, "PUT", path, {"models": models})
    assert status == 200, answer
    return answer


DIALECTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": HI}, "m1"),
    "/v1/responses": ({"input": "hi"}, "m1"),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, "m1"),
    # Ollama's answers repeat the name of the request.
    "/ollama/api/chat": ({"messages": HI, "stream": False}, "gpt-4o-mini"),
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_alias_is_answered_by_its_model(pool: Pool, path: str) -> None:
    await set_alias(pool, "gpt-4o-mini", "absent", "m1")
    body, named = DIALECTS[path]
    async with pool.node() as node:
        await pool.wait_joined()
        answering = asyncio.create_task(node.answer("hello"))

        status, answer, headers = await call(
            pool, "POST", path, {"model": "gpt-4o-mini", **body}
        )

        await answering
    assert status == 200, answer
    assert answer["model"] == named
    assert headers["x-shoal-model"] == "m1"
    job = f"/admin/jobs/{headers['x-shoal-job']}"
    assert (await call(pool, "GET", job))[1]["model"] == "m1"
    _, history, _ = await call(pool, "GET", f"{job}/explain")
    assert "for m1, requested as gpt-4o-mini" in history["lines"][0]


async def test_stream_names_the_model_of_a_pattern(pool: Pool) -> None:
    await set_alias(pool, "claude-*", "m1")
    body = {"model": "claude-x", "max_tokens": 9, "messages": HI, "stream": True}
    async with pool.node() as node:
        await pool.wait_joined()
        answering = asyncio.create_task(node.answer("hello"))
        url = f"{pool.url}/v1/messages"
        async with pool.session.post(url, json=body, headers=pool.headers()) as answer:
            text = await answer.text()
        await answering

    assert '"model":"m1"' in text
    assert "claude-x" not in text


async def test_model_of_the_name_wins(pool: Pool) -> None:
    await set_alias(pool, "m1", "m2")
    async with pool.node("n1", "m1") as node, pool.node("n2", "m2"):
        await pool.wait_joined(2)
        answering = asyncio.create_task(node.answer("hello"))

        status, answer, headers = await call(
            pool, "POST", "/v1/chat/completions", {"model": "m1", "messages": HI}
        )

        await answering
        _, listed, _ = await call(pool, "GET", "/v1/models")
    assert (status, answer["model"]) == (200, "m1")
    assert "x-shoal-model" not in headers
    assert [(each["id"], each["alias_of"]) for each in listed["data"]] == [
        ("m1", None),
        ("m2", None),
    ]


async def test_lists_have_the_aliases_that_are_served_now(pool: Pool) -> None:
    await set_alias(pool, "a-gpt", "absent", "m1")
    await set_alias(pool, "a-lost", "absent")
    await set_alias(pool, "claude-*", "m1")
    async with pool.node():
        await pool.wait_joined()
        models = (await call(pool, "GET", "/v1/models"))[1]["data"]
        shown = (await call(pool, "GET", "/v1/models/claude-x"))[1]
        tags = (await call(pool, "GET", "/ollama/api/tags"))[1]["models"]
        loaded = (await call(pool, "GET", "/ollama/api/ps"))[1]["models"]
        aliases = (await call(pool, "GET", "/admin/aliases"))[1]["data"]
        described = await call(
            pool, "POST", "/ollama/api/show", {"model": "a-gpt:latest"}
        )

    assert [(each["id"], each["alias_of"]) for each in models] == [
        ("m1", None),
        ("a-gpt", "m1"),
    ]
    assert (shown["id"], shown["alias_of"]) == ("claude-x", "m1")
    assert [(each["name"], each["details"]["parent_model"]) for each in tags] == [
        ("m1", ""),
        ("a-gpt", "m1"),
    ]
    assert [each["name"] for each in loaded] == ["m1"]
    assert described[0] == 200
    assert aliases == [
        {"name": "a-gpt", "models": ["absent", "m1"], "serves": "m1"},
        {"name": "a-lost", "models": ["absent"], "serves": None},
        {"name": "claude-*", "models": ["m1"], "serves": "m1"},
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
async def test_error_names_the_models_of_an_alias(
    pool: Pool, path: str, body: dict[str, Any]
) -> None:
    await set_alias(pool, "gpt", "m8", "m9")

    status, answer, _ = await call(pool, "POST", path, {"model": "gpt", **body})

    assert status == 404
    assert "gpt stands for (m8, m9)" in answer["error"]["message"]


async def test_request_is_repeated_after_the_alias_got_another_model(
    pool: Pool,
) -> None:
    await set_alias(pool, "gpt", "m2", "m1")
    body = {"model": "gpt", "messages": HI}
    path, once = "/v1/chat/completions", {"Idempotency-Key": "once"}
    async with pool.node() as node:
        await pool.wait_joined()
        answering = asyncio.create_task(node.answer("hello"))
        _, first, _ = await call(pool, "POST", path, body, **once)
        await answering
        async with pool.node("n2", "m2"):
            await pool.wait_joined(2)
            status, second, _ = await call(pool, "POST", path, body, **once)

    assert (status, second["id"]) == (200, first["id"])


async def test_aliases_are_for_operators(pool: Pool) -> None:
    key = await make_key(pool, "al")
    path = "/admin/aliases/org%2Fgpt"

    refused = await call(pool, "PUT", path, {"models": ["m1"]}, key=key)
    made = await call(pool, "PUT", path, {"models": ["m1", "m2"]})
    bad = await call(pool, "PUT", path, {"models": ["org/gpt"]})
    removed = await call(pool, "DELETE", path)
    missing = await call(pool, "DELETE", path)

    assert refused[0] == 403
    alias = {"name": "org/gpt", "models": ["m1", "m2"], "serves": None}
    assert made[:2] == (200, alias)
    assert bad[0] == 400
    assert "cannot stand for itself" in bad[1]["error"]["message"]
    assert removed[:2] == (200, {"name": "org/gpt", "removed": True})
    assert missing[0] == 404


async def test_aliases_outlive_the_coordinator(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        await set_alias(pool, "gpt", "m1")
    async with serving(tmp_path, restarted=True) as pool:
        assert [*pool.hub.pool.aliases] == ["gpt"]


async def test_vectors_name_the_model(pool: Pool) -> None:
    await set_alias(pool, "text-embedding-3-small", "m1")
    body = {"model": "text-embedding-3-small", "input": ["a"]}
    async with shoal_worker(pool, offer(JobKind.EMBEDDING)) as worker:
        await pool.wait_joined()
        asking = asyncio.create_task(call(pool, "POST", "/v1/embeddings", body))
        job = await worker.job()
        worker.delta(job, fields={"embedding": "AAAAPw=="})
        worker.end(job)
        status, answer, _ = await asking

    assert (status, answer["model"]) == (200, "m1"), answer
    assert job.work.model == "m1"


async def test_ranking_names_the_model(pool: Pool) -> None:
    await set_alias(pool, "rerank-*", "m1")
    body = {"model": "rerank-3", "query": "q", "documents": ["a"]}
    async with shoal_worker(pool, offer(JobKind.RERANK)) as worker:
        await pool.wait_joined()
        asking = asyncio.create_task(call(pool, "POST", "/v1/rerank", body))
        job = await worker.job()
        worker.delta(job, fields={"relevance_score": 0.5})
        worker.end(job)
        status, answer, _ = await asking

    assert (status, answer["model"]) == (200, "m1"), answer


async def test_lines_of_a_batch_have_aliases(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool, pool.node() as node:
        await pool.wait_joined()
        await set_alias(pool, "gpt", "absent", "m1")
        answering = asyncio.create_task(node.answer("hello"))
        body = {"model": "gpt", "messages": HI}
        path = "/v1/chat/completions"
        line = {"custom_id": "1", "method": "POST", "url": path, "body": body}
        form = FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(line).encode(), filename="lines.jsonl")
        async with pool.session.post(
            f"{pool.url}/v1/files", data=form, headers=pool.headers()
        ) as sent:
            file = await sent.json()
        begun = {"input_file_id": file["id"], "endpoint": path}
        begun["completion_window"] = "24h"
        _, batch, _ = await call(pool, "POST", "/v1/batches", begun)
        await answering
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.01)
            _, batch, _ = await call(pool, "GET", f"/v1/batches/{batch['id']}")

    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
