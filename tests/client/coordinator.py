"""A small server of calls on 127.0.0.1 that behaves as a coordinator does.

It follows docs/protocols/calls.md to the letter, and calls functions itself, one after
the other, so that tests can say what is answered and when.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from harness.speed import PATIENCE
from shoal.client.coordinator import CoordinatorAddress
from shoal.tasks.errors import format_task_error
from shoal.tasks.exception_record import encode_exception
from shoal.tasks.sent_task import SentTask
from shoal.tasks.values import Form, ValueReader, load_pickle, pack

KEY = "sk-test"
VALUE_MAX = 1 << 20  # bytes of a value in an answer

Item = list[Any]


@dataclass(slots=True)
class Coordinator:
    """Its state, the items that it received, and its behaviour.

    While it is ``paused``, functions are not called until ``resume``.
    """

    port: int = 0
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)
    refusals: list[Item] = field(default_factory=list)  # for calls to come
    paused: bool = False
    trusts_code: bool = True
    sockets: list[web.WebSocketResponse] = field(default_factory=list)
    messages: int = 0
    _done: dict[str, Any] = field(default_factory=dict)
    _waiting: list[tuple[web.WebSocketResponse, Item]] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> CoordinatorAddress:
        return CoordinatorAddress((self.url,), KEY)

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.items if item[0] == 1]

    @property
    def cancelled(self) -> list[int]:
        return [item[1] for item in self.items if item[0] == 2]

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/calls", self._calls)
        app.router.add_get("/v1/tasks", self._tasks)
        app.router.add_put("/v1/blobs/{digest}", self._put)
        app.router.add_get("/v1/blobs/{digest}", self._get)  # and HEAD
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self.hang_up()
        await self._runner.cleanup()

    async def hang_up(self) -> None:
        """Abort all connections."""
        for socket in self.sockets:
            connection = socket._req.transport if socket._req else None
            if connection is not None:
                connection.abort()
        self.sockets.clear()
        self._waiting.clear()

    async def resume(self) -> None:
        """Run the calls that were paused."""
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for socket, item in waiting:
            await self._send_items(socket, [self._answer(item)])

    async def send(self, *items: Item) -> None:
        """Send items on the newest connection."""
        await self._send_items(self.sockets[-1], list(items))

    async def wait_for_calls(self, calls: int) -> None:
        """Wait until it has received ``calls`` calls."""
        await self.eventually(lambda: len(self.calls) >= calls)

    async def eventually(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110  # nothing tells when it is
                await asyncio.sleep(0.001)

    async def _calls(self, request: web.Request) -> web.StreamResponse:
        self._authorize(request)
        socket = web.WebSocketResponse(max_msg_size=0, compress=False)
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            self.messages += 1
            items = msgspec.msgpack.decode(message.data)
            self.items += items
            answers = [
                answer
                for item in items
                if item[0] == 1
                for answer in self._replies(socket, item)
            ]
            if answers:
                await self._send_items(socket, answers)
        return socket

    def _replies(self, socket: web.WebSocketResponse, item: Item) -> list[Item]:
        _, number, *_, options = item
        lacking = [
            each.hex()
            for each in options.get("blobs", [])
            if each.hex() not in self.blobs
        ]
        if lacking:
            return [[3, number, "lacks", " ".join(lacking), {}]]
        if self.refusals:
            kind, text, meta = self.refusals.pop(0)
            return [[3, number, kind, text, meta]]
        durable = options.get("kept", True)
        accepted = [[1, number, f"job{number}"]] if durable else []
        if self.paused:
            self._waiting.append((socket, item))
            return accepted
        return [*accepted, self._answer(item)]

    def _answer(self, item: Item) -> Item:
        _, number, name, args, kwargs, options = item
        key = options.get("key")
        if key is None or key not in self._done:
            outcome = self._outcome(name, args, kwargs, options)
            if key is not None:
                self._done[key] = outcome
        else:
            outcome = self._done[key]
        return [outcome[0], number, *outcome[1:]]

    def _outcome(
        self, name: str, args: bytes, kwargs: bytes, options: Mapping[str, Any]
    ) -> Item:
        code = "code" in options.get("needs", [])
        if code and not self.trusts_code:
            return [3, "code", "no worker here runs functions sent by clients", {}]
        if not code and name not in self.functions:
            return [3, "unknown", f"no worker has the task {name!r}", {}]
        reader = ValueReader(
            lambda digest: self.blobs[digest.hex()], load_pickle if code else None
        )
        positional, named = reader.read(args), reader.read(kwargs)
        function = positional.pop(0) if code else self.functions[name]
        if isinstance(function, SentTask):
            positional, named = function.bind(positional, named, exact=True)
            function = function.function
        try:
            form = Form.EXACT_OR_PICKLED if code else Form.EXACT
            value = pack(function(*positional, **named), form=form).data
        except Exception as error:
            record = encode_exception(error, pickles=code)
            meta = {"job": "job1", "exception": record}
            return [3, "raised", format_task_error(error), meta]
        if len(value) <= VALUE_MAX:
            return [2, value, {}]
        digest = hashlib.sha256(value).hexdigest()
        self.blobs[digest] = value
        return [2, b"", {"value": digest}]

    async def _send_items(
        self, socket: web.WebSocketResponse, items: list[Item]
    ) -> None:
        if not socket.closed:
            await socket.send_bytes(msgspec.msgpack.encode(items))

    async def _tasks(self, request: web.Request) -> web.Response:
        self._authorize(request)
        tasks = [{"name": name, "workers": 1, "slots": 2} for name in self.functions]
        code = int(self.trusts_code)
        return web.json_response(
            {"tasks": tasks, "workers": 1, "slots": 2, "code": code, "unnamed": 0}
        )

    async def _put(self, request: web.Request) -> web.Response:
        self._authorize(request)
        body = await request.read()
        digest = request.match_info["digest"]
        assert hashlib.sha256(body).hexdigest() == digest
        self.blobs[digest] = body
        self.put.append(digest)
        return web.Response(status=201)

    async def _get(self, request: web.Request) -> web.Response:
        self._authorize(request)
        found = self.blobs.get(request.match_info["digest"])
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=found)

    def _authorize(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized


@asynccontextmanager
async def running_coordinator(
    **functions: Callable[..., Any],
) -> AsyncIterator[Coordinator]:
    """Run a coordinator within the block."""
    server = Coordinator(functions=functions)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
