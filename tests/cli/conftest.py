"""Fixtures with several kinds of coordinators."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from cli.coordinators import NEVER, Answers, Sites
from client.coordinator_thread import beside

__all__ = ["beside"]


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    runners: list[web.ServerRunner] = []

    async def start(
        answers: Answers,
        *,
        status: int = 200,
        redirects: bool = False,
        posted: list[Any] | None = None,
    ) -> str:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "POST" and posted is not None:
                posted.append(await request.json())
            if request.path not in answers:
                page = "<!DOCTYPE html><pre>Cannot GET it</pre>"
                return web.Response(status=404, text=page, content_type="text/html")
            answer = answers[request.path]
            if answer is NEVER:
                await asyncio.Event().wait()
            if redirects:
                raise web.HTTPFound(str(answer))
            return web.json_response(answer, status=status)

        server = web.Server(handle, access_log=None, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()
