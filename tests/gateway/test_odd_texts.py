"""NUL, halves of characters and bytes that are none, wherever a stranger gives a text.

Whichever database the coordinator has, each is stored as it came, with U+FFFD for what
UTF-8 lacks, or refused: no write fails, and nothing that shows them does.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

import pytest
from msgspec.structs import replace

from gateway.serving import KEY, TOKEN, Pool, serving
from gateway.shoal_worker import EVERYTHING, ShoalWorker, shoal_worker
from shoal.store.postgres.database import PostgresStore
from store.conftest import STORES

Request: TypeAlias = tuple[str, str, Mapping[str, Any]]

TEXTS = ("a\0b", "\0", "a\ud800b", "\udc80\ud800\0")
CHATS = "/v1/chat/completions"
CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}
JSON, FORM = "application/json", "multipart/form-data; boundary=x"
HEADERS = (
    "Idempotency-Key",
    "x-shoal-session",
    "x-shoal-priority",
    "X-Request-ID",
    "traceparent",
    "User-Agent",
    "Origin",
    "X-Forwarded-For",
)
JOBS = "/v1/jobs?limit=100"
SHOWN = (
    "/v1/files",
    "/v1/batches",
    "/v1/receipts",
    "/v1/models",
    "/admin/jobs",
    "/admin/status",
    "/admin/nodes",
    "/admin/aliases",
    "/admin/keys",
    "/admin/tokens",
    "/admin/accounts",
    "/metrics",
)


@pytest.fixture(params=STORES)
async def pool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pool]:
    options: dict[str, Any] = {}
    if request.param == "postgres":
        url = request.getfixturevalue("database_url")
        options["open_store"] = lambda _, blobs: PostgresStore(url, blobs)
    async with serving(tmp_path, **options) as running:
        yield running


def raw(text: str) -> bytes:
    """Return a text as who writes halves of characters sends it."""
    return text.encode("utf-8", "surrogatepass")


def fitting(text: str) -> str:
    """Return what UTF-8 can have of a text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def bodies(text: str) -> list[Request]:
    """Return requests whose every text is this one."""
    named = {**CHAT, "messages": [{"role": "user", "name": text, "content": text}]}
    stored = {"model": "m1", "instructions": text, "metadata": {text: text}}
    prompt = {"job_type": "LLM_INFER", "payload": {"prompt": text, "model": "m1"}}
    file = {"input_file_id": text, "endpoint": CHATS, "completion_window": "24h"}
    return [
        ("POST", CHATS, {**named, "user": text, "safety_identifier": text}),
        ("POST", CHATS, {**CHAT, "model": text}),
        ("POST", CHATS, {**CHAT, "metadata": {text: text}}),
        ("POST", "/v1/completions", {"model": "m1", "prompt": text, "user": text}),
        ("POST", "/v1/embeddings", {"model": "m1", "input": [text]}),
        ("POST", "/v1/responses", {**stored, "input": text, "background": True}),
        ("POST", "/v1/messages", {**named, "max_tokens": 5, "system": text}),
        ("POST", "/v1/jobs/commit/fast", {**prompt, "user_id": text}),
        ("POST", "/v1/jobs/commit/cheap", {**prompt, "user_id": text}),
        ("POST", "/v1/batches", {**file, "metadata": {text: text}}),
        ("POST", "/v1/trust/create", {"user_id": text}),
        ("POST", "/v1/trust/claim", {"pairing_code": text, "provider_pubkey": text}),
        ("POST", "/admin/keys", {"name": text}),
        ("POST", "/admin/tokens", {"name": text}),
        ("PUT", "/admin/aliases/al", {"models": [text]}),
    ]


def paths(text: str) -> list[Request]:
    """Return requests with this text in their path or query."""
    given = quote(text, safe="", errors="surrogatepass")
    changes: list[Request] = [
        ("PUT", f"/admin/aliases/{given}", {"models": ["m1"]}),
        ("POST", f"/admin/workers/{given}/approve", {}),
        ("POST", f"/admin/workers/{given}/remove", {}),
        ("POST", f"/admin/accounts/user:{given}/credit", {"amount": 1}),
        ("PUT", f"/admin/accounts/user:{given}/budget", {"budget": 1}),
    ]
    looks = [
        "/v1/trust/list?user_id=",
        "/v1/jobs?user_id=",
        "/v1/jobs/",
        "/v1/files/",
        "/v1/batches/",
        "/v1/responses/",
        "/v1/receipts/",
        "/admin/keys/",
        "/admin/accounts/user:",
        "/admin/models/",
    ]
    return [*changes, *(("GET", look + given, {}) for look in looks)]


def form(text: str) -> bytes:
    """Return the upload of a file of this name, which contains it."""
    part = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    return (
        part % (b"purpose", b"", b"batch")
        + part % (b"file", b'; filename="%s"' % raw(text), raw(text))
        + b"--x--\r\n"
    )


async def ask(
    pool: Pool,
    method: str,
    path: str,
    body: bytes = b"",
    kind: str = JSON,
    header: bytes = b"",
) -> tuple[int, bytes]:
    """Send a request as it is; return the status and the body of the answer."""
    address = urlsplit(pool.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + header + b"\r\n" + body)
    answered, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(answered.split()[1]), rest


async def reply(worker: ShoalWorker, text: str) -> None:
    """Answer each job with a text, and let every third fail with it."""
    number = 0
    while True:
        job = await worker.job(number)
        number += 1
        if number % 3 == 0:
            worker.fail(job, text)
        else:
            worker.write(job, text)
            worker.end(job)


async def check_shown(pool: Pool) -> None:
    """Check that everything is stored, and what shows it works."""
    assert pool.hub.store_health.failure is None
    for path in SHOWN:
        status, answer = await ask(pool, "GET", path)
        assert status == 200, (path, answer)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
async def test_whatever_clients_send_is_stored_or_refused(
    pool: Pool, text: str
) -> None:
    asked = []
    async with shoal_worker(pool) as worker:
        replying = asyncio.create_task(reply(worker, text))
        for method, path, body in [*bodies(text), *paths(text)]:
            data = json.dumps(body).encode()
            asked.append((path, *await ask(pool, method, path, data)))
        asked.append(
            ("a form", *await ask(pool, "POST", "/v1/files", form(text), FORM))
        )
        for name in HEADERS:
            line = b"%s: %s\r\n" % (name.encode(), raw(text))
            data = json.dumps(CHAT).encode()
            asked.append((name, *await ask(pool, "POST", CHATS, data, JSON, line)))
        replying.cancel()

    # 502 is what the worker says.
    assert not [each for each in asked if each[1] >= 500 and each[1] != 502]
    assert len([each for each in asked if each[1] < 300]) >= 8
    await check_shown(pool)
    _, listed = await ask(pool, "GET", JOBS)
    users = {each["user_id"] for each in json.loads(listed)["jobs"]}
    assert fitting(text) in users


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
async def test_whatever_workers_say_is_stored_or_refused(pool: Pool, text: str) -> None:
    given = quote(text, safe="", errors="surrogatepass")
    named = f"/ws?token={TOKEN}&name={given}&model=x{given}&max_concurrency=1"
    offer = replace(EVERYTHING, models=frozenset({text}))
    async with pool.node(path=named), shoal_worker(pool, offer) as worker:
        await check_shown(pool)
        replying = asyncio.create_task(reply(worker, text))
        body = json.dumps({**CHAT, "model": text}).encode()
        statuses = [(await ask(pool, "POST", CHATS, body))[0] for _ in range(3)]
        replying.cancel()
        await check_shown(pool)

    assert {*statuses} <= {200, 404, 502}
