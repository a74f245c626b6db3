"""The description of the interface: true, and whole."""

from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.serving import Pool, serving
from shoal.gateway.app import make_app
from shoal.gateway.openapi import openapi_document
from shoal.gateway.operations import OPERATIONS

UNDESCRIBED = {("post", "/api/chat")}


async def test_every_route_is_described(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        assert pool.gateway is not None
        routes = {
            (route.method.lower(), route.resource.canonical)
            for route in make_app(pool.gateway, _nothing).router.routes()
            if route.resource is not None and route.method != "HEAD"
        }

    described = {(each.method, each.path) for each in OPERATIONS}
    assert routes == described | UNDESCRIBED


async def _nothing(request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def test_the_description_is_public(pool: Pool) -> None:
    async with pool.session.get(f"{pool.url}/openapi.json") as got:
        assert got.status == 200
        assert await got.json() == openapi_document()


def test_every_reference_leads_somewhere() -> None:
    described = openapi_document()
    known = {f"#/components/schemas/{n}" for n in described["components"]["schemas"]}

    assert set(_references(described)) <= known


def _references(value: Any) -> list[str]:
    match value:
        case {"$ref": str() as found}:
            return [found]
        case dict():
            return [each for inner in value.values() for each in _references(inner)]
        case list():
            return [each for inner in value for each in _references(inner)]
        case _:
            return []
