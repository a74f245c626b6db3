"""All operations: the router has them, each with its access."""

from collections.abc import Iterator
from pathlib import Path

from aiohttp import ClientResponse, web

from gateway.serving import Pool, serving
from shoal.domain.credentials import Scope
from shoal.gateway.all_operations import OLLAMA_PORT, OPERATIONS
from shoal.gateway.app import make_app
from shoal.gateway.http.operation import Operation
from shoal.gateway.http.responses import BYTES_TYPE, NDJSON_TYPE, SSE_TYPE

PARAMETERS = {
    "run": "none",
    **{"digest": "00" * 32, "provider_pubkey": "00" * 32},
    **{"file_id": "none", "batch_id": "none"},
    **{"id": "none", "path": "none", "model": "m", "name": "none"},
}
LOWER = {
    Scope.USE: (Scope.READ, Scope.MONITOR),
    Scope.MONITOR: (Scope.READ, Scope.USE),
    Scope.ADMIN: (Scope.USE, Scope.MONITOR),
}
"""The scopes that do not cover a scope, as far as some do not."""


async def test_router_has_all_operations(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        assert pool.gateway is not None
        routes = {
            (route.method, route.resource.canonical)
            for route in make_app(pool.gateway, _not_found).router.routes()
            if route.resource is not None
        }

    rows = {(each.method, each.path) for each in OPERATIONS}
    heads = {
        ("HEAD", each.path)
        for each in OPERATIONS
        if each.method == "GET" and each.allow_head
    }
    assert routes == rows | heads
    assert len(rows) == len(OPERATIONS)


def test_stream_is_no_answer_to_head() -> None:
    """What is written to one would be taken for the next response."""
    streamed = (SSE_TYPE, NDJSON_TYPE, BYTES_TYPE)

    assert not [
        each.path
        for each in OPERATIONS
        if each.method == "GET" and each.allow_head
        if each.streams or each.media in streamed
    ]


def test_port_of_ollama_has_its_api_at_the_root() -> None:
    below = {
        (each.method, each.path.removeprefix("/ollama"))
        for each in OPERATIONS
        if each.path.startswith("/ollama/")
    }

    offered = {(each.method, each.path) for each in OLLAMA_PORT}
    assert below < offered
    paths = ("chat/completions", "completions", "embeddings", "responses", "messages")
    assert {("POST", f"/v1/{path}") for path in paths} < offered
    assert not any("{id}" in each.path for each in OLLAMA_PORT)  # of any client


async def _not_found(request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def test_operation_with_a_scope_requires_a_key(pool: Pool) -> None:
    for each in _with_scope():
        answered = await _request(pool, each, "")

        assert answered.status == 401, each.path


async def test_operation_rejects_a_key_of_a_lower_scope(pool: Pool) -> None:
    keys = {scope: await _key(pool, scope) for scope in Scope}

    for each in _with_scope():
        assert each.scope is not None
        for lower in LOWER.get(each.scope, ()):
            answered = await _request(pool, each, keys[lower])

            assert answered.status == 403, each.path


async def test_public_operation_answers_without_a_key(pool: Pool) -> None:
    for each in OPERATIONS:
        if each.scope is None:
            answered = await _request(pool, each, "")

            assert answered.status != 401, each.path


def _with_scope() -> Iterator[Operation]:
    return (each for each in OPERATIONS if each.scope is not None)


async def _key(pool: Pool, scope: Scope) -> str:
    body = {"name": f"{scope.value}-only", "scope": scope.value}
    async with pool.session.post(
        f"{pool.url}/admin/keys", json=body, headers=pool.headers()
    ) as answered:
        created = await answered.json()
    return str(created["key"])


async def _request(pool: Pool, operation: Operation, key: str) -> ClientResponse:
    url = pool.url + operation.path.format(**PARAMETERS)
    headers = pool.headers(key) if key else {}
    async with pool.session.request(operation.method, url, headers=headers) as answered:
        return answered
