"""Listens at addresses, and accepts connections at the pace of strangers."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from shoal.transports.strangers import Strangers, has_left

BACKLOG = 1024  # connections that may wait to be accepted; fewer and bursts are dropped
ACCEPTED_IN_A_ROW = 32  # until others get their turn
ACCEPT_RETRY_DELAY = 1.0  # seconds, when the process has too many files open

log = logging.getLogger("shoal.transports")


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """The address and port of a listener; the address may be a wildcard."""

    address: str
    port: int

    @classmethod
    def of(cls, listener: socket.socket) -> "BoundAddress":
        """Return the address of a listening socket."""
        return cls(*listener.getsockname()[:2])


async def listen(host: str, port: int, *, all_addresses: bool) -> list[socket.socket]:
    """Listen at the first address that a host has, or at all.  Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            sock = socket.create_server(address, family=family, backlog=BACKLOG)
            sock.setblocking(False)
            sockets.append(sock)
            if not all_addresses:
                break
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


async def accepted(
    listener: socket.socket, strangers: Strangers
) -> AsyncIterator[tuple[socket.socket, str]]:
    """Yield connections, and the addresses of their peers, at the pace of strangers.

    Those who have left already, or have too many connections that wait, are left out.
    """
    while True:
        await strangers.wait_to_accept()
        for _ in range(ACCEPTED_IN_A_ROW):
            try:
                sock, (address, *_) = await accept(listener)
            except OSError as error:  # this process has too many files open
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_DELAY)
                continue
            strangers.on_accepted()
            if not has_left(sock) and strangers.may_enter(address):
                yield sock, address
            else:
                sock.close()
        await asyncio.sleep(0)  # where the next one is already there


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection; return it with the peer's address.

    Raises OSError if this process has too many files open.

    A cancellation loses no connection: it stays with the listener.  ``sock_accept``
    would leave one that arrives just then open, until it is collected as garbage.
    """
    if sys.platform == "win32":  # its event loop closes such a connection
        return await asyncio.get_running_loop().sock_accept(listener)
    while True:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            await _readable(listener)
        else:
            sock.setblocking(False)
            return sock, address


async def _readable(listener: socket.socket) -> None:
    """Wait until a connection may have arrived."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(listener, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(listener)
