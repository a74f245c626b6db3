"""Requests of a client, as a server gets them."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.client.connection import BlobClient, CallDialer, JsonRequest, open_session
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.errors import ConnectionLost
from shoal.client.messages import PATH
from shoal.client.reconnection import COORDINATOR, STOPPING
from shoal.domain.errors import ShoalError, Unavailable

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
        address = CoordinatorAddress((url,), "sk", None, True)
        async with open_session(address) as session:
            query = {"name": "a b/c"}
            found = JsonRequest("/v1/jobs", list[str], query=query)
            assert await found.send(session, address) == []
            with pytest.raises(ShoalError):
                await BlobClient(session, address).download("00")

    assert paths[:2] == [f"{ODD}/v1/jobs?name=a+b%2Fc", f"{ODD}/v1/blobs/00"]


STOPS = {COORDINATOR: "1", STOPPING: "1"}


@pytest.mark.parametrize(
    ("status", "headers", "method", "key", "sent"),
    [
        (502, {}, "GET", "", 2),  # of a proxy
        (502, {}, "POST", "k", 2),
        (503, STOPS, "POST", "", 2),
        (502, {}, "POST", "", 1),
        (502, {COORDINATOR: "1"}, "GET", "", 1),  # of the coordinator
    ],
)
async def test_request_is_repeated_where_that_has_no_further_effect(
    status: int, headers: dict[str, str], method: str, key: str, sent: int
) -> None:
    keys: list[str | None] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers.get("Idempotency-Key"))
        if len(keys) == 1:
            return web.json_response({}, status=status, headers=headers)
        return web.json_response([])

    app = web.Application()
    app.router.add_route("*", "/v1/jobs", handle)
    async with TestServer(app) as server:
        address = CoordinatorAddress((f"http://127.0.0.1:{server.port}",), "sk")
        async with open_session(address) as session:
            asked = JsonRequest("/v1/jobs", list[str], method, body={}, key=key)
            try:
                assert await asked.send(session, address) == []
            except Unavailable:
                assert sent == 1

    assert keys == [key or None] * sent


async def test_calls_connect_to_a_coordinator_that_starts(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get(PATH, handle)
    address = CoordinatorAddress((f"http://127.0.0.1:{unused_tcp_port}",), "sk")
    async with open_session(address) as session:
        dialing = asyncio.create_task(CallDialer(session, address).dial(lambda: True))
        while not caplog.records:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)
        async with TestServer(app, port=unused_tcp_port):
            await (await dialing).close()

    (line,) = caplog.messages
    assert line.startswith(f"cannot reach {address.url}: ")


async def test_calls_of_an_unknown_host_fail_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = CoordinatorAddress(("http://name.invalid:1",), "sk")
    async with open_session(address) as session:
        with pytest.raises(ConnectionLost, match="cannot reach"):
            await CallDialer(session, address).dial(lambda: True)

    assert not caplog.records
