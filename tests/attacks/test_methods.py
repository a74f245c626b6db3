"""Every method at every path."""

import json
import re

import pytest
from yarl import URL

from attacks.raw import post, wire
from attacks.siege import body
from gateway.serving import Pool
from harness.profiles import some_long
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.openapi import openapi_document

pytestmark = pytest.mark.asyncio(loop_scope="module")

METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
)
PATHS = [
    *openapi_document(OPERATIONS)["paths"],
    "/api/chat",
    "/",
    "/v1",
    "/admin",
    "/ws",
    "//",
    "/v1/",
]
NAMES = ("x", "%2e%2e", "%2F", "%00", "%ff", "%ed%a0%80", "a%20b", "%25", "x" * 4000)
ENDLESS = {"/admin/live"}

ANSWERED = {200, 400, 401, 403, 404, 405, 413, 415, 426}


def known_methods(path: str) -> set[str]:
    """Return the methods that have an operation at a path."""
    return {each.method for each in OPERATIONS if each.path == path}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", some_long(["right", "wrong", ""], short=1))
async def test_every_method_is_answered_at_every_path(
    pool: Pool, method: str, key: str
) -> None:
    keys = {"": {}, "wrong": pool.headers("sk-wrong"), "right": pool.headers()}
    for number, path in enumerate(PATHS):
        if (method, path) == ("CONNECT", "//"):
            continue  # the client itself cannot write it
        names = NAMES if "{" in path else ("",)
        if method not in known_methods(path):  # then nobody reads the name
            names = (names[number % len(names)],)
        for name in names:
            target = URL(pool.url + re.sub(r"\{.*?\}", name, path), encoded=True)
            async with pool.session.request(
                method, target, headers=keys[key], allow_redirects=False
            ) as answer:
                case = (method, path, name[:10])
                if path in ENDLESS and answer.status == 200:
                    continue
                text = await answer.text()

            expected = ANSWERED | {429 if key == "wrong" else 200}
            if path == "/health":
                expected = expected | {503}  # there is no worker
            assert answer.status in expected, case
            assert answer.headers["x-request-id"], case
            if method == "HEAD":
                assert not text
            elif answer.status >= 400:
                assert '"error"' in text, case


@pytest.mark.parametrize(
    "query",
    ["owner=%ed%a0%80", "owner=%ff", "owner=%00", "limit=1e9", "limit=-1", "state=x"],
)
async def test_unusual_query_is_answered(pool: Pool, query: str) -> None:
    target = URL(f"{pool.url}/admin/jobs?{query}", encoded=True)
    async with pool.session.get(target, headers=pool.headers()) as answer:
        assert answer.status in (200, 400), await answer.text()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-shoal-session": "\udcff"},
        {"x-shoal-priority": "\udcff"},
        {"x-shoal-queue-seconds": "\udcff"},
        {"x-shoal-total-seconds": "1e-300"},
        {"x-shoal-silence-seconds": "-0"},
        {"Idempotency-Key": "\udcff"},
        {"Idempotency-Key": "a" * 4000},
        {"x-request-id": "\udcff"},
        {"Accept": "\udcff", "User-Agent": "\udcff", "Content-Type": "\udcff"},
        {"Content-Type": "text/plain; charset=klingon"},
        {"Accept-Encoding": "br;q=0, *;q=0"},
        {"Expect": "100-continue"},
        {"Range": "bytes=0-1"},
        {"If-None-Match": "*"},
    ],
    ids=str,
)
async def test_unusual_header_is_answered(pool: Pool, headers: dict[str, str]) -> None:
    data = json.dumps(body("nobody's")).encode()
    lines = [f"{name}: {value}" for name, value in headers.items()]
    async with wire(pool) as bare:
        await bare.send(
            post(*lines, f"Content-Length: {len(data)}", "Connection: close", body=data)
        )
        answer = await bare.rest()

    assert re.search(rb"HTTP/1.1 4\d\d ", answer), answer[:200]
