"""Accepts connections, and queues those of unauthenticated peers.

An accepted connection is a socket and nothing else until it is opened.  If its first
bytes carry a valid credential, it is that of a known client, and opened at once.  All
others are strangers': while their share of the loop is spent, each waits for a turn of
its network.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from shoal.domain.addresses import network_key
from shoal.transports.loop_share import LoopShare
from shoal.transports.strangers import BY_STRANGER, Stranger, Strangers

BACKLOG = 1024  # connections that may wait to be accepted; fewer and bursts are dropped
ACCEPTED_IN_A_ROW = 32  # until others get their turn
ACCEPT_RETRY_DELAY = 1.0  # seconds, when the process has too many files open
LOOK_MAX = 16 << 10  # bytes of a first request that are read
TURN_TIMEOUT = 10.0  # seconds that a connection waits for its turn
WAITING_MAX = 2048  # connections that wait

CANNOT_ACCEPT = "cannot accept a connection: %s"  # too many files are open

log = logging.getLogger("shoal.transports")

Open: TypeAlias = Callable[
    [socket.socket, str, Stranger | None], Coroutine[Any, Any, None]
]
"""Serves a connection from an address, and closes its socket; None: a known client."""

FirstLook: TypeAlias = Callable[[bytes, str], tuple[bool, str]]
"""Takes the first bytes of a connection and its source address; returns whether it is a
known client's, and the address of the client, which a proxy may have forwarded.
"""


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """The address and port of a listener; the address may be a wildcard."""

    address: str
    port: int

    @classmethod
    def of(cls, listener: socket.socket) -> "BoundAddress":
        """Return the address of a listening socket."""
        return cls(*listener.getsockname()[:2])


async def listen(
    host: str, port: int, *, all_addresses: bool, defer: float = 0.0
) -> list[socket.socket]:
    """Listen at the first address that a host has, or at all.  Raises OSError.

    ``defer`` is for protocols in which the client sends first: Linux accepts no
    connection before data arrives, for at most that many seconds.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            sock = socket.create_server(address, family=family, backlog=BACKLOG)
            sock.setblocking(False)
            sockets.append(sock)
            if (option := getattr(socket, "TCP_DEFER_ACCEPT", None)) and defer:
                sock.setsockopt(socket.IPPROTO_TCP, option, int(defer))
            if not all_addresses:
                break
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


class Acceptor:
    """Accepts connections, and has each opened in a task by ``open_``.

    Without a ``look``, all connections are strangers'.  ``refusal`` is sent to those
    that are refused.
    """

    def __init__(
        self,
        strangers: Strangers,
        open_: Open,
        look: FirstLook | None = None,
        refusal: bytes = b"",
    ) -> None:
        self._strangers = strangers
        self._open = open_
        self._look = look
        self._refusal = refusal
        self._waiting = set[_Waiting]()
        self._opened = set[asyncio.Task[None]]()
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def accepting(
        self, *listeners: socket.socket, patience: float = 0.0
    ) -> AsyncIterator[None]:
        """Accept for the length of the block, whose end closes the listeners.

        Open connections get ``patience`` seconds to end by themselves then.
        """
        grace = 0.0
        async with asyncio.TaskGroup() as self._tasks:
            accepting = [self._accept_at(listener) for listener in listeners]
            try:
                yield
                grace = patience
            finally:
                for stop in accepting:
                    stop()
                for listener in listeners:
                    listener.close()
                for waiting in [*self._waiting]:
                    waiting.drop("this end stops")
                if grace and self._opened:
                    await asyncio.wait(self._opened, timeout=grace)
                for each in self._opened:
                    _cancel(each)

    def _accept_at(self, listener: socket.socket) -> Callable[[], object]:
        """Accept connections to a listener; return a function that stops it."""
        if sys.platform == "win32":  # its event loop has no ``add_reader``
            return self._tasks.create_task(self._accept_each(listener)).cancel
        loop, share = asyncio.get_running_loop(), self._strangers.accepting
        turn: asyncio.Future[None] | None = None
        retry: asyncio.TimerHandle | None = None

        def begin() -> None:
            loop.add_reader(listener, on_readable)

        def on_readable() -> None:
            nonlocal turn
            if share is not None and share.is_spent:
                loop.remove_reader(listener)
                turn = share.request(None, on_turn)
            else:
                accept()

        def on_turn() -> None:
            begin()
            accept()

        def accept() -> None:
            nonlocal retry
            try:
                self._strangers.meter_accepting(partial(self._accept, listener))
            except OSError as error:
                log.warning(CANNOT_ACCEPT, error)
                loop.remove_reader(listener)
                retry = loop.call_later(ACCEPT_RETRY_DELAY, begin)

        def end() -> None:
            loop.remove_reader(listener)
            if turn is not None:
                turn.cancel()
            if retry is not None:
                retry.cancel()

        begin()
        return end

    async def _accept_each(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, source = await loop.sock_accept(listener)
            except OSError as error:  # or its peer has reset it already
                log.warning(CANNOT_ACCEPT, error)
                await asyncio.sleep(ACCEPT_RETRY_DELAY)
            else:
                self._receive(sock, self._strangers.client_of(source[:2]))

    def _accept(self, listener: socket.socket) -> float:
        """Accept pending connections; return the fraction that is strangers'.

        Raises OSError if this process has too many files open.
        """
        accepted = strange = 0
        while accepted < ACCEPTED_IN_A_ROW:
            try:
                sock, source = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break  # on macOS, the peer may have reset it
            accepted += 1
            strange += self._receive(sock, self._strangers.client_of(source[:2]))
        return strange / accepted if accepted else 1.0

    def _receive(self, sock: socket.socket, address: str) -> bool:
        """Open a connection, now or later; return whether it is a stranger's."""
        sock.setblocking(False)
        first = peek(sock)
        if first == b"":
            sock.close()
            return True
        known, client = self.identify(first, address)
        if known:
            self.open(sock, address, None)
            return False
        if not self._strangers.has_room(client) or len(self._waiting) >= WAITING_MAX:
            self.refuse(sock, client, "too many connections")
        else:
            stranger = self._strangers.add(client, lambda reason: None)
            if stranger.share is None or not stranger.share.is_spent:
                self.open(sock, address, stranger)
            else:
                waiting = _Waiting(self, sock, address, stranger, stranger.share)
                self._waiting.add(waiting)
                if first is None and self._look is not None:
                    waiting.watch()
        return True

    def identify(self, first: bytes | None, address: str) -> tuple[bool, str]:
        """Return whether a connection is a known client's, and the client's address."""
        if not first or self._look is None:
            return False, address
        known, client = self._look(first, address)
        if known:
            self._strangers.meet(network_key(client))
        return known, client

    def open(
        self, sock: socket.socket, address: str, stranger: Stranger | None
    ) -> None:
        """Open a connection in a task."""
        work = partial(self._open, sock, address, stranger)
        if stranger is None:
            task = self._tasks.create_task(work())
        else:
            task = self._tasks.create_task(self._strangers.meter(work, stranger.charge))
            stranger.drop = lambda reason: _cancel(task)
        self._opened.add(task)
        task.add_done_callback(self._opened.discard)

    def refuse(self, sock: socket.socket, address: str, reason: str) -> None:
        """Close a connection after sending the refusal."""
        log.info("refused peer=%s reason=%r", address, reason, extra=BY_STRANGER)
        with sock, suppress(OSError):
            if self._refusal:
                with suppress(BlockingIOError):
                    sock.recv(LOOK_MAX)  # or the system would reset the connection
                sock.send(self._refusal)
                sock.shutdown(socket.SHUT_WR)

    def forget(self, waiting: "_Waiting") -> None:
        """Remove a connection from those that wait."""
        self._waiting.discard(waiting)


class _Waiting:
    """A stranger's connection that is not open yet, and waits for its turn."""

    def __init__(
        self,
        acceptor: Acceptor,
        sock: socket.socket,
        address: str,
        stranger: Stranger,
        share: LoopShare,
    ) -> None:
        self._acceptor = acceptor
        self._sock = sock
        self._address = address
        self._stranger = stranger
        stranger.drop = self.drop
        self._turn = share.request(stranger.network, self._on_turn)
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(TURN_TIMEOUT, self._on_timeout)
        self._watched = False

    def watch(self) -> None:
        """Identify the peer when it sends: a known client need not wait."""
        # On Windows, the event loop can only wait for data by reading it.
        if sys.platform != "win32":
            asyncio.get_running_loop().add_reader(self._sock, self._on_data)
            self._watched = True

    def drop(self, reason: str) -> None:
        """Close the connection."""
        self._end()
        self._stranger.leave()
        self._sock.close()

    def _on_turn(self) -> None:
        if peek(self._sock) == b"":
            self.drop("closed by peer")
        else:
            self._end()
            self._acceptor.open(self._sock, self._address, self._stranger)

    def _on_data(self) -> None:
        first = peek(self._sock)
        if first == b"":
            self.drop("closed by peer")
        elif self._acceptor.identify(first, self._address)[0]:
            self._end()
            self._stranger.leave()
            self._acceptor.open(self._sock, self._address, None)
        else:
            self._unwatch()

    def _on_timeout(self) -> None:
        self._end()
        self._stranger.leave()
        self._acceptor.refuse(self._sock, self._address, "waited too long")

    def _unwatch(self) -> None:
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._watched = False

    def _end(self) -> None:
        self._acceptor.forget(self)
        self._turn.cancel()
        self._timeout.cancel()
        self._unwatch()


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel in another iteration: a task that has not begun closes no socket."""
    asyncio.get_running_loop().call_soon(task.cancel)


def peek(sock: socket.socket) -> bytes | None:
    """Return the received bytes; None: there are none, empty: the peer has closed."""
    try:
        return sock.recv(LOOK_MAX, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
