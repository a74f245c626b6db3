"""The port on which HTTP is served, and the URL by which others reach it."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web, web_response
from aiohttp.hdrs import CONNECTION
from aiohttp.http import HttpProcessingError

from shoal.domain.addresses import network_key
from shoal.domain.errors import ConfigError
from shoal.processes.programs import port_user
from shoal.transports.acceptor import (
    BACKLOG,
    TURN_TIMEOUT,
    Acceptor,
    BoundAddress,
    FirstLook,
    listen,
)
from shoal.transports.mdns import addresses_of
from shoal.transports.strangers import (
    MESSAGE_TIMEOUT,
    REQUEST_COST,
    Stranger,
    Strangers,
)
from shoal.transports.unadmitted_connection import UnadmittedConnection

IDLE_MAX = 75.0  # seconds that a connection may take over the head of a request
SHUTDOWN_TIMEOUT = 1.0  # seconds that requests get to end when the port is closed
PORT_MAX = 65_535

BUSY_TEXT = "there are too many requests without a key: try again later, or send one"
BUSY = (
    "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 10\r\nConnection: close\r\n"
    f"Content-Type: text/plain\r\nContent-Length: {len(BUSY_TEXT)}\r\n\r\n{BUSY_TEXT}"
).encode()
"""What a client reads whose connection waited too long for its turn."""

# Of all responses, with those that aiohttp gives before any handler runs.  Its own name
# has its version and Python's.
setattr(web_response, "SERVER_SOFTWARE", "shoal")  # noqa: B010  # it is not exported

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


async def listen_for_http(host: str, port: int, flag: str) -> list[socket.socket]:
    """Listen at all addresses of a host.

    Raises ConfigError if the port or the address is unavailable, naming its user.
    """
    if port > PORT_MAX:
        raise ConfigError(f"{flag} {port}: expected at most {PORT_MAX}")
    try:
        return await listen(host, port, all_addresses=True, defer=MESSAGE_TIMEOUT)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: "
            f"{describe_bind_error(error, port)}; "
            f"choose another {flag} (0 lets the system choose) or --host"
        ) from error


def _runner(app: web.Application) -> web.AppRunner:
    # A client that leaves cancels its handler, and with it its job.
    return web.AppRunner(
        app,
        access_log=None,
        logger=log,
        handler_cancellation=True,
        auto_decompress=False,  # who reads a body does that, with a limit
        keepalive_timeout=IDLE_MAX,
        shutdown_timeout=SHUTDOWN_TIMEOUT,
    )


@asynccontextmanager
async def unix_listener(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` at a Unix socket for the length of the block."""
    runner = _runner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, path, backlog=BACKLOG).start()
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def http_listener(
    app: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    strangers: Strangers,
    *,
    look: FirstLook | None = None,
    flag: str = "--port",
    sockets: Sequence[socket.socket] = (),
) -> AsyncIterator[BoundAddress]:
    """Serve ``app`` for the length of the block; gives its address and port.

    ``sockets`` listen there already, if any are given.

    Connections begin as ``strangers``, until ``admit`` is called for one, unless
    a ``look`` at its first bytes says that it is a known client's.  ``flag`` is the
    setting of the port.

    Raises ConfigError if the port or the address is unavailable, naming its user.
    """
    runner = _runner(app)
    await runner.setup()
    try:
        listeners = [*sockets] or await listen_for_http(host, port, flag)
        assert runner.server is not None, "the runner is set up"
        opening = partial(_open, runner.server, tls, strangers)
        if tls is None:
            acceptor = Acceptor(strangers, opening, look, BUSY)
        else:  # encrypted data shows nothing until the handshake
            strangers.meter_handshakes(tls)
            acceptor = Acceptor(strangers, opening)
        async with acceptor.accepting(*listeners):
            yield BoundAddress.of(listeners[0])
    finally:
        await runner.cleanup()


async def _open(
    serve: web.Server,
    tls: ssl.SSLContext | None,
    strangers: Strangers,
    sock: socket.socket,
    address: str,
    stranger: Stranger | None,
) -> None:
    """Open a connection, which aiohttp serves."""

    def protocol() -> asyncio.Protocol:
        inner = serve()
        if stranger is None:
            return inner
        return UnadmittedConnection(strangers, inner, stranger)

    secure = tls is not None
    try:
        with nullcontext() if stranger is None else stranger.opening(secure=secure):
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol,
                sock,
                ssl=tls,
                ssl_handshake_timeout=MESSAGE_TIMEOUT if secure else None,
            )
    except BaseException as error:
        if stranger is not None:
            stranger.leave()
        sock.close()
        # It may have left, or speak no TLS.
        if not isinstance(error, OSError):
            raise


@dataclass(slots=True)
class Passage:
    """Whether a request that began as a stranger's has been admitted, or released."""

    admitted: bool = False
    released: bool = False


PASSAGE = web.RequestKey("passage", Passage)


async def answer_stranger(
    request: web.Request,
    address: str,
    strangers: Strangers,
    respond: Callable[[], Coroutine[Any, Any, web.StreamResponse]],
) -> web.StreamResponse:
    """Answer a request of a client at ``address`` that shows no credential.

    It waits for its turn in the strangers' share of the loop, and is charged the CPU
    time that answering takes, unless that admits the client.
    """
    network = network_key(address)
    if (share := strangers.share_of(network)) is None:
        return await respond()
    if share.is_spent:
        try:
            async with asyncio.timeout(TURN_TIMEOUT):
                await share.wait(network)
        except TimeoutError:
            retry = {"Retry-After": f"{TURN_TIMEOUT:.0f}"}
            raise web.HTTPServiceUnavailable(text=BUSY_TEXT, headers=retry) from None
    # A clone of the request has it as well.
    passage = request[PASSAGE] = Passage()
    spent = 0.0

    def charge(took: float) -> None:
        nonlocal spent
        if passage.admitted or passage.released:
            return
        if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
            unadmitted.charge(took)
        else:
            spent += took
            share.charge(network, took)

    try:
        charge(REQUEST_COST)
        return await strangers.meter(respond, charge)
    finally:
        if passage.admitted:
            share.charge(network, -spent)
            strangers.meet(network)


def admit(request: web.Request) -> None:
    """Lift the limits of a stranger from the connection of a request."""
    if (passage := request.get(PASSAGE)) is not None:
        passage.admitted = True
    if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
        unadmitted.admit()


def release(request: web.Request) -> None:
    """Lift the limits, too: another process counts the peer from now on."""
    if (passage := request.get(PASSAGE)) is not None:
        passage.released = True
    if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
        unadmitted.release()


async def on_response(request: web.Request, response: web.StreamResponse) -> None:
    """Restart the count of what a stranger sends: its request is being answered.

    The end of an answer without a length is that of the connection in HTTP/1.0, which
    aiohttp keeps open if the client asks for that.
    """
    if request.version < HttpVersion11 and CONNECTION not in response.headers:
        response.force_close()
    if (unadmitted := UnadmittedConnection.of(request.transport)) is not None:
        unadmitted.progressed()


def describe_bind_error(error: OSError, port: int) -> str:
    """Return why a port cannot be opened, with its user if known."""
    user = port_user(port) if error.errno == errno.EADDRINUSE else None
    return f"it is used by {user}" if user else error.strerror or str(error)


def public_urls(host: str, port: int, *, secure: bool) -> Sequence[str]:
    """Return the URLs at which other machines may find what listens on ``host``.

    The first one is that of ``public_url``.
    """
    addresses = addresses_of(host) if host in ("0.0.0.0", "::") else ()
    urls = [public_url(each, port, secure=secure) for each in (host, *addresses)]
    return list(dict.fromkeys(urls))


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
