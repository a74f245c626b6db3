"""Coordinators that attack the workers which dial them."""

import asyncio
import base64
import hashlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohappyeyeballs
import pytest

from attacks.raw import BINARY, CLOSE, PING, TEXT, frame, masked_with
from attacks.siege import ANSWER, PROMPT, TOKEN, check_log
from gateway.serving import WAIT_MAX, eventually
from harness.speed import scaled
from shoal.domain.work import Work
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Finished, Item
from shoal.protocols.grandsage.codec import decode_work
from shoal.protocols.grandsage.worker import GrandSageNodeDialer
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports import websocket
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model

HONEST_ID = 77
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3


@dataclass(slots=True)
class Peer:
    """The coordinator's end of a worker's connection, as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)

    async def accept(self, *, right: bool = True) -> None:
        """Answer the upgrade."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        (line,) = [
            each
            for each in head.split(b"\r\n")
            if each.lower().startswith(b"sec-websocket-key:")
        ]
        key = line.partition(b":")[2].strip() if right else b"wrong"
        digest = base64.b64encode(hashlib.sha1(key + GUID).digest())
        await self.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
            b"Connection: upgrade\r\nSec-WebSocket-Accept: " + digest + b"\r\n\r\n"
        )

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def send_texts(self, *texts: str) -> None:
        await self.send(
            b"".join(frame(TEXT, text.encode(), masked=False) for text in texts)
        )

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the payloads that the worker sends, until it disconnects."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                size = (await self.reader.readexactly(2))[1] & 0x7F
                if size == 126:
                    size = int.from_bytes(await self.reader.readexactly(2), "big")
                elif size == 127:
                    size = int.from_bytes(await self.reader.readexactly(8), "big")
                mask = await self.reader.readexactly(4)
                yield masked_with(mask, await self.reader.readexactly(size))

    async def answered(self, task_id: int) -> bool:
        """Return whether the worker finishes a task before it disconnects."""
        async for payload in self.frames():
            if payload == task_id.to_bytes(4, "big"):
                return True
        return False


Attack = Callable[[Peer], Awaitable[None]]


def task(task_id: int, **more: object) -> str:
    """Write a task as a server does."""
    fields = {
        "state": 0,
        "id": task_id,
        "system": "",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_new_tokens": 5,
        "temperature": 0,
    }
    return json.dumps(fields | more)


@dataclass(slots=True)
class Echo:
    """An engine that answers at once, never, or endlessly."""

    models: Sequence[ServedModel] = (ServedModel("m1"),)
    slots: int = 2
    stuck: bool = False
    loud: int = 0  # pieces that come before the answer
    running: int = 0

    async def start(self) -> None:
        pass

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        self.running += 1
        try:
            if self.stuck:
                await asyncio.Event().wait()
            while self.loud:
                self.loud -= 1
                yield "x" * 100_000
                await asyncio.sleep(0)
            yield ANSWER
            yield Finished()
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class Siege:
    """A worker, and the server that it dials."""

    agent: Agent
    engine: Echo
    reports: list[WorkerEvent]
    served: asyncio.Event
    connections: int = 0


@asynccontextmanager
async def worker_of(
    attack: Attack, *, stuck: bool = False, deaf: bool = False
) -> AsyncIterator[Siege]:
    """Run a worker whose server attacks first, and is honest afterwards.

    What the attack leaves of its connection is used; then come honest connections.
    """
    its: Siege

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        its.connections += 1
        try:
            if its.connections == 1:
                await attack(peer)
            else:
                await peer.accept()
            await peer.send_texts(task(HONEST_ID))
            if await peer.answered(HONEST_ID):
                its.served.set()
                async for _ in peer.frames():
                    pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    listening = socket.create_server(("127.0.0.1", 0))
    if deaf:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listening.setsockopt(socket.SOL_SOCKET, buffer, 4096)
    server = await asyncio.start_server(serve, sock=listening)
    port = server.sockets[0].getsockname()[1]
    engine, reports = Echo(stuck=stuck), list[WorkerEvent]()
    member = WorkerProfile("n1", engine.models[0], engine.slots, token=TOKEN)
    agent = Agent(
        GrandSageNodeDialer(f"ws://127.0.0.1:{port}", member),
        websocket.connect_websocket,
        only_model(engine, EngineSlots(engine.slots)),
        LoopClock(),
        Random(1),
        reports.append,
    )
    its = Siege(agent, engine, reports, asyncio.Event())
    running = asyncio.create_task(agent.run())
    try:
        yield its
        assert not running.done(), "the worker gave up"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
        await server.wait_closed()
        assert engine.running == 0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.agent.RETRY_FIRST", 0.01)
    monkeypatch.setattr("shoal.worker.agent.RETRY_MAX", 0.05)
    monkeypatch.setattr("shoal.transports.websocket.CLOSE_TIMEOUT", 0.1)


@pytest.fixture(autouse=True)
def clean_log(caplog: pytest.LogCaptureFixture) -> object:
    caplog.set_level(logging.DEBUG)
    yield
    check_log(caplog)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system buffer little of what the worker sends."""
    connect = aiohappyeyeballs.start_connection

    async def connect_small(*args: Any, **options: Any) -> socket.socket:
        connected = await connect(*args, **options)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return connected

    monkeypatch.setattr(aiohappyeyeballs, "start_connection", connect_small)


def check_reports(its: Siege) -> None:
    """Check the reports to the user."""
    for event in its.reports:
        assert TOKEN not in event.reason
        assert event.reason.isprintable()


def talk(*texts: str) -> Attack:
    async def attack(peer: Peer) -> None:
        await peer.accept()
        await peer.send_texts(*texts)

    return attack


def frames(data: bytes) -> Attack:
    async def attack(peer: Peer) -> None:
        await peer.accept()
        await peer.send(data)

    return attack


def answer(data: bytes, *, hang: bool = False) -> Attack:
    async def attack(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(data)
        if hang:
            await peer.reader.read()
        raise ConnectionResetError

    return attack


async def wrong_key(peer: Peer) -> None:
    await peer.accept(right=False)


async def disconnect(peer: Peer) -> None:
    raise ConnectionResetError


async def stay_silent(peer: Peer) -> None:
    while await peer.reader.read(1 << 16):
        pass
    raise ConnectionResetError


async def drip(peer: Peer) -> None:
    with suppress(ConnectionError):
        for byte in b"HTTP/1.1 101 Switching Protocols\r\nX: " + b"x" * 10_000:
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
            await asyncio.sleep(0.001)
    raise ConnectionResetError


DEEP = "[" * 100_000
ODD_TEXTS = {
    "no JSON": "hello",
    "deep": DEEP,
    "deep in a task": f'{{"id":1,"messages":{DEEP}',
    "deep and whole": f'{{"id":1,"messages":[],"x":{"[" * 900}{"]" * 900}}}',
    "no object": "[1,2,3]",
    "null": "null",
    "no id": '{"messages":[]}',
    "a negative id": task(-1),
    "a huge id": task(2**32),
    "an endless id": '{"id":' + "9" * 100_000 + "}",
    "an id that is a float": '{"id":1.5,"messages":[]}',
    "an id that is a text": '{"id":"1","messages":[]}',
    "no messages": '{"id":1}',
    "messages that are a text": task(1, messages="hello"),
    "messages that are numbers": task(1, messages=[1, 2]),
    "a role that is a number": task(1, messages=[{"role": 5}]),
    "a system that is a number": task(1, system=7),
    "a temperature that is a text": task(1, temperature="hot"),
    "a temperature beyond all": '{"id":1,"messages":[],"temperature":1e999}',
    "tokens below one": task(1, max_new_tokens=-5),
    "tokens without end": task(1, max_new_tokens=10**100),
    "a state": task(1, state=2),
    "half a character": '{"id":1,"system":"\\ud800","messages":[]}',
    "half a stop": '{"id":99,"stop":',
    "a stop of nothing": '{"id":99,"stop":true}',
    "long": "x" * 3_000_000,
}


@pytest.mark.parametrize("name", ODD_TEXTS)
async def test_malformed_text_is_contained(name: str) -> None:
    async with worker_of(talk(ODD_TEXTS[name])) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        assert its.connections == 1
        check_reports(its)


@pytest.mark.parametrize("limit", [10**10, 10**30, -(10**30), 0])
def test_limits_fit_engine_integers(limit: int) -> None:
    # As an original server passes it on for anybody who asks.
    chat = decode_work(task(1, max_new_tokens=limit), "m1")

    assert chat.max_tokens is not None
    assert 1 <= chat.max_tokens < 2**63


BROKEN_FRAMES = {
    "reserved opcode": frame(3, b"x", masked=False),
    "reserved bits": frame(TEXT, b"x", reserved=4, masked=False),
    "masked": frame(TEXT, b"", masked=True) + frame(3, masked=False),
    "2^63 bytes": frame(BINARY, length=1 << 63, masked=False),
    "a gigabyte": frame(BINARY, length=1 << 30, masked=False),
    "no UTF-8": frame(TEXT, b"\xff\xfe", masked=False),
    "a long ping": frame(PING, bytes(126), masked=False),
    "a bad close": frame(CLOSE, b"\x00", masked=False),
    "close 1000": frame(CLOSE, b"\x03\xe8", masked=False),
    "close 4000": frame(CLOSE, b"\x0f\xa0Bye", masked=False),
    "close with controls": frame(
        CLOSE, b"\x03\xe8\x1b[2J\nERROR fake\x00\xc2\x9b", masked=False
    ),
    "HTTP again": b"HTTP/1.1 200 OK\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN_FRAMES)
async def test_malformed_frame_ends_the_connection_and_the_worker_reconnects(
    name: str,
) -> None:
    async with (
        worker_of(frames(BROKEN_FRAMES[name])) as its,
        asyncio.timeout(WAIT_MAX),
    ):
        await its.served.wait()

        assert its.connections == 2
        check_reports(its)


HANDSHAKES: dict[str, Attack] = {
    "hangs up": disconnect,
    "says nothing": stay_silent,
    "a byte at a time": drip,
    "wrong key": wrong_key,
    "TLS": answer(bytes.fromhex("1503030002022800") + bytes(100)),
    "garbage": answer(bytes(range(256)) * 10),
    "nothing": answer(b""),
    "200": answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"),
    "500 without end": answer(b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 1_000_000, hang=True),
    "101 without the rest": answer(b"HTTP/1.1 101 Yes\r\n\r\n"),
    "endless headers": answer(b"HTTP/1.1 101 Yes\r\n" + b"X: y\r\n" * 200_000),
    "a long header": answer(b"HTTP/1.1 101 Yes\r\nX: " + b"y" * 1_000_000),
    "bad status": answer(b"HTTP/1.1 999999 Yes\r\n\r\n"),
    "401": answer(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"),
    "redirect to itself": answer(
        b"HTTP/1.1 302 Found\r\nLocation: ?again\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirect to a file": answer(
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n"
        b"Content-Length: 0\r\n\r\n"
    ),
    "redirect to nothing": answer(
        b"HTTP/1.1 301 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirect without a place": answer(b"HTTP/1.1 307 Found\r\n\r\n"),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_malformed_handshake_is_retried(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For those that never end.  On a busy machine an honest one may take longer.
    monkeypatch.setattr("shoal.transports.websocket.CONNECT_TIMEOUT", scaled(0.3))
    async with worker_of(HANDSHAKES[name]) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        assert its.connections >= 2
        check_reports(its)


async def test_no_redirect_is_followed() -> None:
    followed = asyncio.Event()

    async def elsewhere(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        followed.set()
        writer.transport.abort()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    attack = answer(
        b"HTTP/1.1 307 There\r\nContent-Length: 0\r\n"
        b"Location: http://127.0.0.1:%d/\r\n\r\n" % port
    )
    async with worker_of(attack) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()
    server.close()
    await server.wait_closed()

    assert not followed.is_set()


async def test_thousands_of_concurrent_tasks_are_run_or_ended() -> None:
    async def attack(peer: Peer) -> None:
        await peer.accept()
        await peer.send_texts(*[task(number) for number in range(1000, 3000)])
        answered = 0
        async for payload in peer.frames():
            answered += len(payload) == 4
            if answered == 2000:
                break

    async with worker_of(attack) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        assert its.connections == 1
        assert not its.agent._jobs


async def test_repeated_stops_affect_nothing_else() -> None:
    texts = [json.dumps({"id": n, "stop": True}) for n in range(2000)]
    texts += [text for n in range(400) for text in (task(n), texts[n])]
    async with worker_of(talk(*texts)) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        assert its.connections == 1
        assert len(its.agent._jobs) == 0


async def test_restarted_task_is_a_new_one() -> None:
    stop = json.dumps({"id": 5, "stop": True})

    async def attack(peer: Peer) -> None:
        await peer.accept()
        await peer.send_texts(*[task(5), stop] * 50, task(5))
        await eventually(lambda: its.engine.running == 1)
        # Whatever id it has, it can be stopped, and then its slot is free.
        await peer.send_texts(stop)
        await eventually(lambda: its.engine.running == 0)
        its.engine.stuck = False

    async with worker_of(attack, stuck=True) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        assert its.connections == 1
        assert len(its.agent._jobs) == 0


@pytest.mark.usefixtures("little_room")
async def test_server_that_reads_nothing_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_MAX", 1 << 16)
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)

    async def attack(peer: Peer) -> None:
        await peer.accept()
        while not peer.writer.is_closing():
            # Each of them is refused at some length, and nobody listens.
            await peer.send_texts(*[task(3, state=9)] * 1000)
            await asyncio.sleep(0)
        raise ConnectionResetError

    async with worker_of(attack, deaf=True) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        check_reports(its)


@pytest.mark.usefixtures("little_room")
async def test_server_that_only_pings_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Reader and writer then wait for the same room.
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_MAX", 1 << 15)
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)

    async def attack(peer: Peer) -> None:
        await peer.accept()
        its.engine.loud = 20
        # What the engine says goes unread as well.
        await peer.send_texts(task(1), task(2))
        await peer.send(frame(PING, bytes(125), masked=False) * 5000)
        raise ConnectionResetError

    async with worker_of(attack, deaf=True) as its, asyncio.timeout(WAIT_MAX):
        await its.served.wait()

        check_reports(its)
