"""Connections to other machines over the coordinator, as ordinary sockets.

Each is one end of a pair, whose other end a thread of this module connects to the
coordinator, by a WebSocket.  The coordinator passes on bytes (``gateway/http/relay``),
which the two ends encrypt for each other.
"""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, TypeAlias

import aiohttp

from shoal.transports.blocking.rank_socket import Disconnected
from shoal.transports.http_client import as_given, describe_http_error
from shoal.transports.tls import context_pinning

ENDED: Final = 4001  # WebSocket close code: what the connection was for has ended
REPLACED: Final = 4002  # WebSocket close code: a newer connection of the same member
NOT_LISTENING: Final = 4003  # WebSocket close code: none listens under this id
FINAL_STATUSES = (401, 403, 404)  # HTTP: what it is for has ended, or never was
CONNECT_TIMEOUT = 10.0  # seconds
HEARTBEAT = 20.0  # seconds between pings; a silent coordinator is noticed after 30
TLS_CLOSE_DELAY = 0.25  # seconds that aiohttp does not wait for by itself
DRAIN_TIMEOUT = 2.0  # seconds to send what waits when connections are closed
PIECE_SIZE = 48 << 10  # bytes of one message of a relayed connection
RETRY_INTERVAL = 1.0  # seconds between attempts to listen for these

Accept: TypeAlias = Callable[[socket.socket], None]

log = logging.getLogger("shoal.transports")


def tls_for(fingerprint: str) -> ssl.SSLContext | None:
    """Return how to verify a coordinator; None: by the system's authorities."""
    return context_pinning(bytes.fromhex(fingerprint)) if fingerprint else None


def bearer_session(token: str, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return a session that shows a token."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
    )


class TriedUrl:
    """A URL at each of the coordinator's addresses in turn."""

    def __init__(self, bases: Sequence[str], path: str) -> None:
        self._urls = [each.rstrip("/") + path for each in bases]

    def __str__(self) -> str:
        return self._urls[0]

    def turn(self) -> None:
        """Go on to the next address, since this one does not answer."""
        self._urls.append(self._urls.pop(0))


class RelayedSockets:
    """The way of this process to others, over a relay of the coordinator.

    Args:
        url: the relay's.
        token: which the relay takes.
        fingerprint: that of the coordinator's certificate, in hexadecimal digits;
            empty: it has none, or the system's authorities vouch for it.
        group: what those who may connect to each other are called, if the relay has
            several such groups.
    """

    def __init__(
        self, url: TriedUrl, token: str, fingerprint: str = "", group: str = ""
    ) -> None:
        self._url = url
        self._group = {"group": group} if group else {}
        self._token = token
        self._tls = tls_for(fingerprint)
        self._stop = asyncio.Event()
        self._listening: set[asyncio.Task[None]] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)),
            name="shoal-relay",
            daemon=True,
        )
        self._thread.start()
        ready.wait()

    def listen(self, port_id: str, accept: Accept) -> None:
        """From now on, pass connections to a port of this process to ``accept``.

        It is called from the thread of this object, and must not block for long.
        """
        self._start(self._listening, lambda: self._listen(port_id, accept))

    def dial(self, port_id: str) -> socket.socket:
        """Return a connection to the port of another process.

        It is closed at once if none listens there.

        Raises Disconnected after ``close``.
        """
        return self._open({"to": port_id})

    def close(self) -> None:
        """Pass on what was sent, for two seconds at most, and end all connections."""
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _open(self, query: Mapping[str, str]) -> socket.socket:
        """Return the local end of a connection."""
        ours, theirs = socket.socketpair()
        self._start(self._carrying, lambda: self._carry(query, theirs))
        return ours

    def _start(
        self,
        tasks: set[asyncio.Task[None]],
        coroutine: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        def start() -> None:
            task = self._loop.create_task(coroutine())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:
            raise Disconnected("the relay over the coordinator is closed") from error

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        async with bearer_session(self._token, self._tls) as self._session:
            ready.set()
            await self._stop.wait()
            await _end(self._listening, 0)
            await _end(self._carrying, DRAIN_TIMEOUT)
        if str(self._url).startswith("https:"):
            await asyncio.sleep(TLS_CLOSE_DELAY)

    async def _listen(self, port_id: str, accept: Accept) -> None:
        while True:
            try:
                async with self._connect({"at": port_id}) as listener:
                    async for message in listener:
                        if message.type is not aiohttp.WSMsgType.TEXT:
                            break  # the connection is broken, and opened again
                        accept(self._open({"ticket": message.json()["ticket"]}))
                if listener.close_code in (REPLACED, ENDED):
                    return
            except aiohttp.WSServerHandshakeError as error:
                if error.status in FINAL_STATUSES:
                    return
            except (aiohttp.ClientError, OSError) as error:
                log.debug("relay=%s error=%s", self._url, describe_http_error(error))
                self._url.turn()
            await asyncio.sleep(RETRY_INTERVAL)

    async def _carry(self, query: Mapping[str, str], local: socket.socket) -> None:
        """Exchange bytes between a socket and the coordinator, until either ends."""
        local.setblocking(False)
        with closing(local):
            try:
                async with self._connect(query) as remote:
                    sending = self._loop.create_task(self._send(local, remote))
                    try:
                        async for message in remote:
                            if message.type is aiohttp.WSMsgType.BINARY:
                                await self._loop.sock_sendall(local, message.data)
                    finally:
                        sending.cancel()
                        await asyncio.wait([sending])
            except (aiohttp.ClientError, OSError) as error:
                log.debug("relay=%s error=%s", self._url, describe_http_error(error))

    async def _send(
        self, local: socket.socket, remote: aiohttp.ClientWebSocketResponse
    ) -> None:
        piece = memoryview(bytearray(PIECE_SIZE))
        with suppress(aiohttp.ClientError, OSError):
            while size := await self._loop.sock_recv_into(local, piece):
                await remote.send_bytes(bytes(piece[:size]))
        await remote.close()

    def _connect(self, query: Mapping[str, str]) -> Any:
        return self._session.ws_connect(
            as_given(str(self._url)),
            params={**self._group, **query},
            heartbeat=HEARTBEAT,
            compress=0,
        )


OpenRelay: TypeAlias = Callable[[str], RelayedSockets]
"""Returns the way to others of a group by its name."""


async def _end(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    """Wait for tasks, and cancel them after ``timeout`` seconds."""
    if tasks and timeout:
        await asyncio.wait([*tasks], timeout=timeout)
    left = [*tasks]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
