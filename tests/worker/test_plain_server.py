"""Our node at a GrandSage server without Shoal's extensions; all parts are real."""

import asyncio
import json
import logging
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs

import pytest
from aiohttp import WSMsgType, web

from harness.speed import PATIENCE
from models.tiny_answers import ANSWERS, COUNT
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.text_tasks import TaskRunner
from shoal.protocols import discover
from shoal.protocols.grandsage.worker import BROKEN
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports import websocket
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model

MODEL = Path(__file__).parents[1] / "models" / "tiny.gguf"
PROTOCOL = discover()["grandsage"]

Serve: TypeAlias = Callable[[web.WebSocketResponse], Awaitable[None]]


class Server:
    """Passes each connection to the next handler; counts connections."""

    def __init__(self, *connections: Serve) -> None:
        self._connections = list(connections)
        self.queries: list[str] = []
        self.served = asyncio.Event()

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.queries.append(request.raw_path.partition("?")[2])
        socket = web.WebSocketResponse(timeout=1.0)
        await socket.prepare(request)
        if self._connections:
            await self._connections.pop(0)(socket)
        if not self._connections:
            self.served.set()
        await socket.close()
        return socket


@asynccontextmanager
async def node_at(
    server: Server, reports: list[WorkerEvent], slots: int = 2
) -> AsyncIterator["asyncio.Task[str]"]:
    """Run our node against ``server`` within the block."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = LlamaEngine("tiny", MODEL, slots=slots)
    await engine.start()
    member = WorkerProfile("n n&1", engine.models[0], slots, "s?cret")
    agent = Agent(
        PROTOCOL.dial(f"ws://127.0.0.1:{runner.addresses[0][1]}", member),
        websocket.connect_websocket,
        only_model(TaskRunner(engine, member.model), EngineSlots(slots)),
        LoopClock(),
        random.Random(0),
        reports.append,
    )
    running = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        await runner.cleanup()


def task(id_: int, question: str, max_new_tokens: int = 400) -> str:
    """Return a task as the original server writes it."""
    return json.dumps(
        {
            "state": 0,
            "id": id_,
            "resp": "",
            "modLastCheckedPos": 0,
            "system": "",
            "messages": [{"role": "user", "content": question}],
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
            "created_at": 1,
            "user": {"token": "-", "name": "alice"},
        }
    )


async def frame(socket: web.WebSocketResponse) -> tuple[int, str]:
    """Return the next frame's id and text; skip keepalives."""
    while True:
        message = await socket.receive()
        if message.type is WSMsgType.TEXT:
            assert message.data == "", "a plain server is sent no other text"
            continue
        assert message.type is WSMsgType.BINARY, message
        (id_,) = struct.unpack_from("!I", message.data)
        return id_, message.data[4:].decode()


async def answer(socket: web.WebSocketResponse, id_: int) -> str:
    """Return the text of a task whose frames are the only ones, up to its end."""
    text = ""
    while True:
        got, piece = await frame(socket)
        assert got == id_
        if not piece:
            return text
        text += piece


async def test_task_is_answered_in_frames_and_an_end() -> None:
    texts: list[str] = []

    async def serve(socket: web.WebSocketResponse) -> None:
        for id_, question in enumerate(ANSWERS, start=2**32 - len(ANSWERS)):
            await socket.send_str(task(id_, question))
            texts.append(await answer(socket, id_))

    server = Server(serve)
    async with node_at(server, []):
        await server.served.wait()

    assert texts == list(ANSWERS.values())
    (query,) = server.queries
    assert parse_qs(query) == {
        "token": ["s?cret"],
        "model": ["tiny"],
        "max_concurrency": ["2"],
        "name": ["n n&1"],
    }


async def test_stopped_task_gets_no_end_and_frees_its_slot() -> None:
    async def serve(socket: web.WebSocketResponse) -> None:
        await socket.send_str(task(7, "Count to sixty."))
        assert (await frame(socket))[0] == 7
        await socket.send_str('{"id":7,"stop":true}')
        await socket.send_str(task(8, "ping"))
        id_, text = await frame(socket)
        while id_ == 7:
            assert text, "a stopped task has no end"
            id_, text = await frame(socket)
        assert text + await answer(socket, 8) == "pong"

    server = Server(serve)
    async with node_at(server, [], slots=1):
        await server.served.wait()


async def test_concurrent_tasks_are_limited_to_the_slots() -> None:
    order: list[int] = []

    async def serve(socket: web.WebSocketResponse) -> None:
        for id_ in (1, 2, 3):
            await socket.send_str(task(id_, "Count to sixty."))
        ended: set[int] = set()
        while len(ended) < 3:
            id_, text = await frame(socket)
            order.append(id_)
            running = set(order) - ended
            assert len(running) <= 1, "one slot, so one at a time"
            if not text:
                ended.add(id_)

    server = Server(serve)
    async with node_at(server, [], slots=1):
        await server.served.wait()

    assert sorted(set(order)) == [1, 2, 3]


async def test_an_answer_that_a_break_may_have_cut_says_so() -> None:
    pieces: list[str] = []

    async def first(socket: web.WebSocketResponse) -> None:
        await socket.send_str(task(5, "Count to sixty."))
        for _ in range(3):
            pieces.append((await frame(socket))[1])

    async def second(socket: web.WebSocketResponse) -> None:
        pieces.append(await answer(socket, 5))

    server = Server(first, second)
    reports: list[WorkerEvent] = []
    async with node_at(server, reports):
        await server.served.wait()

    # What was under way when the connection broke is lost.
    assert COUNT.startswith("".join(pieces[:3]))
    assert pieces[3] == BROKEN
    assert reports[0].kind == "waiting", "it broke too soon to be called joined"


async def test_failed_task_is_ended_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts: list[str] = []

    async def serve(socket: web.WebSocketResponse) -> None:
        for id_ in (9, 10):  # more than the model can read
            await socket.send_str(task(id_, "x" * 20_000))
            texts.append(await answer(socket, id_))
        await socket.send_str(task(11, "ping"))
        texts.append(await answer(socket, 11))

    server = Server(serve)
    with caplog.at_level(logging.WARNING):
        async with node_at(server, []):
            await server.served.wait()

    too_long = "\n[The conversation is too long for this model.]"
    assert texts == [too_long, too_long, "pong"]
    assert "task 9 failed" in caplog.text
    assert "xxxx" not in caplog.text


async def test_long_conversation_loses_its_oldest_messages() -> None:
    old = {"role": "user", "content": "x" * 20_000}
    texts: list[str] = []

    async def serve(socket: web.WebSocketResponse) -> None:
        sent = json.loads(task(12, "ping"))
        sent["messages"] = [old, old, *sent["messages"]]
        await socket.send_str(json.dumps(sent))
        texts.append(await answer(socket, 12))

    server = Server(serve)
    async with node_at(server, []):
        await server.served.wait()

    assert texts == ["pong"]


@pytest.mark.parametrize(
    ("code", "advice"), [(4001, "parameters"), (4002, "--token")], ids=["4001", "4002"]
)
async def test_refusal_is_final(code: int, advice: str) -> None:
    async def serve(socket: web.WebSocketResponse) -> None:
        await socket.close(code=code, message=b"Invalid token")

    server = Server(serve)
    reports: list[WorkerEvent] = []
    async with node_at(server, reports) as running:
        reason = await running

    assert advice in reason
    assert reports == [WorkerEvent("refused", reason)]
