"""A TCP port, and the connections to it: a task serves each."""

import asyncio
import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.domain.addresses import is_loopback
from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import ConnectionGate, NoGate
from shoal.protocols.seam.session import CloseCode
from shoal.transports.acceptor import BoundAddress, accepted, listen
from shoal.transports.http_server import PORT_MAX, describe_bind_error
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.strangers import BY_STRANGER, LeftEarly, Stranger, Strangers
from shoal.transports.tcp import TcpLink
from shoal.transports.tls import ServerTls

LINKS_MAX = 8192  # of one port; further connections are closed
LINKS_PER_ADDRESS_MAX = 64  # of one address; loopback is exempt
CLOSE_GRACE = 3.0  # seconds for connections to end when the port is closed
REFUSED = "refused peer=%s reason=%r"

log = logging.getLogger("shoal.transports")


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """What a connection must pass before it is served.

    First the ``gate``, then, if there is a certificate, the TLS handshake within
    ``handshake_timeout`` seconds.  Until its link is told to ``admit`` its peer, that
    is one of ``strangers``.
    """

    tls: ServerTls | None = None
    gate: ConnectionGate = NoGate()  # noqa: RUF009  # it has no state
    handshake_timeout: float = 10.0
    now: Callable[[], float] = time.monotonic  # noqa: TID251  # a default
    strangers: Strangers = field(default_factory=Strangers)


ACCEPT_ALL = ConnectionPolicy()


@asynccontextmanager
async def tcp_listener(
    host: str,
    port: int,
    serve: Callable[[TcpLink], Awaitable[object]],
    policy: ConnectionPolicy = ACCEPT_ALL,
    *,
    fallback: bool = False,
) -> AsyncIterator[BoundAddress]:
    """Serve the connections to a port for the length of the block.

    When ``serve`` returns, its connection is closed.  At the end of the block, open
    connections get ``CLOSE_GRACE`` seconds to end.  If the port is taken and
    ``fallback`` is set, the system chooses another.

    Raises ConfigError if the port cannot be opened, naming the process that has it.
    """
    if port > PORT_MAX:
        raise ConfigError(f"port {port}: expected at most {PORT_MAX}")
    sock = await _bind(host, port, fallback=fallback)
    with sock:
        if policy.tls is not None:
            policy.strangers.meter_handshakes(policy.tls.context)
        connections = _Connections(policy, serve)
        accepting = asyncio.create_task(
            policy.strangers.meter_accepting(partial(connections.accept, sock))
        )
        try:
            yield BoundAddress.of(sock)
            connections.patience = CLOSE_GRACE
        finally:
            accepting.cancel()
            with suppress(asyncio.CancelledError):
                await accepting


async def _bind(host: str, port: int, *, fallback: bool) -> socket.socket:
    """Listen at the first address that a host has.  Raises ConfigError."""
    try:
        (sock,) = await listen(host, port, all_addresses=False)
    except OSError as error:
        if fallback and error.errno == errno.EADDRINUSE:
            # By whom is not looked up: that takes longer than the rest of a start.
            log.debug("port=%d is taken, choosing another", port)
            return await _bind(host, 0, fallback=False)
        reason = describe_bind_error(error, port)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    return sock


class _Connections:
    """The connections of one port.

    ``patience`` is how many seconds they get to end by themselves.
    """

    def __init__(
        self,
        policy: ConnectionPolicy,
        serve: Callable[[TcpLink], Awaitable[object]],
    ) -> None:
        self.patience = 0.0
        self._policy = policy
        self._serve = serve
        self._serving: set[asyncio.Task[None]] = set()
        self._per_address = Counter[str]()
        self._warned: set[str] = (
            set()
        )  # addresses that were logged for too many connections

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled; then wait for the open ones."""
        async with asyncio.TaskGroup() as tasks:
            try:
                async for sock, address in accepted(listener, self._policy.strangers):
                    self._on_accepted(tasks, sock, address)
            finally:
                listener.close()
                if self._serving:
                    await asyncio.wait(self._serving, timeout=self.patience)
                for task in self._serving:
                    task.cancel()

    def _on_accepted(
        self, tasks: asyncio.TaskGroup, sock: socket.socket, address: str
    ) -> None:
        """Serve a connection in a task, unless there are too many."""
        if self._is_over_limit(address):
            sock.close()
            return
        self._per_address[address] += 1
        strangers, loop = self._policy.strangers, asyncio.get_running_loop()
        # In another iteration: a task that has not begun closes no socket.
        stranger = strangers.add(address, lambda reason: loop.call_soon(task.cancel))
        serve = partial(self._serve_socket, sock, address, stranger)
        task = tasks.create_task(strangers.meter(serve, stranger.charge))
        self._serving.add(task)
        task.add_done_callback(lambda task: self._on_ended(task, address))

    async def _serve_socket(
        self, sock: socket.socket, address: str, stranger: Stranger
    ) -> None:
        gate, now = self._policy.gate, self._policy.now
        delay = gate.delay(address, now())
        if delay is None:
            stranger.leave()
            sock.close()
            return
        try:
            link = await self._open_link(sock, address, stranger, delay)
        except LeftEarly:
            return
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            gate.failed(address, now())
            reason = f"no TLS handshake: {error}"
            log.info(REFUSED, address, reason, extra=BY_STRANGER)
            return
        try:
            await self._serve(link)
            await link.close(CloseCode.NORMAL, "")
        finally:
            link.abort()

    async def _open_link(
        self, sock: socket.socket, address: str, stranger: Stranger, delay: float
    ) -> TcpLink:
        limits: dict[str, Any] = {}
        link = TcpLink(address, stranger=stranger)
        if (tls := self._policy.tls) is not None:
            limits["ssl"] = tls.context
            limits["ssl_handshake_timeout"] = self._policy.handshake_timeout
            limits["ssl_shutdown_timeout"] = CLOSE_TIMEOUT
        try:
            if delay:
                await asyncio.sleep(delay)
            strangers = self._policy.strangers
            async with strangers.entering(stranger, sock, secure=tls is not None):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: link, sock, **limits
                )
        except BaseException:
            stranger.leave()
            sock.close()
            raise
        return link

    def _on_ended(self, task: asyncio.Task[None], address: str) -> None:
        self._serving.discard(task)
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]
            self._warned.discard(address)

    def _is_over_limit(self, address: str) -> bool:
        """Return whether there are too many connections; log that once."""
        port_full = len(self._serving) >= LINKS_MAX
        address_full = self._per_address[
            address
        ] >= LINKS_PER_ADDRESS_MAX and not is_loopback(address)
        if not (port_full or address_full):
            return False
        key = "" if port_full else address  # an address each would flood the log
        if key not in self._warned:
            self._warned.add(key)
            limit = LINKS_MAX if port_full else LINKS_PER_ADDRESS_MAX
            reason = f"over {limit} connections"
            log.warning(REFUSED, address, reason, extra=BY_STRANGER)
        return True
