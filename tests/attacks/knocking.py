"""A program that strangers run: ``python -m attacks.knocking KIND HTTP_PORT TCP_PORT``.

It shows no credential, or a wrong one, and does as often as it can what anybody may do
who reaches the ports.  It connects from an address of its own, 127.0.0.2, or from that
of honest clients.
"""

import asyncio
import socket
import ssl
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from shoal.protocols.seam.encrypted_stream import FIRST_SIZE, PREFACE
from shoal.protocols.seam.framing import LENGTH

AT_ONCE = 32  # connections
ADDRESS = "127.0.0.2"
PATIENCE = 0.5  # seconds to wait for an answer
BEGUN = time.monotonic()
POWER = 0.15  # of a core, for connections that are reset
HEALTH_EVERY = 0.32  # seconds: on all connections together 100 a second
REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = (
    b"GET %s HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
NOISE = PREFACE + bytes([9]) + bytes(FIRST_SIZE - len(PREFACE) - 1)
NOISE_FRAME = bytes([0x82, 0x80 | len(NOISE), 0, 0, 0, 0]) + NOISE  # not masked

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(
    port: int, tls: ssl.SSLContext | None = None, address: str = ADDRESS
) -> Pair:
    return await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(address, 0), ssl=tls
    )


async def exchange(port: int, data: bytes, tls: ssl.SSLContext | None = None) -> None:
    """Connect, send, and wait a moment for an answer."""
    reader, writer = await opened(port, tls)
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE):
            await reader.read(1)
    finally:
        writer.transport.abort()


async def connections(http: int, tcp: int) -> None:
    """Connect and leave."""
    for port in (http, tcp):
        _, writer = await opened(port)
        writer.transport.abort()


async def resets(http: int, tcp: int) -> None:
    """Connect and reset the connection."""
    await reset(http, b"")


async def hits(http: int, tcp: int) -> None:
    """Connect, send the head of a request, and reset the connection."""
    await reset(http, REQUEST + b"\r\n")


async def reset(port: int, data: bytes) -> None:
    # A small machine does that, or many, of which each does little.
    while time.process_time() > POWER * (time.monotonic() - BEGUN):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.bind((ADDRESS, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        if data:
            sock.send(data)


async def health(http: int, tcp: int) -> None:
    """Ask for what needs no key, from the address of honest clients."""
    reader, writer = await opened(http, address="127.0.0.1")
    try:
        writer.write(HEALTH)
        await reader.read(1)
    finally:
        writer.transport.abort()
        await asyncio.sleep(HEALTH_EVERY)


async def requests(http: int, tcp: int) -> None:
    """Request on one connection, many times before reading an answer."""
    reader, writer = await opened(http)
    numbers = count()
    while not writer.is_closing():
        key = b"" if next(numbers) % 2 else b"Authorization: Bearer wrong\r\n"
        writer.write((REQUEST + key + b"\r\n") * 100)
        await writer.drain()
        await reader.read(1 << 16)


async def heads(http: int, tcp: int) -> None:
    """Send a head in pieces of a byte."""
    _, writer = await opened(http)
    for byte in REQUEST + b"X: " + b"x" * 1000:
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(0)


async def websockets(http: int, tcp: int) -> None:
    await exchange(http, UPGRADE % b"/ws?token=wrong&model=m" + b"\x81\xfe")


async def noise(http: int, tcp: int) -> None:
    """Begin a handshake, and leave at its answer, which costs the other end most."""
    reader, writer = await opened(http)
    try:
        writer.write(UPGRADE % b"/shoal" + NOISE_FRAME)
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1)
    finally:
        writer.transport.abort()


async def lan(http: int, tcp: int) -> None:
    """Send a message that is none to the port of TealeNet's peers."""
    await exchange(tcp, LENGTH.pack(4) + b"null")


async def tls(http: int, tcp: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(10):
        await exchange(http, REQUEST + b"\r\n", context)


KINDS: dict[str, Callable[[int, int], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        *(requests, heads, websockets, noise, lan, connections, tls),
        *(resets, hits, health),
    )
}


async def knock(kind: str, http: int, tcp: int) -> None:
    """Do it for ever, on many connections."""

    async def again() -> None:
        while True:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await KINDS[kind](http, tcp)
            await asyncio.sleep(0)

    print("begun", flush=True)
    await asyncio.gather(*(again() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    asyncio.run(knock(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
