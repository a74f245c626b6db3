"""Gives each WebSocket connection to the protocol that claims it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from shoal.domain.errors import NotAdmitted, Refused
from shoal.ledger.keys import verify
from shoal.protocols import discover
from shoal.protocols.session import (
    Accepted,
    Hello,
    Identity,
    Setting,
    WebSocketRoute,
)
from shoal.runtime.clock import Clock
from shoal.runtime.door import POLICY, Door
from shoal.runtime.hub import Hub
from shoal.runtime.link import Link
from shoal.runtime.serving import serve_worker
from shoal.transports import websocket

FAREWELL = 3.0  # seconds that workers' connections get to end

log = logging.getLogger("shoal.upgrades")


class Upgrades:
    """The workers' connections, from the request that opens one to its end.

    ``wires`` holds protocols' configurations by name, and ``token`` is what workers
    present where theirs has none.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        door: Door,
        wires: Mapping[str, Any],
        token: str,
        identity: Identity,
        draw: Callable[[int], bytes],
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._door = door
        self._tasks: asyncio.TaskGroup | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._routes: list[tuple[str, WebSocketRoute]] = []
        start = int(clock.wall() * 1000)
        for name, protocol in discover().items():
            config = wires.get(name) or protocol.config()
            admission = door.admission(name, config.token or token)
            setting = Setting(
                start, admission, draw, identity, verify, clock.wall() - clock.now()
            )
            for endpoint in protocol.endpoints(config, setting):
                self._routes.append((name, endpoint))
        self._routes.sort(key=lambda route: route[1].rank)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Take connections from now on, each served by one of ``tasks``."""
        self._tasks = tasks

    async def close(self) -> None:
        """Take no more connections; give those that are ending a moment for it."""
        self._tasks = None
        if self._serving:
            await asyncio.wait(self._serving, timeout=FAREWELL)
        for serving in self._serving:
            serving.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that would open a WebSocket.

        Raises TooManyFailures, StoreError, or an HTTPException.
        """
        if self._tasks is None:
            raise web.HTTPServiceUnavailable(text="the coordinator is stopping\n")
        address = request.remote or ""
        self._door.check(address)
        path, _, query = request.raw_path.partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        hello = Hello(path, query, headers, address)
        for wire, route in self._routes:
            if route.claims(hello):
                return await self._accept(request, hello, wire, route, self._tasks)
        raise web.HTTPNotFound(text="no worker protocol answers at this address\n")

    async def _accept(
        self,
        request: web.Request,
        hello: Hello,
        wire: str,
        route: WebSocketRoute,
        tasks: asyncio.TaskGroup,
    ) -> web.StreamResponse:
        try:
            accepted = route.accept(hello, self._clock.now())
        except Refused as refused:
            # Browsers and most clients see a close code, but no HTTP status.
            link, response = await websocket.accept(request, {}, route.message_max)
            await link.close(refused.code, str(refused))
            _log_refusal(wire, link, refused)
            return response
        await self._door.record(accepted.admitted)
        link, response = await websocket.accept(
            request, accepted.headers, route.message_max
        )
        # A task of its own, for a handler is cancelled when its connection is lost,
        # and what the worker said last has yet to be read.
        serving = tasks.create_task(self._serve(wire, accepted, link))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        await asyncio.shield(serving)
        return response

    async def _serve(self, wire: str, accepted: Accepted, link: Link) -> None:
        try:
            with self._door.entered(accepted.admitted, link):
                await serve_worker(self._hub, self._clock, wire, accepted.session, link)
        except NotAdmitted as error:
            await link.close(POLICY, str(error))
            _log_refusal(wire, link, error)


def _log_refusal(wire: str, link: Link, error: Exception) -> None:
    log.warning("refused wire=%s peer=%s reason=%r", wire, link.peer, str(error))
