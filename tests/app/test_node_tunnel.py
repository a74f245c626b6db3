"""Connections through which one node reaches the sockets of another."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shoal.app import node_tunnel
from shoal.app.node_tunnel import SUBJECT, Bridge, Entrance
from shoal.store.lease import LeaseRow
from shoal.transports.link import LinkClosed
from shoal.transports.strangers import Strangers
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ConnectionPolicy, tcp_listener
from shoal.transports.tls import ServerTls, context_of_any, self_signed_tls

SECRET = "5e" * 16
SIZE = 3 << 20  # bytes: more than all buffers on the way


class Hub:
    """A node that has the pool: a socket that echoes, and a wire's port that does."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "link"
        self.strangers = Strangers()
        self.peers: list[str] = []
        self.tls: ServerTls
        self.row: LeaseRow

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self.tls = await asyncio.to_thread(self_signed_tls, SUBJECT)
        server = await asyncio.start_unix_server(echo, self.socket)
        policy = ConnectionPolicy(strangers=self.strangers)
        async with server, tcp_listener("127.0.0.1", 0, self.serve, policy) as bound:
            ports = {"wire tcp": bound.port}
            entrance = Entrance(
                SECRET, {"link": self.socket}, "127.0.0.1", ports, self.strangers
            )
            async with entrance.open("127.0.0.1", 0, self.tls) as port:
                self.row = LeaseRow(
                    *(True, "hub", 1, f"127.0.0.1:{port}"),
                    *(self.tls.certificate_hash.hex(), SECRET, json.dumps(ports)),
                )
                yield

    async def serve(self, link: TcpLink) -> None:
        self.peers.append(link.peer)
        with suppress(LinkClosed):
            while True:
                for data in await link.receive():
                    assert isinstance(data, bytes)
                    await link.send(data)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    hub = Hub(folder)
    async with hub.open():
        yield hub


@asynccontextmanager
async def bridged(folder: Path, row: LeaseRow) -> AsyncIterator[tuple[Bridge, Path]]:
    path = folder / "near"
    async with Bridge("127.0.0.2").open({"link": path}) as bridge:
        await bridge.follow(row)
        yield bridge, path


async def test_bytes_arrive_as_they_were_sent(hub: Hub, tmp_path: Path) -> None:
    sent = Random(1).randbytes(SIZE)
    async with bridged(tmp_path, hub.row) as (bridge, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)

        assert await reader.readexactly(SIZE) == sent
        assert bridge.was_used("link")
        writer.close()
        await writer.wait_closed()


async def test_a_wire_sees_who_came_to_the_other_node(hub: Hub, tmp_path: Path) -> None:
    port = json.loads(hub.row.ports)["wire tcp"]
    async with bridged(tmp_path, hub.row):
        reader, writer = await asyncio.open_connection(
            "127.0.0.2", port, local_addr=("127.0.0.9", 0)
        )
        writer.write(b"hello")

        assert await reader.readexactly(5) == b"hello"
        assert hub.peers == ["127.0.0.9"]
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("secret", ["", "6f" * 16], ids=["given up", "another has it"])
async def test_connections_end_with_the_pool(
    hub: Hub, tmp_path: Path, secret: str
) -> None:
    async with bridged(tmp_path, hub.row) as (bridge, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"

        await bridge.follow(hub.row._replace(beat=2, held=False))  # it is the same one
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        await bridge.follow(hub.row._replace(secret=secret))

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "6f" * 16},
        {"certificate": "00" * 32},
        {"node": "127.0.0.1:1"},
        {"secret": ""},
    ],
    ids=["wrong secret", "another program", "nobody there", "not ready"],
)
async def test_nothing_passes_unless_both_ends_know_each_other(
    hub: Hub, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with bridged(tmp_path, hub.row._replace(**change)) as (_, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"a")

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()


async def test_a_node_that_cannot_be_reached_is_logged_once(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fronts try many times a second; after it was reached, it is logged again."""
    lost = hub.row._replace(certificate="00" * 32)
    async with bridged(tmp_path, lost) as (bridge, path):
        for row, logged in ((lost, 1), (lost, 1), (hub.row, 1), (lost, 2)):
            await bridge.follow(row)
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"a")
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readexactly(1)
            writer.close()

            assert caplog.text.count("is another program than the node") == logged


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"x" * (node_tunnel.FIRST_LINE_MAX + 1),
        b'{"secret": 1, "port": "link"}\n',
        b'{"secret": "%s", "port": "other"}\n' % SECRET.encode(),
        b'{"secret": "\xff", "port": "link"}\n',
    ],
)
async def test_what_is_no_first_line_is_cut_off(hub: Hub, line: bytes) -> None:
    reader, writer = await to_entrance(hub)
    writer.write(line)

    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1)
    writer.close()


async def test_strangers_do_not_keep_nodes_out(hub: Hub, tmp_path: Path) -> None:
    """Those that say nothing are cut off when there are many."""
    many = [await to_entrance(hub) for _ in range(node_tunnel.UNKNOWN_MAX + 1)]
    reader, writer = many[0]
    assert await reader.read() == b""

    async with bridged(tmp_path, hub.row) as (_, path):
        reader, near = await asyncio.open_unix_connection(path)
        near.write(b"a")
        assert await reader.readexactly(1) == b"a"
        near.close()
        await near.wait_closed()
    for _, writer in many:
        writer.close()


async def to_entrance(hub: Hub) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context: ssl.SSLContext = context_of_any()
    port = int(hub.row.node.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)
