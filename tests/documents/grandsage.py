"""GrandSage's node and API server, from "WebSocket Protocol Documentation"."""

import asyncio
import json
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

PENDING = 0
FIELDS = {
    "state", "id", "system", "messages", "max_new_tokens", "temperature", "created_at",
}  # fmt: skip
INT32 = struct.Struct(">i")

logger = logging.getLogger(__name__)


class Node:
    """Joins an API server; ``answer`` makes the pieces of a task's text.

    It sends nothing but results: the document has no keepalive.
    """

    def __init__(
        self,
        server: str,
        token: str,
        answer: Callable[[dict[str, Any]], list[str]],
        *,
        name: str = "node_name",
        model: str = "model_name",
    ) -> None:
        query = {"token": token, "model": model, "max_concurrency": 2, "name": name}
        self._url = f"{server}?{urlencode(query)}"
        self._answer = answer
        self.tasks: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    async def run(self) -> int | None:
        """Serve until the connection ends; return the close code."""
        async with ClientSession() as session, session.ws_connect(self._url) as socket:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    continue
                task = json.loads(message.data)
                if not task.keys() >= FIELDS or task["state"] != PENDING:
                    self.warnings.append(message.data)
                    continue
                self.tasks.append(task)
                try:
                    await self._process(socket, task)
                except Exception:
                    logger.exception("the task failed")
                    await socket.close()
            return socket.close_code

    async def _process(
        self, socket: ClientWebSocketResponse, task: dict[str, Any]
    ) -> None:
        for text in self._answer(task):
            await socket.send_bytes(INT32.pack(task["id"]) + text.encode())
        await socket.send_bytes(INT32.pack(task["id"]))


@dataclass(slots=True)
class Task:
    """A task of the server, and what has become of it."""

    sent: dict[str, Any]
    text: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class ApiServer:
    """Gives tasks to the last node that connected; ``nodes`` has their parameters."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, str]] = []
        self.warnings: list[str] = []
        self.connected = asyncio.Event()
        self._tasks: dict[int, Task] = {}
        self._socket: web.WebSocketResponse | None = None

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a node's connection."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.nodes.append(dict(request.query))
        self._socket = socket
        self.connected.set()
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                self._receive(message.data)
        return socket

    async def ask(self, **task: Any) -> str:
        """Give the node a task; return its text."""
        assert self._socket is not None
        number = task["id"]
        mine = self._tasks[number] = Task(task)
        await self._socket.send_str(json.dumps(task))
        await mine.done.wait()
        del self._tasks[number]
        return mine.text

    def _receive(self, data: bytes) -> None:
        (number,) = INT32.unpack_from(data)
        task = self._tasks.get(number)
        if task is None:
            self.warnings.append(f"data for the unknown task {number}")
        elif len(data) > INT32.size:
            task.text += data[INT32.size :].decode()
        else:
            task.done.set()
