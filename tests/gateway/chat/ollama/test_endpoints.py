"""Ollama's API on the coordinator's port, and on a port of its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web

from gateway.chat.openai.test_embeddings import ENCODED, VECTOR
from gateway.keys import make_key, request
from gateway.serving import Pool, eventually, serving
from gateway.shoal_worker import EVERYTHING, shoal_worker
from shoal.domain.credentials import Scope
from shoal.domain.moderation import Moderation
from shoal.domain.work import JobKind, ModelAction, ModelOrder
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer
from shoal.engines.local_servers import ServerLocation, find_servers
from shoal.gateway.app import make_app, make_ollama_app

pytestmark = pytest.mark.shared_pool

HI = [{"role": "user", "content": "hi"}]


async def lines(pool: Pool, path: str, body: Any) -> list[Any]:
    """Return the lines of a streamed answer."""
    async with pool.session.post(
        pool.url + path, json=body, headers=pool.headers()
    ) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) async for line in response.content]


@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        ("/ollama/api/chat", "message", {"messages": HI}),
        ("/ollama/api/generate", "response", {"prompt": "hi"}),
    ],
)
async def test_answers_are_streamed_by_default(
    pool: Pool, path: str, field: str, asked: Any
) -> None:
    body = {"model": "m1:latest", "options": {"num_predict": 7}, **asked}
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hel", "lo"))
        streamed = await lines(pool, path, body)
        tasks.create_task(node.answer("Hello", number=1))
        status, whole = await request(pool, "POST", path, {**body, "stream": False})

    def text(line: Any) -> str:
        shown = line[field]
        return str(shown if isinstance(shown, str) else shown["content"])

    assert "".join(map(text, streamed)) == text(whole) == "Hello"
    assert [line["done"] for line in streamed][-1] is True
    assert status == 200
    assert whole["model"] == "m1:latest"
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["prompt_eval_count"] == streamed[-1]["prompt_eval_count"] > 0
    assert whole["eval_count"] > 0
    assert node.tasks[0]["messages"] == HI
    assert node.tasks[0]["max_new_tokens"] == 7


async def test_tools_are_called(pool: Pool) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    body = {"model": "m1", "messages": HI, "tools": [tool]}
    called = {"index": 0, "id": "c0", "function": {"name": "weather"}}
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:

        async def answer() -> None:
            job = await worker.job()
            worker.delta(job, fields={"tool_calls": [called]})
            worker.end(job)

        tasks.create_task(answer())
        first, _ = await lines(pool, "/ollama/api/chat", body)

    (call,) = first["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {}}


CAPABILITIES = ["completion", "embedding", "tools", "vision", "audio"]
EMBEDDINGS: tuple[tuple[str, Any, Any, int], ...] = (
    ("embed", {"input": ["a", "b"]}, {"embeddings": [list(VECTOR)] * 2}, 2),
    ("embed", {"input": "a"}, {"embeddings": [list(VECTOR)]}, 1),
    ("embed", {"input": []}, {"embeddings": []}, 0),
    ("embeddings", {"prompt": "a"}, {"embedding": list(VECTOR)}, 1),
    ("embeddings", {"prompt": ""}, {"embedding": []}, 0),
)
"""Requests and answers, with the number of vectors from the worker."""


async def test_texts_are_embedded(pool: Pool) -> None:
    async with shoal_worker(pool) as worker:

        async def answer(number: int, count: int) -> None:
            job = await worker.job(number)
            for index in range(count):
                fields = {"embedding": ENCODED}
                worker.delta(job, choice=index, fields=fields)
            worker.end(job)

        number = 0
        for path, body, expected, count in EMBEDDINGS:
            async with asyncio.TaskGroup() as tasks:
                if count:
                    tasks.create_task(answer(number, count))
                    number += 1
                status, shown = await request(
                    pool, "POST", f"/ollama/api/{path}", {"model": "m1:latest", **body}
                )

            assert status == 200
            assert {name: shown[name] for name in expected} == expected


async def test_models_are_listed_and_shown(pool: Pool) -> None:
    async with shoal_worker(pool):
        listed = [
            (await request(pool, "GET", f"/ollama/api/{path}"))[1]["models"]
            for path in ("tags", "ps")
        ]
        shown = [
            (await request(pool, "POST", "/ollama/api/show", body))[1]
            for body in ({"model": "m1"}, {"name": "m1:latest"})
        ]

    assert [[each["name"] for each in models] for models in listed] == [["m1"]] * 2
    assert listed[1][0]["context_length"] == 4096
    assert shown[0] == shown[1]
    assert shown[0]["capabilities"] == CAPABILITIES


async def test_a_model_without_a_prompt_is_loaded(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        for path, body in (
            ("/ollama/api/chat", {"model": "m1", "messages": []}),
            ("/ollama/api/generate", {"model": "m1"}),
            ("/ollama/api/generate", {"model": "m1", "prompt": ""}),
        ):
            (line,) = await lines(pool, path, body)
            _, unloaded = await request(
                pool, "POST", path, {**body, "keep_alive": 0, "stream": False}
            )

            assert (line["done"], line["done_reason"]) == (True, "load")
            assert unloaded["done_reason"] == "unload"


LIBRARY = ModelLibrary((LoadableModel("m1", 2 * 10**9),), 10**10)
MACHINE = Offer(frozenset({JobKind.MODEL}), slots=2, library=LIBRARY)


async def test_a_model_on_a_disk_is_listed_with_its_size_and_loaded(
    pool: Pool,
) -> None:
    body, workers = {"model": "m1", "stream": False}, pool.hub.pool.workers
    async with shoal_worker(pool, MACHINE), asyncio.TaskGroup() as tasks:
        _, listed = await request(pool, "GET", "/ollama/api/tags")
        for path in ("generate", "chat", "embed"):
            asked = {**body, "input": []} if path == "embed" else body
            loading = tasks.create_task(
                request(pool, "POST", f"/ollama/api/{path}", asked)
            )
            await eventually(lambda: "m1" in pool.hub.pool.queues)
            async with shoal_worker(pool, name="n2") as worker:
                await worker.answer("x")
                status, answer = await loading
                job = worker.work()
            await eventually(
                lambda: not any(each.startswith("shoal:n2/") for each in workers)
            )

            assert status == 200
            assert job.max_tokens == 1
            assert path == "embed" or answer["done_reason"] == "load"

    assert [(each["name"], each["size"]) for each in listed["models"]] == [
        ("m1", 2 * 10**9)
    ]


async def test_a_load_that_takes_longer_than_the_request_waits_is_refused(
    pool: Pool,
) -> None:
    async with shoal_worker(pool, MACHINE):
        headers = {**pool.headers(), "x-shoal-queue-seconds": "0.1"}
        async with pool.session.post(
            f"{pool.url}/ollama/api/generate", json={"model": "m1"}, headers=headers
        ) as response:
            assert response.status == 503, await response.text()


@pytest.mark.parametrize("scope", [Scope.USE, Scope.ADMIN])
async def test_only_an_operator_unloads_for_all(pool: Pool, scope: Scope) -> None:
    secret = await make_key(pool, scope.value, scope=scope.value)
    body = {"model": "m1", "keep_alive": 0, "stream": False}
    async with shoal_worker(pool, MACHINE, others=[EVERYTHING]) as machine:
        status, answer = await request(
            pool, "POST", "/ollama/api/generate", body, secret
        )
        assert (status, answer["done_reason"]) == (200, "unload")
        if scope is Scope.ADMIN:
            job = await machine.job()
            assert job.work == ModelOrder(ModelAction.UNLOAD, "m1", "shoal:n1/*models")
            machine.end(job)
        else:
            assert not len(pool.hub.pool.model_orders)


async def test_a_model_of_the_pool_is_pulled_at_once(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()

        pulled = await lines(pool, "/ollama/api/pull", {"model": "m1"})
        whole = await request(
            pool, "POST", "/ollama/api/pull", {"model": "m1:latest", "stream": False}
        )
        status, missing = await request(
            pool, "POST", "/ollama/api/pull", {"model": "m2"}
        )

    assert [each["status"] for each in pulled] == ["pulling manifest", "success"]
    assert whole == (200, {"status": "success"})
    assert status == 404
    assert "`shoal models get m2`" in missing["error"]


async def test_models_are_not_managed_here(pool: Pool) -> None:
    for method, path in (
        ("POST", "/ollama/api/create"),
        ("POST", "/ollama/api/copy"),
        ("DELETE", "/ollama/api/delete"),
        ("POST", "/ollama/api/push"),
        ("POST", "/ollama/api/blobs/sha256:00"),
    ):
        status, shown = await request(pool, method, path, {"model": "m"})

        assert status == 400
        assert shown["error"].startswith(f"{method} {path}: models cannot be managed")


ERRORS: tuple[tuple[str, Any, int, str], ...] = (
    ("chat", {"model": "m2", "messages": HI}, 404, "no worker has the model m2"),
    ("show", {"model": "m2"}, 404, "no worker has the model m2"),
    ("generate", {"model": "m2"}, 404, "no worker has the model m2"),
    ("embed", {"model": "m1", "input": "a"}, 400, "but not embedding"),
    ("chat", {"messages": HI}, 400, "model: required, but missing"),
    ("show", {}, 400, "model: required, but missing"),
    ("nothing", {}, 404, "POST /ollama/api/nothing: not found"),
)


async def test_errors_have_the_form_of_ollama(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        for path, body, status, message in ERRORS:
            got, shown = await request(pool, "POST", f"/ollama/api/{path}", body)

            assert got == status
            assert shown.keys() == {"error"}
            assert message in shown["error"]


async def test_an_answer_that_breaks_off_ends_with_an_error(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()

        async def begin() -> None:
            task = await node.task()
            await node.write(task["id"], "Hel")
            pool.hub.cancel(next(iter(pool.hub.pool.jobs)), "by an operator")

        tasks.create_task(begin())
        *_, last = await lines(
            pool, "/ollama/api/chat", {"model": "m1", "messages": HI}
        )

    assert last == {"error": "by an operator"}


async def test_prompts_are_moderated(tmp_path: Path) -> None:
    async with serving(tmp_path, moderation=Moderation("bomb")) as pool, pool.node():
        await pool.wait_joined()
        for path, body in (
            ("chat", {"messages": [{"role": "user", "content": "a bomb"}]}),
            ("generate", {"prompt": "a bomb"}),
            ("embed", {"input": "a bomb"}),
        ):
            status, shown = await request(
                pool, "POST", f"/ollama/api/{path}", {"model": "m1", **body}
            )
            assert status == 400, path
            assert "moderation list" in shown["error"]


@asynccontextmanager
async def own_port(pool: Pool) -> AsyncIterator[str]:
    """Serve Ollama's API at a port of its own; gives the URL."""
    assert pool.gateway is not None

    async def not_found(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    app = make_ollama_app(make_app(pool.gateway, not_found), pool.gateway)
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def get(pool: Pool, url: str, method: str = "GET") -> tuple[ClientResponse, str]:
    async with pool.session.request(method, url) as response:
        return response, await response.text()


async def test_own_port_has_the_api_at_its_root(pool: Pool) -> None:
    body = {"model": "m1", "messages": HI, "stream": False}
    async with pool.node() as node, own_port(pool) as url, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("Hello"))
        own = Pool(url, pool.hub, pool.session)

        status, shown = await request(own, "POST", "/api/chat", body)
        _, models = await request(own, "GET", "/v1/models")
        unknown = await request(own, "GET", "/api/nothing")
        openai = await request(own, "GET", "/v1/models/nothing")
        root, text = await get(pool, f"{url}/")
        head, _ = await get(pool, f"{url}/", "HEAD")
        version, _ = await get(pool, f"{url}/api/version")

    assert (status, shown["message"]["content"]) == (200, "Hello")
    assert [each["id"] for each in models["data"]] == ["m1"]
    assert unknown == (404, {"error": "GET /api/nothing: not found"})
    assert openai[1]["error"]["code"] == "model_not_found"
    assert (root.status, text) == (200, "Ollama is running")
    assert (head.status, version.status) == (200, 200)


async def test_own_port_names_the_setting_that_makes_keys_needless(
    pool: Pool,
) -> None:
    async with own_port(pool) as url:
        response, text = await get(pool, f"{url}/api/tags")
        main, _ = await get(pool, f"{pool.url}/ollama/api/tags")

    assert response.status == main.status == 401
    assert "`shoal serve --ollama-open`" in json.loads(text)["error"]


async def test_a_worker_takes_the_port_for_no_server_of_models(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, open_loopback=True) as pool,
        pool.node(),
        own_port(pool) as url,
    ):
        await pool.wait_joined()
        port = int(url.rpartition(":")[2])

        assert await find_servers([ServerLocation(port, "Ollama")]) == []


async def test_client_without_the_prefix_gets_the_address(pool: Pool) -> None:
    for path in ("/api/tags", "/api/version"):
        response, text = await get(pool, f"{pool.url}{path}")

        assert response.status == 404
        assert "http://HOST:PORT/ollama" in json.loads(text)["error"]
