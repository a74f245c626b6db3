"""Encrypted WebSockets, over real sockets and with somebody in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from shoal.protocols.seam.encrypted_stream import PREFACE, SECOND_SIZE
from shoal.protocols.seam.session import Data
from shoal.transports.link import LinkClosed
from shoal.transports.link_encryption import accept_encryption
from shoal.transports.websocket import WebSocketLink, connect_websocket
from transports.test_websocket import listening

SECRET = b"a prompt that nobody else may read "
MESSAGE_MAX = 2 << 20


@dataclass
class Between:
    """A proxy that records what passes, and changes it."""

    change: Callable[[bytes, bool], bytes] = lambda data, to_server: data
    seen: list[bytes] = field(default_factory=list)

    @asynccontextmanager
    async def serve(self, url: str) -> AsyncIterator[str]:
        """Forward a connection to a URL; yield the proxy's."""
        async with (
            listening(MESSAGE_MAX) as server,
            connect_websocket(url, {}, MESSAGE_MAX) as (target, _),
            asyncio.TaskGroup() as tasks,
        ):

            async def forward() -> None:
                source = await server.links.get()
                tasks.create_task(self._copy(source, target, True))
                await self._copy(target, source, False)

            forwarding = tasks.create_task(forward())
            yield server.url
            forwarding.cancel()
            server.done.set()

    async def _copy(
        self, source: WebSocketLink, target: WebSocketLink, to_server: bool
    ) -> None:
        try:
            while True:
                for piece in await source.receive():
                    assert isinstance(piece, bytes)
                    self.seen.append(piece)
                    await target.send(self.change(piece, to_server))
        except LinkClosed:
            await target.close(1000, "")


@asynccontextmanager
async def encrypted(
    between: Between,
) -> AsyncIterator[tuple[WebSocketLink, WebSocketLink]]:
    """Yield both ends of an encrypted connection through a proxy."""
    async with listening(MESSAGE_MAX) as server, between.serve(server.url) as proxied:
        accepting = asyncio.create_task(accepted(server.links))
        async with connect_websocket(f"noise+{proxied}", {}, MESSAGE_MAX) as (ours, _):
            yield ours, await accepting
        server.done.set()


async def accepted(links: "asyncio.Queue[WebSocketLink]") -> WebSocketLink:
    link = await links.get()
    assert await accept_encryption(link)
    return link


async def received(link: WebSocketLink, count: int) -> list[Data]:
    messages: list[Data] = []
    while len(messages) < count:
        messages += await link.receive()
    return messages


async def dial(url: str) -> None:
    async with connect_websocket(url, {}, MESSAGE_MAX):
        raise AssertionError("it must not be opened")


async def test_messages_arrive_in_order_both_ways_and_cannot_be_read() -> None:
    between = Between()
    async with encrypted(between) as (ours, theirs):
        await ours.send(SECRET + b"1")
        await ours.send(SECRET + b"2")
        await theirs.send(SECRET + b"3")

        assert await received(theirs, 2) == [SECRET + b"1", SECRET + b"2"]
        assert await received(ours, 1) == [SECRET + b"3"]
        assert ours.binding == theirs.binding != b""

    assert [len(each) for each in between.seen[:2]] == [len(PREFACE) + 32, SECOND_SIZE]
    assert between.seen[0].startswith(PREFACE)
    assert SECRET not in b"".join(between.seen)


async def test_a_message_of_many_records_arrives_in_full() -> None:
    data = bytes(range(256)) * (4 << 10)  # 1 MiB
    async with encrypted(Between()) as (ours, theirs):
        await ours.send(data)

        assert await received(theirs, 1) == [data]


async def test_many_small_messages_arrive_in_order() -> None:
    pieces: list[Data] = [b"%06d" % number for number in range(5_000)]
    async with encrypted(Between()) as (ours, theirs), asyncio.TaskGroup() as tasks:
        arriving = tasks.create_task(received(theirs, len(pieces)))
        for piece in pieces:
            await ours.send(piece)

    assert arriving.result() == pieces


async def test_a_changed_byte_ends_the_connection() -> None:
    def flip(data: bytes, to_server: bool) -> bytes:
        changes = to_server and not data.startswith(PREFACE)
        return data[:-1] + bytes([data[-1] ^ 1]) if changes else data

    async with encrypted(Between(flip)) as (ours, theirs):
        await ours.send(SECRET)

        with pytest.raises(LinkClosed, match="not genuine"):
            await theirs.receive()


async def test_a_repeated_message_ends_the_connection() -> None:
    def repeat(data: bytes, to_server: bool) -> bytes:
        changes = to_server and not data.startswith(PREFACE)
        return data + data if changes else data

    async with encrypted(Between(repeat)) as (ours, theirs):
        await ours.send(SECRET)

        with pytest.raises(LinkClosed, match="not genuine"):
            await theirs.receive()


async def test_a_removed_preface_is_no_plain_connection() -> None:
    def strip(data: bytes, to_server: bool) -> bytes:
        return data.removeprefix(PREFACE)

    async with (
        listening(MESSAGE_MAX) as server,
        Between(strip).serve(server.url) as proxied,
    ):
        dialling = asyncio.create_task(dial(f"noise+{proxied}"))
        plain = await server.links.get()
        assert not await accept_encryption(plain)
        await plain.send(b"in the clear, and long enough to be an answer...")

        with pytest.raises(LinkClosed, match="--plain"):
            await dialling
        server.done.set()


async def test_a_server_that_does_not_encrypt_is_named() -> None:
    async with listening(MESSAGE_MAX) as server:
        dialling = asyncio.create_task(dial(f"noise+{server.url}"))
        link = await server.links.get()
        await link.close(1000, "")

        with pytest.raises(LinkClosed, match="does not encrypt the connection"):
            await dialling
        server.done.set()


@pytest.mark.parametrize("first", [b"{}", b"s", b"shoal noise 2\nand more"])
async def test_a_plain_peer_is_read_from_its_first_byte(first: bytes) -> None:
    async with (
        listening(MESSAGE_MAX) as server,
        connect_websocket(server.url, {}, MESSAGE_MAX) as (ours, _),
    ):
        await ours.send(first)
        await ours.send(b"\0 and more")
        theirs = await server.links.get()

        assert not await accept_encryption(theirs)
        assert theirs.binding == b""
        assert b"".join(map(bytes, await received(theirs, 1))).startswith(first)  # type: ignore[arg-type]
        server.done.set()
