"""Both ends of links over real sockets on 127.0.0.1."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from shoal.transports.dialer import connect_tcp
from shoal.transports.link import LinkClosed
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ACCEPT_ALL, ConnectionPolicy, tcp_listener
from shoal.transports.tls import ServerTls


@asynccontextmanager
async def serving(
    tls: ServerTls | None = None,
    host: str = "127.0.0.1",
    entrance: ConnectionPolicy = ACCEPT_ALL,
) -> AsyncIterator[tuple[str, "asyncio.Queue[TcpLink]"]]:
    """Accept links within the block; yield the URL and the links."""
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    done = asyncio.Event()

    async def serve(link: TcpLink) -> None:
        links.put_nowait(link)
        await done.wait()

    entrance = replace(entrance, tls=tls)
    async with tcp_listener(host, 0, serve, entrance) as bound:
        scheme = "tls" if tls else "tcp"
        address = f"[{host}]" if ":" in host else host
        yield f"{scheme}://{address}:{bound.port}", links
        done.set()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """Yield both ends of a connection, the dialling one first."""
    async with serving() as (url, links), connect_tcp(url) as ours:
        yield ours, await links.get()


async def received(link: TcpLink, size: int) -> bytes:
    """Receive ``size`` bytes."""
    data = bytearray()
    while len(data) < size:
        for piece in await link.receive():
            assert isinstance(piece, bytes)
            data += piece
    return bytes(data)


async def ended(link: TcpLink) -> LinkClosed:
    """Read until the end; return its cause."""
    try:
        while True:
            await link.receive()
    except LinkClosed as end:
        return end
