"""Requests of a client, as a server gets them."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.client.connection import BlobClient, JsonRequest, open_session
from shoal.client.coordinator import CoordinatorAddress
from shoal.domain.errors import ShoalError

ODD = "/team%2Fa/%28b%29/%7e"  # the path of a proxy before the coordinator


async def test_path_is_sent_as_it_was_given() -> None:
    paths: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        paths.append(request.raw_path)
        if request.path.endswith("/jobs"):
            return web.json_response([])
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}{ODD}"
        address = CoordinatorAddress(url, "sk", None, True)
        async with open_session(address) as session:
            query = {"name": "a b/c"}
            found = JsonRequest("/v1/jobs", list[str], query=query)
            assert await found.send(session, address) == []
            with pytest.raises(ShoalError):
                await BlobClient(session, address).download("00")

    assert paths[:2] == [f"{ODD}/v1/jobs?name=a+b%2Fc", f"{ODD}/v1/blobs/00"]
