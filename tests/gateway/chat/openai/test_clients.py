"""Clients that disconnect, do not read, send too much, or send garbage."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.serving import KEY, Pool, eventually, serving

pytestmark = pytest.mark.shared_pool

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "m1",
    "messages": [{"role": "user", "content": "hi"}],
}


async def test_disconnect_from_a_stream_stops_the_worker(
    pool: Pool,
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(_post(pool, BODY | {"stream": True}))
        task = await node.task()
        await node.write(task["id"], "a")
        await _text_came(pool)

        asking.cancel()

        await node.wait_stopped(task["id"])
        await eventually(lambda: not pool.hub.pool.jobs)


async def test_disconnect_from_a_plain_request_stops_the_worker(
    pool: Pool,
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(_post(pool, BODY))
        task = await node.task()
        await node.write(task["id"], "a")
        await _text_came(pool)

        asking.cancel()

        await node.wait_stopped(task["id"])
        await eventually(lambda: not pool.hub.pool.jobs)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_while_queued_cancels_the_job(
    pool: Pool, stream: bool
) -> None:
    async with pool.node(slots="1") as node:
        await pool.wait_joined()
        first = asyncio.create_task(_post(pool, BODY))
        await node.task()
        second = asyncio.create_task(_post(pool, BODY | {"stream": stream}))
        await eventually(lambda: pool.hub.pool.queued == 1)

        second.cancel()
        await eventually(lambda: pool.hub.pool.queued == 0)
        await node.answer("a")

        assert json.loads(await first)["choices"][0]["message"]["content"] == "a"
        assert len(node.tasks) == 1


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"stream": True}),
        ("/api/chat", {"max_new_tokens": 1 << 20}),
        ("/ollama/api/chat", {}),
    ],
)
async def test_client_that_never_reads_is_disconnected(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, path: str, field: Any
) -> None:
    monkeypatch.setattr("shoal.gateway.http.responses.WRITE_TIMEOUT", 0.2)
    monkeypatch.setattr("shoal.gateway.http.responses.KEEPALIVE_EVERY", 0.3)
    body = json.dumps(BODY | field).encode()
    async with pool.node() as node:
        await pool.wait_joined()
        with _unread(pool) as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, _request(path, len(body)) + body)
            task = await node.task()

            # Below the limit at which the hub disconnects slow readers.
            await node.write(task["id"], *["x" * 100_000] * 70)

            await node.wait_stopped(task["id"])
            await eventually(lambda: not pool.hub.pool.jobs)
            assert not (await _read_all(client)).endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("announced", [True, False])
async def test_body_of_100_megabytes_is_rejected(pool: Pool, announced: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1_000_000

    length = {"Content-Length": "100000000"} if announced else {}
    async with pool.session.post(
        pool.url + CHAT, data=body(), headers=pool.headers() | length
    ) as response:
        error = (await response.json())["error"]

    assert response.status == 413
    assert error["code"] == "request_too_large"


async def test_body_without_a_key_is_not_read(pool: Pool) -> None:
    with _unread(pool) as client:
        loop = asyncio.get_running_loop()
        head = _request(CHAT, 1000).replace(KEY.encode(), b"wrong")
        await loop.sock_sendall(client, head)

        answer = await loop.sock_recv(client, 1 << 16)

    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"{", "the body is not JSON"),
        (b"[]", "the body: expected `object`"),
        (b"null", "the body: expected `object`"),
        (b"\xff\xfe", "the body is not UTF-8"),
        (b'{"model":"\xff","messages":[]}', "the body is not UTF-8"),
        (b'{"model":"m1"}', "messages: required, but missing"),
        (b'{"a":' + b"[" * 50_000, "nested too deeply"),
        (b'{"a":[' + b"[]," * 70_000 + b"1]}", "more than 65536 values"),
    ],
)
async def test_invalid_body_is_a_bad_request(
    pool: Pool, body: bytes, words: str
) -> None:
    async with pool.session.post(
        pool.url + CHAT, data=body, headers=pool.headers()
    ) as response:
        error = (await response.json())["error"]

    assert response.status == 400
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_damaged_body_is_a_bad_request(pool: Pool) -> None:
    async with pool.session.post(
        pool.url + CHAT,
        data=b"this is not compressed",
        headers=pool.headers() | {"Content-Encoding": "deflate"},
    ) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("HEAD", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_other_paths_and_methods_have_openai_errors(
    pool: Pool, method: str, path: str, status: int
) -> None:
    async with pool.session.request(method, pool.url + path) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        if method != "HEAD":
            assert (await response.json())["error"]["message"].startswith(method)
        if status == 405:
            assert response.headers["Allow"]


async def test_path_of_a_wrong_base_url_is_corrected(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/nothing", None),
        ("/v1/ollama/api/chat", "/ollama/api/chat"),
        ("/models", "/v1/models"),
        ("/v1", None),
    ):
        async with pool.session.get(pool.url + path) as response:
            message = (await response.json())["error"]["message"]

        with subtests.test(path=path):
            assert response.status == 404
            assert ("did you mean" in message) is (meant is not None)
            assert meant is None or f"did you mean {meant}? Check the base" in message


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)],
)
async def test_every_response_has_a_request_id(
    pool: Pool, given: str, kept: bool
) -> None:
    for path in ("/healthz", "/nothing", "/v1/models"):
        async with pool.session.get(
            pool.url + path, headers={"x-request-id": given}
        ) as response:
            assert (response.headers["x-request-id"] == given) is kept
            assert response.headers["x-request-id"]


async def test_surrogate_is_replaced(tmp_path: Path) -> None:
    body = b'{"model":"m1","messages":[{"role":"user","content":"a\\ud800b"}]}'
    async with serving(tmp_path) as pool, pool.node() as node:
        await pool.wait_joined()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_post(pool, body))
            await node.answer("a")

    assert node.tasks[0]["messages"][0]["content"] == "a\ufffdb"
    assert json.loads(asked.result())["object"] == "chat.completion"


async def _post(pool: Pool, body: dict[str, Any] | bytes) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with pool.session.post(
        pool.url + CHAT, data=data, headers=pool.headers()
    ) as response:
        return await response.read()


async def _text_came(pool: Pool) -> None:
    (job,) = pool.hub.pool.jobs.values()
    await eventually(lambda: job.started)


async def _read_all(client: socket.socket) -> bytes:
    received = b""
    while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        received = received[-16:] + data
    return received


def _unread(pool: Pool) -> socket.socket:
    """Connect with a tiny receive buffer, and never read."""
    address = urlsplit(pool.url)
    assert address.port is not None
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", address.port))
    client.setblocking(False)
    return client


def _request(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize(
    ("path", "key", "body", "error"),
    [
        (CHAT, "wrong", BODY, "invalid_api_key"),
        (CHAT, KEY, BODY | {"messages": 5}, "invalid_request"),
        (CHAT, KEY, BODY | {"model": "nobody's"}, "model_not_found"),
        ("/nowhere", KEY, BODY, "not_found"),
        ("/api/chat", "wrong", BODY, "invalid_api_key"),
        ("/api/chat", KEY, BODY | {"messages": None}, "invalid_request"),
    ],
)
async def test_request_is_logged_without_its_content(
    pool: Pool,
    caplog: pytest.LogCaptureFixture,
    path: str,
    key: str,
    body: dict[str, Any],
    error: str,
) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    with caplog.at_level("INFO", logger="shoal.gateway"):
        async with pool.session.post(
            pool.url + path, json=body, headers=headers
        ) as got:
            await got.read()

    (line,) = [
        each.getMessage() for each in caplog.records if each.name == "shoal.gateway"
    ]
    assert f" method='POST' path={path!r} status={got.status} ms=" in line
    assert f" error={error!r}" in line
    assert key not in line


@pytest.mark.own_pool
async def test_answer_is_logged_with_its_worker(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer("a secret"))
        with caplog.at_level("INFO", logger="shoal.gateway"):
            async with pool.session.post(
                pool.url + CHAT,
                json=BODY | {"stream": True},
                headers=pool.headers() | {"x-request-id": "mine"},
            ) as got:
                await got.read()

    (record,) = [each for each in caplog.records if each.name == "shoal.gateway"]
    fields = record.__dict__["fields"]
    assert fields["request"] == got.headers["x-request-id"] == "mine"
    assert fields["job"] == got.headers["x-shoal-job"] == "job1"
    assert fields["worker"] == got.headers["x-shoal-worker"] == "grandsage:n1/m1"
    assert got.headers["x-shoal-attempts"] == "1"
    assert (fields["key"], fields["model"], fields["status"]) == ("default", "m1", 200)
    assert fields["tokens_out"] == 2
    assert {"ms", "first_output_ms", "tokens_in", "peer"} <= fields.keys()
    assert "secret" not in record.getMessage()
