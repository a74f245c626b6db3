"""Where a request to open a WebSocket goes, and what all responses have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSServerHandshakeError, web

from gateway.serving import KEY, Pool, serving
from shoal.client.reconnection import COORDINATOR
from shoal.gateway.app import first_look, make_app
from shoal.gateway.http.proxies import trusted_proxies
from shoal.gateway.http.request_record import REQUEST_ID
from shoal.protocols.dispatch import Config
from shoal.transports import http_server
from shoal.transports.loop_share import LoopShare
from shoal.transports.strangers import Strangers
from transports.manual_clock import ManualClock

OPEN: dict[str, Any] = {"dispatch": Config(open=True)}
PROXY = "10.1.2.3"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


PATHS: list[tuple[str, dict[str, str], int]] = [
    ("/v1/responses", WITH_KEY, 426),  # for which Codex goes on without at once
    ("/v1/responses", {}, 401),
    ("/v1/chat/completions", WITH_KEY, 426),
    ("/v1/realtime?model=m", WITH_KEY, 404),
    ("/api/chat", WITH_KEY, 426),
    ("/v1/models", WITH_KEY, 200),
    ("/v1/models", {}, 401),
]


async def test_every_response_says_that_it_is_a_coordinators(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        for path in ("/healthz", "/v1/models", "/none", "/v1/jobs/none"):
            for headers in ({}, WITH_KEY):
                async with pool.session.get(pool.url + path, headers=headers) as got:
                    assert got.headers[COORDINATOR], path


async def test_workers_connect_at_any_path_that_is_none_of_http(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, wires=OPEN) as pool:
        for path in ("/", "/ws?token=none", "/a/b/c", "/v10"):
            async with pool.session.ws_connect(pool.url + path):
                pass


async def test_paths_of_http_stay_http(tmp_path: Path) -> None:
    async with serving(tmp_path, wires=OPEN) as pool:
        for path, headers, status in PATHS:
            with pytest.raises(WSServerHandshakeError) as refused:
                await pool.session.ws_connect(pool.url + path, headers=headers)

            assert (path, refused.value.status) == (path, status)
            assert refused.value.headers is not None
            assert refused.value.headers.get("Upgrade") == (
                "HTTP/1.1" if status == 426 else None
            )


async def test_a_stranger_whose_turn_does_not_come_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "TURN_TIMEOUT", 0.01)
    clock = ManualClock()
    share = LoopShare(clock, 0.1, 1.0, clock.cpu)
    share.charge(None, 2.0)

    async def upgrade(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    async with serving(tmp_path) as pool:
        assert pool.gateway is not None
        app = make_app(pool.gateway, upgrade, Strangers(share=share))
        listener = http_server.http_listener(app, "127.0.0.1", 0, None, Strangers())
        async with listener as bound:
            url = f"http://127.0.0.1:{bound.port}/healthz"
            async with pool.session.get(url) as response:
                assert response.status == 503
                assert "Retry-After" in response.headers
                assert response.headers[REQUEST_ID]


@pytest.mark.parametrize(
    ("fields", "known", "client"),
    [
        (f"Authorization: Bearer {KEY}", True, PROXY),
        (f"x-api-key: {KEY}", True, PROXY),
        (
            f"Authorization: Bearer {KEY}\r\nX-Forwarded-For: 192.0.2.7",
            True,
            "192.0.2.7",
        ),
        ("X-Forwarded-For: 192.0.2.7", False, "192.0.2.7"),
        ("Authorization: Bearer sk-wrong", False, PROXY),
        ("Accept: */*", False, PROXY),
        ("\0", False, PROXY),
    ],
)
async def test_first_look_tells_known_clients_from_strangers(
    pool: Pool, fields: str, known: bool, client: str
) -> None:
    assert pool.gateway is not None
    gateway = replace(pool.gateway, proxies=trusted_proxies([PROXY]))
    look = first_look(gateway)
    head = f"GET / HTTP/1.1\r\nHost: x\r\n{fields}\r\n\r\n".encode()

    assert look(head, PROXY) == (known, client)
    assert look(head[:-1], PROXY) == (False, PROXY)
