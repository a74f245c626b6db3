"""The transport port under attack on real sockets; honest nodes still get answers."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientSession

import shoal
from gateway.serving import WAIT_MAX, eventually
from originals.macfleet import (
    CONTROL,
    HEAD,
    RESULT,
    V2,
    Frame,
    PeerTransport,
    TaskWorker,
    client_context,
    hang_up,
    packed,
)
from shoal.app.server import RunningCoordinator, run_coordinator
from shoal.client.async_calls import AsyncCallFuture
from shoal.config import ServeConfig
from shoal.protocols.macfleet import Config
from shoal.protocols.macfleet.codec.frames import FrameType

TOKEN = "a-fleet-token"
HUB = "hub"
HOST = "127.0.0.1"
ELSEWHERE = "127.0.0.2"  # another address of this machine, on Linux
CROWD = 20  # parallel connections
MIB = 1 << 20
SERVER = "shoal.protocols.macfleet.handshake"
FUNCTIONS: dict[str, Callable[..., Any]] = {"demo.add": lambda a, b: a + b}


@dataclass
class Besieged:
    """A coordinator whose transport is attacked."""

    running: RunningCoordinator
    session: ClientSession
    caplog: pytest.LogCaptureFixture

    @property
    def port(self) -> int:
        return self.running.ports["macfleet"]["transport"]

    async def until_ended(self, reason: str, count: int = 1) -> None:
        """Wait until ``count`` connections of nodes have ended for a reason."""

        def ended() -> bool:
            messages = (each.getMessage() for each in self.caplog.records)
            return (
                sum("disconnected" in each and reason in each for each in messages)
                == count
            )

        await eventually(ended)

    @asynccontextmanager
    async def bare(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a TLS connection and send nothing."""
        reader, writer = await asyncio.open_connection(
            HOST, self.port, ssl=client_context()
        )
        try:
            yield reader, writer
        finally:
            writer.close()

    async def worker(
        self,
        name: str,
        functions: dict[str, Callable[..., Any]] | None = None,
        local: str = "",
    ) -> TaskWorker:
        transport = PeerTransport(name, TOKEN, local=local)
        connection = await transport.connect(HUB, self.port)
        return TaskWorker(connection, FUNCTIONS if functions is None else functions)

    @property
    def workers(self) -> list[str]:
        return [str(each) for each in self.running.hub.pool.workers]

    async def wait_joined(self, name: str) -> None:
        await eventually(lambda: f"macfleet:{name}" in self.workers)

    async def explained(self, job_id: str) -> str:
        """Return the explanation of a job, as ``shoal jobs explain`` prints it."""
        url = f"{self.running.url}/admin/jobs/{job_id}/explain"
        async with self.session.get(url) as response:
            return await response.text()


@pytest.fixture
async def hub(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Besieged]:
    """A coordinator of a fleet; at the end an honest worker runs a task."""
    caplog.set_level("INFO")
    settings = ServeConfig(port=0, data_dir=tmp_path, name=HUB, drain=0.0)
    fleet = Config(token=TOKEN, heartbeat_port=0, transport_port=0)
    async with run_coordinator(settings, {"macfleet": fleet}) as running:
        headers = {"Authorization": f"Bearer {running.api_key}"}
        async with ClientSession(headers=headers) as session:
            found = Besieged(running, session, caplog)
            yield found
            worker = await found.worker("honest")
            async with worker.running(), calls(found) as pool:
                async with asyncio.timeout(WAIT_MAX):
                    await found.wait_joined("honest")
                    assert await pool.call("demo.add", 19, 23) == 42
            await hang_up(worker.connection.writer)


def calls(hub: Besieged) -> shoal.AsyncPool:
    return shoal.AsyncPool(hub.running.url, api_key=hub.running.api_key)


async def read_rest(reader: asyncio.StreamReader) -> bytes:
    """Return everything received until the connection ends."""
    async with asyncio.timeout(WAIT_MAX):
        try:
            return await reader.read(-1)
        except (ConnectionError, ssl.SSLError):
            return b""


@pytest.mark.parametrize("begun", [b"", Frame(0, CONTROL, V2, 0, b"x").packed()[:13]])
async def test_stalled_handshake_is_disconnected(
    hub: Besieged, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module(SERVER), "STEP_TIMEOUT", 0.5)

    async def dawdle() -> bytes:
        async with hub.bare() as (reader, writer):
            writer.write(begun)
            return await read_rest(reader)

    assert await asyncio.gather(*(dawdle() for _ in range(CROWD))) == [b""] * CROWD
    await hub.until_ended("sent nothing for", CROWD)


async def test_large_frame_before_the_handshake_is_rejected_unbuffered(
    hub: Besieged,
) -> None:
    before = psutil.Process().memory_info().rss
    head = HEAD.pack(0, CONTROL, V2, 200 * MIB, 0, 0, 0)
    async with hub.bare() as (reader, writer):
        writer.write(head + bytes(MIB))

        assert await read_rest(reader) == b""

    await hub.until_ended("exceeds the limit")
    assert psutil.Process().memory_info().rss - before < 64 * MIB


async def test_malformed_bytes_get_no_answer(hub: Besieged) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n" + bytes(24), bytes(24), b"\xff" * 65536):
        async with hub.bare() as (reader, writer):
            writer.write(data)
            assert await read_rest(reader) == b""


async def test_task_is_requeued_after_a_corrupted_frame(
    hub: Besieged,
) -> None:
    broken = bytearray(Frame(1, RESULT, 0, 0, packed({"task_id": "x"})).packed())
    broken[-1] ^= 1
    story = await story_of_a_task(hub, bytes(broken))

    assert "fails its CRC32" in story
    await hub.until_ended("fails its CRC32")


async def test_task_is_requeued_after_an_oversized_frame(
    hub: Besieged,
) -> None:
    # Of tasks and results, the rest is read past.
    story = await story_of_a_task(
        hub, HEAD.pack(1, FrameType.STATE, 0, 1 << 30, 0, 0, 0)
    )

    assert "exceeds the limit" in story


async def test_task_is_requeued_after_a_clean_close(
    hub: Besieged,
) -> None:
    assert "closed by peer" in await story_of_a_task(hub, b"")


async def story_of_a_task(hub: Besieged, last: bytes) -> str:
    """End a worker before its task; return how the task was completed.

    ``last`` are the last bytes the worker sends; empty: it disconnects.
    """
    stuck = threading.Event()
    never = {"demo.add": lambda a, b: stuck.wait(WAIT_MAX)}
    first = await hub.worker("first", never)
    async with calls(hub) as pool, asyncio.timeout(WAIT_MAX):
        async with first.running():
            await hub.wait_joined("first")
            task = await pool.submit("demo.add", 19, 23)
            assert isinstance(task, AsyncCallFuture)
            await eventually(lambda: "demo.add" in first.names)
            if last:
                first.connection.writer.write(last)
                await eventually(lambda: bool(first.dead))
            else:
                await hang_up(first.connection.writer)
            await eventually(lambda: "macfleet:first" not in hub.workers)
            stuck.set()
        second = await hub.worker("second")
        async with second.running():
            assert await task == 42
        await hang_up(second.connection.writer)
    await hang_up(first.connection.writer)
    return await hub.explained(task.job_id)


async def test_seat_cannot_be_taken_from_another_address(
    hub: Besieged,
) -> None:
    honest = await hub.worker("node-b")
    async with honest.running():
        await hub.wait_joined("node-b")
        thief = await hub.worker("node-b", {}, local=ELSEWHERE)

        assert await read_rest(thief.connection.reader) == b""
        await hub.until_ended("can only reconnect from there")
        async with calls(hub) as pool:
            assert await pool.call("demo.add", 1, 2) == 3

        again = await hub.worker("node-b")
        async with again.running(), calls(hub) as pool:
            await eventually(lambda: bool(honest.dead))
            await hub.wait_joined("node-b")
            assert await pool.call("demo.add", 3, 4) == 7
        await hang_up(again.connection.writer)
    await hang_up(honest.connection.writer)
