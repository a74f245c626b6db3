"""The port on which HTTP is served, and the URL by which others reach it."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from shoal.domain.addresses import network_key
from shoal.domain.errors import ConfigError
from shoal.processes.programs import port_user
from shoal.transports.acceptor import BoundAddress, accepted, listen
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
    *,
    flag: str = "--port",
) -> AsyncIterator[BoundAddress]:
    """Serve ``app`` for the length of the block; gives its address and port.

    Connections begin as ``strangers``, until ``admit`` is called for one.  ``flag`` is
    the setting of the port.

    Raises ConfigError if the port or the address is unavailable, naming its user.
    """
    if port > PORT_MAX:
        raise ConfigError(f"{flag} {port}: expected at most {PORT_MAX}")
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
        try:
            listeners = await listen(host, port, all_addresses=True)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: "
                f"{describe_bind_error(error, port)}; "
                f"choose another {flag} (0 lets the system choose) or --host"
            ) from error
        assert runner.server is not None, "the runner is set up"
        opener = _Opener(runner.server, tls, strangers)
        async with asyncio.TaskGroup() as tasks:
            accepting = [
                tasks.create_task(
                    strangers.meter_accepting(partial(opener.accept, listener))
                )
                for listener in listeners
            ]
            try:
                yield BoundAddress.of(listeners[0])
            finally:
                for each in accepting:
                    each.cancel()
    finally:
        await runner.cleanup()


class _Opener:
    """Opens the connections of an HTTP port.

    In place of asyncio's server, which would accept all that wait at once.
    """

    def __init__(
        self,
        serve: web.Server,
        tls: ssl.SSLContext | None,
        strangers: Strangers,
    ) -> None:
        self._serve = serve
        self._strangers = strangers
        self._limits: dict[str, Any] = {}
        if tls is not None:
            self._limits = {"ssl": tls, "ssl_handshake_timeout": MESSAGE_TIMEOUT}
            strangers.meter_handshakes(tls)

    async def accept(self, listener: socket.socket) -> None:
        """Open the connections to a listener until cancelled."""
        strangers, opening = self._strangers, set[asyncio.Task[None]]()
        with listener:
            async with asyncio.TaskGroup() as tasks:
                try:
                    async for sock, address in accepted(listener, strangers):
                        if strangers.has_room(address):
                            self._begin(tasks, opening, sock, address)
                        else:
                            sock.close()
                finally:
                    for each in opening:
                        each.cancel()

    def _begin(
        self,
        tasks: asyncio.TaskGroup,
        opening: set[asyncio.Task[None]],
        sock: socket.socket,
        address: str,
    ) -> None:
        """Open a connection in a task."""
        strangers, loop = self._strangers, asyncio.get_running_loop()
        # In another iteration: a task that has not begun closes no socket.
        stranger = strangers.add(address, lambda reason: loop.call_soon(task.cancel))
        work = partial(self._open, sock, stranger)
        task = tasks.create_task(strangers.meter(work, stranger.charge))
        opening.add(task)
        task.add_done_callback(opening.discard)

    async def _open(self, sock: socket.socket, stranger: Stranger) -> None:
        secure = bool(self._limits)
        try:
            async with self._strangers.entering(stranger, sock, secure=secure):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: UnadmittedConnection(
                        self._strangers, self._serve(), stranger
                    ),
                    sock,
                    **self._limits,
                )
        except BaseException as error:
            stranger.leave()
            sock.close()
            # It may have left, or speak no TLS.
            if not isinstance(error, (OSError, TimeoutError)):
                raise


@dataclass(slots=True)
class Passage:
    """Whether a request that began as a stranger's has been admitted."""

    admitted: bool = False


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
    if (share := strangers.share) is None:
        return await respond()
    network = network_key(address)
    if share.is_spent:
        await share.wait(network)
    # A clone of the request has it as well.
    passage = request[PASSAGE] = Passage()
    spent = 0.0

    def charge(took: float) -> None:
        nonlocal spent
        if passage.admitted:
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


def admit(request: web.Request) -> None:
    """Lift the limits of a stranger from the connection of a request."""
    if (passage := request.get(PASSAGE)) is not None:
        passage.admitted = True
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
