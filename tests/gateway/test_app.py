"""Where a request to open a WebSocket goes, and what all responses have."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSServerHandshakeError

from gateway.serving import KEY, serving
from shoal import __version__
from shoal.client.reconnection import VERSION
from shoal.protocols.dispatch import Config

OPEN: dict[str, Any] = {"dispatch": Config(open=True)}
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


async def test_every_response_has_the_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        for path in ("/healthz", "/v1/models", "/none", "/v1/jobs/none"):
            for headers in ({}, WITH_KEY):
                async with pool.session.get(pool.url + path, headers=headers) as got:
                    assert got.headers[VERSION] == __version__, path


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
