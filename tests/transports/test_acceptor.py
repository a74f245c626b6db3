"""Whose connections are opened, and when, on real sockets."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.serving import eventually
from shoal.transports import acceptor
from shoal.transports.acceptor import Acceptor, BoundAddress, listen
from shoal.transports.strangers import PER_ADDRESS_MAX, Stranger
from transports.manual_clock import settle
from transports.test_strangers import Meter

KEY = b"key"  # what a known client begins with
BUSY = b"busy"


class Door:
    """A port at which a known client begins with ``KEY``; the share is spent."""

    def __init__(self, refusal: bytes = BUSY) -> None:
        self.meter = Meter()
        self.meter.share.charge("192.0.2.9", 2.0)
        self.looked_at = list[bytes]()
        self.opened: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.clients = list[socket.socket]()
        self.acceptor = Acceptor(self.meter.strangers, self._open, self._look, refusal)
        self.bound: BoundAddress

    async def _open(
        self, sock: socket.socket, address: str, stranger: Stranger | None
    ) -> None:
        with sock:
            first = b""
            with suppress(BlockingIOError):
                first = sock.recv(100)
            self.opened.put_nowait((first, stranger is None))

    def _look(self, first: bytes, address: str) -> tuple[bool, str]:
        self.looked_at.append(first)
        _, _, client = first.partition(b"for ")
        return first.startswith(KEY), client.decode() or address

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        (listener,) = await listen("127.0.0.1", 0, all_addresses=False)
        self.bound = BoundAddress.of(listener)
        async with self.acceptor.accepting(listener):
            try:
                yield
            finally:
                for each in self.clients:
                    each.close()

    def dial(self, first: bytes) -> socket.socket:
        """Connect, and send something."""
        sock = socket.create_connection((self.bound.address, self.bound.port))
        sock.setblocking(False)
        if first:
            sock.send(first)
        self.clients.append(sock)
        return sock

    async def connect(self, first: bytes) -> socket.socket:
        """Connect, and wait until the connection was accepted."""
        strangers = len(self.meter.strangers)
        looked_at = len(self.looked_at)
        sock = self.dial(first)
        await eventually(
            lambda: (
                len(self.meter.strangers) > strangers
                or (len(self.looked_at) > looked_at and not self.opened.empty())
            )
        )
        return sock

    async def read(self, sock: socket.socket) -> bytes:
        """Return all that a connection is told until it ends."""
        loop, found = asyncio.get_running_loop(), b""
        while data := await loop.sock_recv(sock, 100):
            found += data
        return found


async def test_known_client_is_served_while_strangers_wait() -> None:
    door = Door()
    async with door.open():
        await door.connect(b"hello")
        await door.connect(KEY)

        assert await door.opened.get() == (KEY, True)
        assert door.opened.empty()
        await door.meter.clock.advance(20.0)
        assert await door.opened.get() == (b"hello", False)


async def test_known_client_that_sends_later_need_not_wait() -> None:
    door = Door()
    async with door.open():
        late = await door.connect(b"")
        late.send(KEY)

        assert await door.opened.get() == (KEY, True)
        assert len(door.meter.strangers) == 0


async def test_stranger_that_sends_later_waits_on() -> None:
    door = Door()
    async with door.open():
        late = await door.connect(b"")
        late.send(b"hello")
        await eventually(lambda: bool(door.looked_at))
        assert door.opened.empty()
        await door.meter.clock.advance(20.0)

        assert await door.opened.get() == (b"hello", False)


@pytest.mark.parametrize("first", [b"", b"hello"])
async def test_connection_that_was_left_is_not_opened(first: bytes) -> None:
    door = Door()
    async with door.open():
        (await door.connect(first)).close()
        if not first:
            await eventually(lambda: not len(door.meter.strangers))
        await door.connect(b"stays")
        await door.meter.clock.advance(40.0)

        opened = [await door.opened.get()]
        if first:  # it was sent before the end, and so is read
            opened.append(await door.opened.get())
        assert (b"stays", False) in opened
        assert door.opened.empty()


async def test_who_waits_too_long_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "TURN_TIMEOUT", 0.01)
    door = Door()
    async with door.open():
        late = door.dial(b"hello")

        assert await door.read(late) == BUSY
        assert len(door.meter.strangers) == 0


async def test_beyond_the_limit_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "WAITING_MAX", 1)
    door = Door()
    async with door.open():
        await door.connect(b"hello")
        loop = asyncio.get_running_loop()
        with socket.socket() as another:
            another.setblocking(False)
            await loop.sock_connect(another, (door.bound.address, door.bound.port))
            await loop.sock_sendall(another, b"hello")

            assert await door.read(another) == BUSY


async def test_stranger_that_is_dropped_while_it_waits_is_disconnected() -> None:
    door = Door()
    async with door.open():
        waiting = await door.connect(b"")
        strangers = [
            door.meter.strangers.add("192.0.2.1", lambda reason: None)
            for _ in range(PER_ADDRESS_MAX)
        ]
        door.meter.strangers._count_max = 1
        door.meter.strangers.add("192.0.2.2", lambda reason: None)

        assert strangers
        assert await door.read(waiting) == b""


async def test_network_of_known_clients_does_not_wait_with_the_others() -> None:
    door = Door()
    async with door.open():
        await door.connect(KEY)
        assert await door.opened.get() == (KEY, True)

        await door.connect(b"hello")

        assert await door.opened.get() == (b"hello", False)


async def test_behind_a_proxy_the_network_is_the_clients() -> None:
    door = Door()
    async with door.open():
        await door.connect(KEY + b" for 192.0.2.1")
        assert (await door.opened.get())[1]

        await door.connect(b"hello for 192.0.2.2")
        await door.connect(b"hello for 192.0.2.1")

        assert await door.opened.get() == (b"hello for 192.0.2.1", False)
        assert door.opened.empty()


async def test_connections_are_accepted_at_the_pace_of_their_share() -> None:
    door = Door()
    door.meter.accepting.charge(None, 2.0)
    async with door.open():
        loop = asyncio.get_running_loop()
        with socket.socket() as another:
            another.setblocking(False)
            await loop.sock_connect(another, (door.bound.address, door.bound.port))
            await loop.sock_sendall(another, KEY)
            await settle()
            assert door.looked_at == []
            await door.meter.clock.advance(20.0)

            assert await door.opened.get() == (KEY, True)


async def test_connection_that_arrives_at_the_end_is_closed() -> None:
    door = Door()
    async with door.open():
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        door.acceptor.open(theirs, "192.0.2.1", None)

    with ours:
        assert ours.recv(1) == b""


async def test_failed_accept_ends_no_port_on_windows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(acceptor, "ACCEPT_RETRY_DELAY", 0.0)
    door = Door()
    async with door.open():
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(64, "netname deleted")]

        async def sock_accept(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        await door.connect(KEY)

        assert await door.opened.get() == (KEY, True)
    assert "cannot accept a connection" in caplog.text


async def test_aborted_connection_does_not_pause_accepting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on macOS, where accepting a connection that its peer has reset fails."""
    accept, aborted = socket.socket.accept, [ConnectionAbortedError(53, "aborted")]

    def accept_after_one(listener: socket.socket) -> Any:
        if aborted:
            raise aborted.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_after_one)
    door = Door()
    async with door.open():
        await door.connect(KEY)

        assert await door.opened.get() == (KEY, True)
    assert not caplog.records
