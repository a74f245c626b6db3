"""A TCP port, and the connections to it: a task serves each."""

import asyncio
import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from shoal.domain.addresses import is_loopback
from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import ConnectionGate, NoGate
from shoal.protocols.seam.session import CloseCode
from shoal.transports.http_server import BACKLOG, PORT_MAX, describe_bind_error
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.tcp import TcpLink
from shoal.transports.tls import ServerTls

LINKS_MAX = 8192  # of one port; further connections are closed
LINKS_PER_ADDRESS_MAX = 64  # of one address, but not of this machine's own programs
ACCEPT_RETRY_DELAY = (
    1.0  # seconds until it is tried again when the system has no room for one more
)
FAREWELL = 3.0  # seconds that connections get to end when the port is closed

log = logging.getLogger("shoal.transports")


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """Where is listened: an address of the system's, which may stand for all."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """What a connection must pass before it is served.

    First the ``gate``, then, if there is a certificate, the TLS handshake within
    ``handshake_within`` seconds.
    """

    tls: ServerTls | None = None
    gate: ConnectionGate = NoGate()  # noqa: RUF009  # it has no state
    handshake_within: float = 10.0
    now: Callable[[], float] = time.monotonic


ACCEPT_ALL = ConnectionPolicy()


@asynccontextmanager
async def tcp_listener(
    host: str,
    port: int,
    serve: Callable[[TcpLink], Awaitable[object]],
    entrance: ConnectionPolicy = ACCEPT_ALL,
    *,
    spare: bool = False,
) -> AsyncIterator[BoundAddress]:
    """Serve the connections to a port for the length of the block.

    When ``serve`` returns, its connection is closed.  At the end of the block, open
    connections get ``FAREWELL`` seconds to end.  If the port is taken and ``spare`` is
    set, the system chooses another.

    Raises ConfigError if the port cannot be opened, naming the process that has it.
    """
    if port > PORT_MAX:
        raise ConfigError(f"port {port}: expected at most {PORT_MAX}")
    sock = await _bind(host, port, spare=spare)
    with sock:
        connections = _Connections(entrance, serve)
        accepting = asyncio.create_task(connections.accept(sock))
        try:
            address, bound = sock.getsockname()[:2]
            yield BoundAddress(address, bound)
            connections.patience = FAREWELL
        finally:
            accepting.cancel()
            with suppress(asyncio.CancelledError):
                await accepting


async def _bind(host: str, port: int, *, spare: bool) -> socket.socket:
    """Listen at the first address that a host has.  Raises ConfigError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        sock = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        why = describe_bind_error(error, port)
        if spare and error.errno == errno.EADDRINUSE:
            log.debug("port=%d is taken, choosing another: %s", port, why)
            return await _bind(host, 0, spare=False)
        raise ConfigError(f"cannot listen on {host} port {port}: {why}") from error
    sock.setblocking(False)
    return sock


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection; return it with the peer's address.

    ``sock_accept`` alone loses a connection that arrives in the same iteration of the
    event loop as a cancellation: it stays open until it is collected as garbage.
    """
    accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
    try:
        await asyncio.wait([accepting])
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # one that has just arrived is in the result now
        if accepting.cancel():
            await asyncio.wait([accepting])  # until it no longer watches the listener
        elif accepting.exception() is None:
            sock, _ = accepting.result()
            sock.close()
        raise
    return accepting.result()


class _Connections:
    """The connections of one port.

    ``patience`` is for how many seconds they may end by themselves.
    """

    def __init__(
        self,
        entrance: ConnectionPolicy,
        serve: Callable[[TcpLink], Awaitable[object]],
    ) -> None:
        self.patience = 0.0
        self._entrance = entrance
        self._serve = serve
        self._serving: set[asyncio.Task[None]] = set()
        self._of_one = Counter[str]()
        self._warned: set[str] = (
            set()
        )  # addresses that were logged for too many connections

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled; then wait for the open ones."""
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    try:
                        sock, address = await accept(listener)
                    except OSError as error:  # this process has too many files open
                        log.warning("cannot accept a connection: %s", error)
                        await asyncio.sleep(ACCEPT_RETRY_DELAY)
                        continue
                    self._arrived(tasks, sock, address[0])
            finally:
                listener.close()
                if self._serving:
                    await asyncio.wait(self._serving, timeout=self.patience)
                for task in self._serving:
                    task.cancel()

    def _arrived(
        self, tasks: asyncio.TaskGroup, sock: socket.socket, address: str
    ) -> None:
        """Have a connection served, if there is room for it."""
        if self._too_many(address):
            sock.close()
            return
        self._of_one[address] += 1
        task = tasks.create_task(self._entertain(sock, address))
        self._serving.add(task)
        task.add_done_callback(lambda task: self._left(task, address))

    async def _entertain(self, sock: socket.socket, address: str) -> None:
        gate, now = self._entrance.gate, self._entrance.now
        delay = gate.delay(address, now())
        if delay is None:
            sock.close()
            return
        try:
            link = await self._opened(sock, address, delay)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            gate.failed(address, now())
            log.info("refused peer=%s reason='no TLS handshake: %s'", address, error)
            return
        try:
            await self._serve(link)
            await link.close(CloseCode.NORMAL, "")
        finally:
            link.abort()

    async def _opened(self, sock: socket.socket, address: str, delay: float) -> TcpLink:
        limits: dict[str, Any] = {}
        link = TcpLink(address)
        if (tls := self._entrance.tls) is not None:
            limits["ssl"] = tls.context
            limits["ssl_handshake_timeout"] = self._entrance.handshake_within
            limits["ssl_shutdown_timeout"] = CLOSE_TIMEOUT
            link.certificate = tls.fingerprint
        try:
            if delay:
                await asyncio.sleep(delay)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: link, sock, **limits
            )
        except BaseException:
            sock.close()
            raise
        return link

    def _left(self, task: asyncio.Task[None], address: str) -> None:
        self._serving.discard(task)
        self._of_one[address] -= 1
        if not self._of_one[address]:
            del self._of_one[address]
            self._warned.discard(address)

    def _too_many(self, address: str) -> bool:
        """Say whether there is no room for one more, once also in the log."""
        whole = len(self._serving) >= LINKS_MAX
        one = self._of_one[address] >= LINKS_PER_ADDRESS_MAX and not is_loopback(
            address
        )
        if not (whole or one):
            return False
        who = "" if whole else address  # the log would be filled by who comes and goes
        if who not in self._warned:
            self._warned.add(who)
            limit = LINKS_MAX if whole else LINKS_PER_ADDRESS_MAX
            log.warning("refused peer=%s reason='over %d connections'", address, limit)
        return True
