"""A TCP port, and the connections to it: a task serves each."""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import ConnectionGate, NoGate
from shoal.protocols.seam.session import CloseCode
from shoal.transports.acceptor import Acceptor, BoundAddress, listen
from shoal.transports.http_server import PORT_MAX, describe_bind_error
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.strangers import BY_STRANGER, Stranger, Strangers
from shoal.transports.tcp import TcpLink
from shoal.transports.tls import ServerTls

CLOSE_GRACE = 3.0  # seconds for connections to end when the port is closed
REFUSED = "refused peer=%s reason=%r"

log = logging.getLogger("shoal.transports")


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """What a connection must pass before it is served.

    First the ``gate``, then, if there is a certificate, the TLS handshake within
    ``handshake_timeout`` seconds.  Until its peer is admitted, it counts as one of
    ``strangers``.
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
        acceptor = Acceptor(policy.strangers, partial(_serve, policy, serve))
        async with acceptor.accepting(sock, patience=CLOSE_GRACE):
            yield BoundAddress.of(sock)


async def _bind(host: str, port: int, *, fallback: bool) -> socket.socket:
    """Listen at the first address that a host has.  Raises ConfigError."""
    try:
        (sock,) = await listen(host, port, all_addresses=False)
    except OSError as error:
        if fallback and error.errno == errno.EADDRINUSE:
            # The program is not looked up: that takes longer than the rest of a start.
            log.debug("port=%d is taken, choosing another", port)
            return await _bind(host, 0, fallback=False)
        reason = describe_bind_error(error, port)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    return sock


async def _serve(
    policy: ConnectionPolicy,
    serve: Callable[[TcpLink], Awaitable[object]],
    sock: socket.socket,
    address: str,
    stranger: Stranger | None,
) -> None:
    """Serve a connection until it ends."""
    assert stranger is not None, "without a first look, no client is known"
    gate, now = policy.gate, policy.now
    delay = gate.delay(address, now())
    if delay is None:
        stranger.leave()
        sock.close()
        return
    try:
        link = await _open_link(policy, sock, address, stranger, delay)
    except OSError as error:  # ssl.SSLError and TimeoutError are, too
        gate.failed(address, now())
        reason = f"no TLS handshake: {error}"
        log.info(REFUSED, address, reason, extra=BY_STRANGER)
        return
    try:
        await serve(link)
        await link.close(CloseCode.NORMAL, "")
    finally:
        link.abort()


async def _open_link(
    policy: ConnectionPolicy,
    sock: socket.socket,
    address: str,
    stranger: Stranger,
    delay: float,
) -> TcpLink:
    limits: dict[str, Any] = {}
    link = TcpLink(address, stranger=stranger)
    if policy.tls is not None:
        limits["ssl"] = policy.tls.context
        limits["ssl_handshake_timeout"] = policy.handshake_timeout
        limits["ssl_shutdown_timeout"] = CLOSE_TIMEOUT
    try:
        if delay:
            await asyncio.sleep(delay)
        with stranger.opening(secure=bool(limits)):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: link, sock, **limits
            )
    except BaseException:
        stranger.leave()
        sock.close()
        raise
    return link
