"""A server for the rendezvous of one run, with processes as ranks."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import WSMsgType, web

from shoal.training.rendezvous import Rendezvous
from shoal.training.run_events import run_id_of

TOKEN = "5c" * 32
POLL = 0.02  # seconds
PATIENCE = 5.0  # seconds: a busy machine keeps ranks waiting, too


class RunServer:
    """Hosts a rendezvous in a thread, as the coordinator does; it can forget it."""

    def __init__(self, size: int, least: int = 1) -> None:
        self._terms = size, least
        self._sockets: dict[str, web.WebSocketResponse] = {}
        self._loop = asyncio.new_event_loop()
        self.rendezvous = self._new()
        self.url = ""
        self._serves = threading.Event()
        self._ends = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._serves.wait()

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return what `shoal train` sets for a rank."""
        return {
            **os.environ,
            "SHOAL_RUN": run_id_of(TOKEN),
            "SHOAL_RUN_TOKEN": TOKEN,
            "SHOAL_RUN_URL": self.url,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._terms[0]),
            "OMP_NUM_THREADS": "1",
        }

    def restart(self) -> None:
        """Forget everything, and close all connections."""
        asyncio.run_coroutine_threadsafe(self._restart(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _new(self) -> Rendezvous:
        return Rendezvous(
            *(run_id_of(TOKEN), *self._terms),
            random_bytes=os.urandom,
            patience=PATIENCE,
        )

    async def _restart(self) -> None:
        self.rendezvous = self._new()
        for socket in [*self._sockets.values()]:
            await socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/runs/{run}/ranks", self._ranks)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        self._serves.set()
        expires = asyncio.create_task(self._expire())
        await self._ends.wait()
        expires.cancel()
        for socket in [*self._sockets.values()]:
            await socket.close()
        await runner.cleanup()

    async def _ranks(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        member = request.query["member"]
        self._sockets[member] = socket
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                found = json.loads(message.data)
                self._send(self.rendezvous.receive(member, found, time.monotonic()))
        if self._sockets.get(member) is socket:
            del self._sockets[member]
            self._send(self.rendezvous.lost(member, time.monotonic()))
        return socket

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(POLL)
            deadline = self.rendezvous.deadline
            if deadline is not None and time.monotonic() >= deadline:
                self._send(self.rendezvous.expire(time.monotonic()))

    def _send(self, outgoing: list[tuple[str, Mapping[str, Any]]]) -> None:
        for member, message in outgoing:
            if member in self._sockets:
                self._loop.create_task(_post(self._sockets[member], message))


async def _post(socket: web.WebSocketResponse, message: Mapping[str, Any]) -> None:
    with suppress(ConnectionError):  # the rank is gone
        await socket.send_json(message)


@contextmanager
def serving(size: int, least: int = 1) -> Iterator[RunServer]:
    server = RunServer(size, least)
    try:
        yield server
    finally:
        server.close()
