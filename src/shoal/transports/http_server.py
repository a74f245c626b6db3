"""The port on which HTTP is served, and the URL by which others reach it."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError

from shoal.domain.errors import ConfigError
from shoal.transports.mdns import addresses_of
from shoal.transports.port_user import port_user
from shoal.transports.strangers import MESSAGE_TIMEOUT, Strangers
from shoal.transports.unadmitted_connection import UnadmittedConnection

BACKLOG = 2048  # connections that may wait to be accepted; fewer and bursts are dropped
IDLE_MAX = 75.0  # seconds that a connection may take over the head of a request
SHUTDOWN_TIMEOUT = 1.0  # seconds that requests get to end when the port is closed
PORT_MAX = 65_535

log = logging.getLogger("shoal.transports")
# Clients may disconnect early or send no HTTP: aiohttp would quote it, with the
# keys in it.
log.addFilter(
    lambda record: (
        not (
            record.exc_info
            and isinstance(record.exc_info[1], (HttpProcessingError, ConnectionError))
        )
    )
)


@asynccontextmanager
async def http_listener(
    app: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    strangers: Strangers,
) -> AsyncIterator[int]:
    """Serve ``app`` for the length of the block; gives the port, if that was 0.

    Connections begin as ``strangers``, until ``admit`` is called for one.

    Raises ConfigError if the port or the address is unavailable, naming its user.
    """
    if port > PORT_MAX:
        raise ConfigError(f"--port {port}: expected at most {PORT_MAX}")
    # A client that leaves cancels its handler, and with it its job.
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=log,
        handler_cancellation=True,
        auto_decompress=False,  # who reads a body does that, with a limit
        keepalive_timeout=IDLE_MAX,
        shutdown_timeout=SHUTDOWN_TIMEOUT,
    )
    await runner.setup()
    try:
        serve = runner.server
        assert serve is not None, "the runner is set up"
        try:
            # In place of a TCPSite, which would leave no room before aiohttp.
            server = await asyncio.get_running_loop().create_server(
                lambda: UnadmittedConnection(strangers, serve()),
                *(host, port),
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else MESSAGE_TIMEOUT,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: "
                f"{describe_bind_error(error, port)}; "
                "choose another --port (0 lets the system choose) or --host"
            ) from error
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def admit(request: web.Request) -> None:
    """Lift the limits of a stranger from the connection of a request."""
    if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
        unadmitted.admit()


async def on_response(request: web.Request, response: web.StreamResponse) -> None:
    """Begin to count anew what a stranger sends: its request is being answered."""
    if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
        unadmitted.progressed()


def describe_bind_error(error: OSError, port: int) -> str:
    """Return why a port cannot be opened, with its user if known."""
    user = port_user(port) if error.errno == errno.EADDRINUSE else None
    return f"it is used by {user}" if user else error.strerror or str(error)


def public_url(host: str, port: int, *, secure: bool) -> str:
    """Return the URL at which other machines find what listens on ``host``."""
    if host in ("0.0.0.0", "::"):
        host = _lan_address()
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _lan_address() -> str:
    """Return the address that other machines reach this one by, as a best guess."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: a datagram socket only looks up the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:  # there is no route beyond the networks that it is on
            return next(iter(addresses_of("0.0.0.0")), "127.0.0.1")
        address: str = probe.getsockname()[0]
        return address
