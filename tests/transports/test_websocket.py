"""WebSocket links, with real sockets on 127.0.0.1."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web
from yarl import URL

from harness.ports import free_port
from shoal.protocols.seam.session import Data
from shoal.transports.link import LinkClosed
from shoal.transports.strangers import Strangers
from shoal.transports.websocket import (
    BATCH_MAX,
    WebSocketLink,
    accept,
    connect_websocket,
)

MESSAGE_MAX = 1000


@dataclass
class AcceptedLinks:
    """A listener with its accepted links."""

    url: str
    links: "asyncio.Queue[WebSocketLink]"
    done: asyncio.Event


@asynccontextmanager
async def listening(
    message_max: int = MESSAGE_MAX, idle_max: float | None = None
) -> AsyncIterator[AcceptedLinks]:
    """Accept links within the block."""
    links: asyncio.Queue[WebSocketLink] = asyncio.Queue()
    done = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        odd = {"X-Odd": "é is fine"}
        link, response = await accept(request, odd, message_max, Strangers(), idle_max)
        link.admit()
        links.put_nowait(link)
        await done.wait()
        return response

    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield AcceptedLinks(f"ws://127.0.0.1:{runner.addresses[0][1]}/ws", links, done)
    finally:
        done.set()
        await runner.cleanup()


@asynccontextmanager
async def pair(
    message_max: int = MESSAGE_MAX,
) -> AsyncIterator[tuple[WebSocketLink, WebSocketLink]]:
    """Yield both ends of a connection, the dialling one first."""
    async with (
        listening(message_max) as server,
        connect_websocket(server.url, {}, message_max) as (ours, _),
    ):
        yield ours, await server.links.get()
        server.done.set()


@pytest.mark.parametrize(
    "data", ["", "text é 😀", b"", b"\x00\xff", "x" * 900], ids=ascii
)
async def test_messages_keep_boundaries_and_type(data: str | bytes) -> None:
    async with pair() as (ours, theirs):
        await ours.send(data)
        await ours.send("next")
        assert await received(theirs, 2) == [data, "next"]

        await theirs.send(data)
        assert await received(ours, 1) == [data]


async def received(link: WebSocketLink, count: int) -> list[Data]:
    """Receive ``count`` messages, in any number of batches."""
    messages: list[Data] = []
    while len(messages) < count:
        messages += await link.receive()
    return messages


async def test_buffered_messages_are_received_together() -> None:
    async with pair() as (ours, theirs):
        for number in range(2 * BATCH_MAX):
            await ours.send(str(number))
        await ours.send("the last")
        batches = [await theirs.receive()]
        while batches[-1][-1] != "the last":
            batches.append(await theirs.receive())

    expected = [*map(str, range(2 * BATCH_MAX)), "the last"]
    assert [each for batch in batches for each in batch] == expected
    assert len(batches) < len(expected) // 10
    assert all(len(batch) <= BATCH_MAX + 1 for batch in batches)


async def test_response_headers_reach_the_dialer() -> None:
    async with (
        listening() as server,
        connect_websocket(server.url, {}, MESSAGE_MAX) as (_, headers),
    ):
        assert headers["x-odd"] == "é is fine"
        server.done.set()


async def test_close_reason_reaches_the_peer() -> None:
    async with pair() as (ours, theirs):
        closing = asyncio.ensure_future(theirs.close(4002, "Invalid token"))

        with pytest.raises(LinkClosed, match="4002 Invalid token") as caught:
            await ours.receive()

        assert (caught.value.code, caught.value.text) == (4002, "Invalid token")
        await closing
        with pytest.raises(LinkClosed):
            await theirs.receive()


@pytest.mark.parametrize(
    "text",
    ["x" * 1000, "é" * 100, "😀" * 50],
    ids=["one byte", "two bytes", "four bytes"],
)
async def test_long_close_reason_is_truncated(text: str) -> None:
    async with pair() as (ours, theirs):
        closing = asyncio.ensure_future(theirs.close(4000, text))

        with pytest.raises(LinkClosed) as caught:
            await ours.receive()

        assert caught.value.code == 4000
        assert text.startswith(caught.value.text)
        assert 119 < len(caught.value.text.encode()) <= 123
        await closing


async def test_close_is_idempotent() -> None:
    async with pair() as (ours, theirs):
        receiving = asyncio.ensure_future(theirs.receive())
        await ours.close(1000, "")
        await ours.close(1000, "")
        with pytest.raises(LinkClosed):
            await receiving


async def test_send_fails_after_the_end() -> None:
    async with pair() as (ours, theirs):
        receiving = asyncio.ensure_future(theirs.receive())
        await ours.close(1000, "")

        with pytest.raises(LinkClosed):
            await ours.send("late")
        with pytest.raises(LinkClosed):
            await receiving


async def test_oversized_message_ends_a_link_that_waits() -> None:
    async with pair() as (ours, theirs):
        await ours.send("one")
        assert await theirs.receive() == ["one"]
        receiving = asyncio.create_task(theirs.receive())
        await asyncio.sleep(0)
        await ours.send("x" * (MESSAGE_MAX + 1))

        with pytest.raises(LinkClosed) as caught:
            await receiving

        assert "Message size 1001 exceeds limit 1000" in str(caught.value)


async def test_oversized_message_ends_the_link() -> None:
    async with pair() as (ours, theirs):
        await ours.send("x" * (MESSAGE_MAX + 1))

        with pytest.raises(LinkClosed, match="exceeds limit"):
            await theirs.receive()


async def test_broken_connection_ends_the_link() -> None:
    async with pair() as (ours, theirs):
        ours.abort()

        with pytest.raises(LinkClosed) as caught:
            await theirs.receive()

        assert caught.value.code == 1006


async def test_closed_port_is_named() -> None:
    port = free_port()
    refused = f"ws://127.0.0.1:{port}/ws: connection refused"
    with pytest.raises(LinkClosed, match=refused):
        async with connect_websocket(
            f"ws://127.0.0.1:{port}/ws?token=secret", {}, MESSAGE_MAX
        ):
            pass


async def test_errors_contain_no_secrets_of_the_url() -> None:
    with pytest.raises(LinkClosed) as caught:
        async with connect_websocket(
            "ws://127.0.0.1:1/ws?token=hunter2", {}, MESSAGE_MAX
        ):
            pass

    assert "hunter2" not in str(caught.value)


async def test_server_without_websockets_is_an_error() -> None:
    async with listening() as server:
        with pytest.raises(LinkClosed, match="does not speak WebSocket here: HTTP 404"):
            async with connect_websocket(server.url + "/other", {}, MESSAGE_MAX):
                pass


@pytest.mark.parametrize("url", ["ws://host.invalid/ws", "ws://127.0.0.1:99999/ws"])
async def test_invalid_address_is_an_end(url: str) -> None:
    with pytest.raises(LinkClosed, match="cannot connect"):
        async with connect_websocket(url, {}, MESSAGE_MAX):
            pass


# Batches of a relay.


@pytest.mark.parametrize(
    "data",
    ["", "é😀", b"", b"\xff", "x" * 125, "x" * 126, b"y" * 65_535, b"y" * 65_536],
    ids=lambda data: f"{type(data).__name__} of {len(data)}",
)
async def test_batched_messages_arrive_unchanged(data: str | bytes) -> None:
    async with pair(1 << 20) as (ours, theirs):
        theirs.write([theirs.pack(data)])
        await theirs.send("between")
        theirs.write([theirs.pack(each) for each in (data, "next", data)])

        assert await received(ours, 5) == [data, "between", data, "next", data]


async def test_long_messages_are_batched() -> None:
    async with pair(1 << 20) as (ours, theirs):
        long: list[Data] = ["a" * 100_000, b"b" * 100_000]
        theirs.write([theirs.pack(each) for each in long])

        assert await received(ours, 2) == long


async def test_written_messages_arrive_before_the_close() -> None:
    async with pair() as (ours, theirs):
        theirs.write([theirs.pack("last")])
        closing = asyncio.create_task(theirs.close(4000, "bye"))

        assert await received(ours, 1) == ["last"]
        with pytest.raises(LinkClosed, match="4000 bye"):
            await ours.receive()
        await closing
        with pytest.raises(LinkClosed, match="connection lost"):
            theirs.write([theirs.pack("late")])


async def test_message_before_a_close_frame_in_one_segment_is_answered() -> None:
    async with listening() as server:
        reader, writer = await upgraded(server.url)
        link = await server.links.get()
        writer.write(b"\x81\x84\0\0\0\0last" + b"\x88\x80\0\0\0\0")

        assert await link.receive() == ["last"]
        await link.send("answer")
        with pytest.raises(LinkClosed, match="closed by peer: 1005"):
            await link.receive()

        assert await reader.readexactly(8) == b"\x81\x06answer"
        assert await reader.readexactly(4) == b"\x88\x02\x03\xe8"  # 1000
        writer.close()
        server.done.set()


async def test_close_does_not_wait_for_messages() -> None:
    async with pair() as (ours, theirs):
        await ours.send("one")
        assert await theirs.receive() == ["one"]
        closing = asyncio.create_task(theirs.close(4000, "bye"))

        with pytest.raises(LinkClosed, match="4000 bye"):
            await ours.receive()

        await closing
        with pytest.raises(LinkClosed, match="closed here: bye"):
            await theirs.receive()


async def test_unread_data_is_counted_until_disconnection() -> None:
    async with pair() as (_, theirs):
        assert theirs.unread == 0
        packed = theirs.pack(b"x" * (1 << 20))
        while theirs.unread < 8 << 20:
            theirs.write([packed])

        theirs.abort()

        with pytest.raises(LinkClosed):
            await theirs.receive()


@pytest.mark.parametrize("end", ["ours", "theirs"])
async def test_close_drops_unread_data(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.transports.websocket.CLOSE_TIMEOUT", 0.05)
    async with pair(1 << 21) as (ours, theirs):
        link = {"ours": ours, "theirs": theirs}[end]
        sending: list[asyncio.Task[None]] = []
        while link.unread < 8 << 20:
            sending.append(asyncio.create_task(link.send(bytes(1 << 20))))
            await asyncio.sleep(0)

        await link.close(4000, "bye")

        assert link.unread == 0
        await asyncio.gather(*sending, return_exceptions=True)


async def test_peer_without_pongs_is_lost() -> None:
    async with listening(idle_max=0.15) as server:
        reader, writer = await upgraded(server.url)
        link = await server.links.get()

        with pytest.raises(LinkClosed):
            await link.receive()

        assert b"\x89\x00" in await reader.read(100)  # a ping
        writer.close()
        server.done.set()


async def upgraded(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a WebSocket whose other end never answers."""
    address = URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(
        f"GET {address.path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer
