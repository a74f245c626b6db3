"""Bytes on a raw connection: HTTP and WebSocket that no library would send."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from attacks.siege import CHAT, address, port_of
from gateway.serving import KEY, WAIT_MAX, Pool

TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9
MASK = b"\x01\x02\x03\x04"


@dataclass(slots=True)
class Wire:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def head(self) -> bytes:
        """Return the response up to the first empty line."""
        async with asyncio.timeout(WAIT_MAX):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """Return everything until the other end disconnects."""
        received = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(WAIT_MAX):
                while data := await self.reader.read(1 << 16):
                    received += data
        return received

    async def until_stuck(self) -> None:
        """Wait until no more of what is sent gets through.

        The other end is a task of the same loop: unless it waits for something else,
        it reads within a few turns.
        """
        unsent, turns = 0, 0
        async with asyncio.timeout(WAIT_MAX):
            while turns < 100:
                before, unsent = unsent, self.writer.transport.get_write_buffer_size()
                turns = turns + 1 if 0 < unsent == before else 0
                await asyncio.sleep(0 if turns else 0.001)

    def abort(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()


@asynccontextmanager
async def wire(
    pool: Pool, port: int | None = None, *, deaf: bool = False
) -> AsyncIterator[Wire]:
    """Connect, by default to HTTP's port; a ``deaf`` end has tiny buffers."""
    # Told the protocol, asyncio sends small writes at once.
    bare = socket.socket(proto=socket.IPPROTO_TCP)
    if deaf:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            bare.setsockopt(socket.SOL_SOCKET, buffer, 4096)
    bare.setblocking(False)
    target = ("127.0.0.1", port or port_of(pool))
    await asyncio.get_running_loop().sock_connect(bare, target)
    reader, writer = await asyncio.open_connection(
        sock=bare, limit=1 << (10 if deaf else 16)
    )
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def upgraded(
    pool: Pool, target: str | None = None, *, deaf: bool = False
) -> AsyncIterator[Wire]:
    """Connect as a WebSocket, by default as a node with the right token."""
    async with wire(pool, deaf=deaf) as bare:
        await bare.send(upgrade(target or address()))
        head = await bare.head()
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield bare


def upgrade(target: str, *headers: str, version: str = "13") -> bytes:
    """Write an upgrade request."""
    key = base64.b64encode(bytes(16)).decode()
    return request(
        f"GET {target} HTTP/1.1",
        "Connection: Upgrade",
        "Upgrade: websocket",
        f"Sec-WebSocket-Version: {version}",
        f"Sec-WebSocket-Key: {key}",
        *headers,
    )


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """Write a request with exactly these headers, and a host."""
    lines = (line, "Host: localhost", *headers, "", "")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


def post(*headers: str, body: bytes = b"", path: str = CHAT) -> bytes:
    """Write a POST with the right key, and exactly these other headers."""
    return request(
        f"POST {path} HTTP/1.1", f"Authorization: Bearer {KEY}", *headers, body=body
    )


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
) -> bytes:
    """Write a frame (RFC 6455, section 5.2), which may announce another ``length``."""
    size = len(payload) if length is None else length
    first = (fin << 7) | (reserved << 4) | opcode
    flag = masked << 7
    if size < 126:
        head = bytes([first, flag | size])
    elif size < 1 << 16:
        head = bytes([first, flag | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([first, flag | 127]) + size.to_bytes(8, "big")
    if not masked:
        return head + payload
    return head + MASK + masked_with(MASK, payload)


def masked_with(mask: bytes, data: bytes) -> bytes:
    """Mask a payload of a frame, or undo that."""
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data) ^ int.from_bytes(repeated)).to_bytes(len(data))
