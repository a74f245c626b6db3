"""How connections to one node reach the sockets of another, which has the pool.

Each is a connection of its own, encrypted.  The row of the lease has what both ends
know each other by: the certificate of the one, and a secret that the other presents in
its first line.
"""

import asyncio
import hashlib
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec

from shoal.domain.addresses import host_and_port
from shoal.domain.errors import ConfigError
from shoal.store.lease import LeaseRow
from shoal.transports.acceptor import BACKLOG
from shoal.transports.http_server import describe_bind_error
from shoal.transports.splice import Spliced
from shoal.transports.strangers import BY_STRANGER, Strangers
from shoal.transports.tcp import set_options
from shoal.transports.tls import ServerTls, context_of_any

FIRST_LINE_MAX = 1024  # bytes
FIRST_LINE_TIMEOUT = 5.0  # seconds
CONNECT_TIMEOUT = 3.0  # seconds
UNKNOWN_MAX = 64  # connections that have not presented the secret yet
SUBJECT = "shoal node"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of wildcard addresses

log = logging.getLogger("shoal.app")


class FirstLine(msgspec.Struct):
    """What comes first over a tunnel.

    ``port`` is a socket of the hub's process, or a wire's port by its name.  ``client``
    is the address of a wire's peer.
    """

    secret: str
    port: str
    client: str = ""


class Destination(msgspec.Struct, frozen=True):
    """The node that has the pool; see ``LeaseRow``."""

    node: str
    certificate: str
    secret: str


class Entrance:
    """The end of tunnels at the node that has the pool.

    ``sockets`` are those of its hub by name, and ``ports`` those of its wires, which
    listen at ``host``.
    """

    def __init__(
        self,
        secret: str,
        sockets: Mapping[str, Path],
        host: str,
        ports: Mapping[str, int],
        strangers: Strangers,
    ) -> None:
        self._secret = secret
        self._sockets = sockets
        self._host = LOOPBACK.get(host, host)
        self._ports = ports
        self._strangers = strangers
        self._unknown: dict[Spliced, asyncio.TimerHandle] = {}
        self._work = _Work()

    @asynccontextmanager
    async def open(self, host: str, port: int, tls: ServerTls) -> AsyncIterator[int]:
        """Listen for the length of the block; gives the port.

        Raises ConfigError if it cannot be opened.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: Spliced(self._on_made, self._on_early, self._on_lost),
                *(host, port),
                ssl=tls.context,
                ssl_handshake_timeout=FIRST_LINE_TIMEOUT,
                backlog=BACKLOG,
            )
        except OSError as error:
            reason = describe_bind_error(error, port)
            raise ConfigError(
                f"--node: cannot listen on {host} port {port}: {reason}"
            ) from error
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self._work.cut()

    def _on_made(self, near: Spliced) -> None:
        self._work.add(near)
        if len(self._unknown) >= UNKNOWN_MAX:
            next(iter(self._unknown)).abort()  # the oldest
        loop = asyncio.get_running_loop()
        self._unknown[near] = loop.call_later(FIRST_LINE_TIMEOUT, near.abort)

    def _on_lost(self, near: Spliced) -> None:
        self._forget(near)
        self._work.discard(near)

    def _forget(self, near: Spliced) -> None:
        if (timer := self._unknown.pop(near, None)) is not None:
            timer.cancel()

    def _on_early(self, near: Spliced) -> None:
        if near not in self._unknown:
            return  # its other end is being connected
        line, found, rest = near.early.partition(b"\n")
        if not found and len(line) < FIRST_LINE_MAX:
            return
        self._forget(near)
        try:
            first = msgspec.json.decode(line, type=FirstLine)
        except msgspec.MsgspecError:
            near.abort()
            return
        if not compare_digest(first.secret.encode(), self._secret.encode()):
            wrong = "a connection of another node has a wrong secret"
            log.warning(wrong, extra=BY_STRANGER)
            near.abort()
            return
        near.early = bytearray(rest)
        near.pause()
        _tune(near)
        self._work.start(self._connect(near, first))

    async def _connect(self, near: Spliced, first: FirstLine) -> None:
        loop = asyncio.get_running_loop()
        far = Spliced()
        try:
            if (path := self._sockets.get(first.port)) is not None:
                await loop.create_unix_connection(lambda: far, str(path))
            elif (port := self._ports.get(first.port)) is not None:
                await self._connect_port(far, port, first.client)
            else:
                log.warning("another node asked for the port %r", first.port)
                near.abort()
                return
        except OSError:  # this process ends
            near.abort()
            return
        near.join(far)

    async def _connect_port(self, far: Spliced, port: int, client: str) -> None:
        """Connect with a wire's port, at which the client counts, not this process."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        sock = socket.socket(family)
        try:
            sock.setblocking(False)
            sock.bind((address[0], 0))
            self._strangers.forward(sock.getsockname()[:2], client)
            await loop.sock_connect(sock, address)
            await loop.create_connection(lambda: far, sock=sock)
        except BaseException:
            sock.close()
            raise


class Bridge:
    """Connects what reaches this node with the node that has the pool.

    The ports of wires listen at ``host``.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._to: Destination | None = None
        self._ports: Mapping[str, int] = {}
        self._work = _Work()
        self._uses = Counter[str]()
        self._tried = set[str]()
        self._unreached: Destination | None = None  # of which the log knows
        self._listening: AsyncExitStack

    @asynccontextmanager
    async def open(self, sockets: Mapping[str, Path]) -> AsyncIterator["Bridge"]:
        """Accept connections of fronts for the length of the block."""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as opened, AsyncExitStack() as self._listening:
            opened.callback(self._work.cut)
            for name, path in sockets.items():
                server = await loop.create_unix_server(
                    self._receiver(name), path, backlog=BACKLOG
                )
                opened.callback(server.close)
            yield self

    def was_used(self, name: str) -> bool:
        """Return whether a socket had a connection since this was called last."""
        used = self._uses[name] > 0 or name in self._tried
        self._tried.discard(name)
        return used

    async def follow(self, row: LeaseRow) -> None:
        """Connect with the node that has the pool, and no other.

        A port of a wire that is in use here is left out, and logged.
        """
        to = None
        if row.secret:
            to = Destination(row.node, row.certificate, row.secret)
        if to != self._to:
            self._to = to
            self._work.cut()
        if to is None or (ports := json.loads(row.ports)) == self._ports:
            return
        self._ports = ports
        await self._listening.aclose()
        loop = asyncio.get_running_loop()
        for name, port in ports.items():
            try:
                server = await loop.create_server(
                    self._receiver(name), self._host, port, backlog=BACKLOG
                )
            except OSError as error:
                reason = describe_bind_error(error, port)
                log.warning("no port for %s at this node: %s", name, reason)
            else:
                self._listening.callback(server.close)

    def _receiver(self, name: str) -> Callable[[], Spliced]:
        made, lost = partial(self._on_made, name), partial(self._on_lost, name)
        return partial(Spliced, made, None, lost)

    def _on_lost(self, name: str, near: Spliced) -> None:
        self._uses[name] -= 1
        self._work.discard(near)

    def _on_made(self, name: str, near: Spliced) -> None:
        self._uses[name] += 1
        self._tried.add(name)
        self._work.add(near)
        near.pause()
        if self._to is None:
            near.abort()
        else:
            self._work.start(self._connect(near, self._to, name))

    async def _connect(self, near: Spliced, to: Destination, name: str) -> None:
        assert near.transport is not None
        peer = near.transport.get_extra_info("peername")
        client = peer[0] if isinstance(peer, tuple) else ""
        place = host_and_port(to.node)
        assert place is not None, "the node has checked it"
        loop = asyncio.get_running_loop()
        far = Spliced()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await loop.create_connection(
                    *(lambda: far, *place),
                    ssl=context_of_any(),
                    server_hostname="",
                )
        except OSError as error:  # TimeoutError and ssl.SSLError are, too
            self._on_unreached(to, "the node %s cannot be reached: %s", to.node, error)
            near.abort()
            return
        if far.transport is None or _certificate(far) != to.certificate:
            other = "what answers at %s is another program than the node"
            self._on_unreached(to, other, to.node)
            far.abort()
            near.abort()
            return
        self._unreached = None
        _tune(far)
        far.write(msgspec.json.encode(FirstLine(to.secret, name, client)) + b"\n")
        near.join(far)

    def _on_unreached(self, to: Destination, why: str, *values: object) -> None:
        """Log why, once until the node is reached: fronts try 20 times a second."""
        if self._unreached != to:
            self._unreached = to
            log.warning(why, *values)


def _tune(end: Spliced) -> None:
    if end.transport is not None:
        set_options(end.transport.get_extra_info("socket"))


def _certificate(far: Spliced) -> str:
    """Return the SHA-256 of the certificate that the other end has shown."""
    assert far.transport is not None
    end = far.transport.get_extra_info("ssl_object")
    return hashlib.sha256(end.getpeercert(binary_form=True) or b"").hexdigest()


class _Work:
    """Open connections, and tasks that make others."""

    def __init__(self) -> None:
        self._connections: set[Spliced] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, connection: Spliced) -> None:
        self._connections.add(connection)

    def discard(self, connection: Spliced) -> None:
        self._connections.discard(connection)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cut(self) -> None:
        """Cut all connections, and make no more of those that are being made."""
        for task in self._tasks:
            task.cancel()
        for each in [*self._connections]:
            each.abort()
