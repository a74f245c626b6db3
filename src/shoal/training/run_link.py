"""A blocking program's connections to its run at the coordinator.

The process that trains uses a link, and so do the member that starts it and programs
that watch the run.  It is a WebSocket in a thread of its own, which connects again by
itself: what is not sent yet waits, and training goes on meanwhile.

Ranks that cannot reach each other are connected over the coordinator.  To the rest of
the program each such connection is an ordinary socket: one end of a pair, whose other
end a thread of this module connects to the coordinator, by a WebSocket.
"""

import asyncio
import hashlib
import json
import logging
import queue
import random
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain, repeat
from typing import Any, Final, TypeAlias

import aiohttp

from shoal.domain.addresses import split_addresses
from shoal.domain.errors import Unavailable
from shoal.training.run_events import MESSAGE_MAX, Message, run_id_of
from shoal.transports.http_client import as_given, describe_http_error
from shoal.transports.rank_socket import Disconnected
from shoal.transports.tls import context_pinning

RANKS, EVENTS = "ranks", "events"
"""What a connection is for: forming groups, or reporting and watching events."""

RUN_ENDED: Final = 4001  # WebSocket close code: the run has ended
REPLACED: Final = 4002  # WebSocket close code: a newer connection of the same member
NOT_LISTENING: Final = 4003  # WebSocket close code: no rank listens under this id
FINAL_STATUSES = (401, 403, 404)  # HTTP: the run has ended, or never was
SERVER_ERRORS = 500  # HTTP: those from here on may go away
UNSENT_MAX = 1000  # messages that wait for the connection
UNREAD_MAX = 10_000  # messages that wait for `receive`; then the connection is not read
CONNECT_TIMEOUT = 10.0  # seconds
HEARTBEAT = 20.0  # seconds between pings; a silent coordinator is noticed after 30
TLS_CLOSE_DELAY = 0.25  # seconds that aiohttp does not wait for by itself
DRAIN_TIMEOUT = 2.0  # seconds to send what waits when the link is closed
PIECE_SIZE = 48 << 10  # bytes of one message of a relayed connection
RETRY_INTERVAL = 1.0  # seconds between attempts to listen for these
RETRY_DELAYS = (0.1, 0.25, 0.5, 1.0, 2.0)  # seconds; the last one repeats
CONNECTED = "connected"
"""The key of the message that ``receive`` returns after each connection: its number.

What was sent over the previous connection may be lost.
"""

Accept: TypeAlias = Callable[[socket.socket], None]

log = logging.getLogger("shoal.training")


def tls_for(fingerprint: str) -> ssl.SSLContext | None:
    """Return how to verify a coordinator; None: by the system's authorities."""
    return context_pinning(bytes.fromhex(fingerprint)) if fingerprint else None


def run_session(token: str, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return a session that shows the token of a run."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
    )


class RunOver(Unavailable):
    """The run has ended, or the coordinator does not know it."""


class _RunUrl:
    """The URL of a part of a run, at each of the coordinator's addresses in turn.

    ``urls`` are those of the coordinator, separated by commas.
    """

    def __init__(self, urls: str, token: str, part: str) -> None:
        path = f"/v1/runs/{run_id_of(token)}/{part}"
        self._urls = [each.rstrip("/") + path for each in split_addresses(urls)]

    def __str__(self) -> str:
        return self._urls[0]

    def turn(self) -> None:
        """Go on to the next address, since this one does not answer."""
        self._urls.append(self._urls.pop(0))


def store_piece(url: str, token: str, tls: ssl.SSLContext | None, data: bytes) -> str:
    """Store a part of a file at a run's coordinator; return its SHA-256 in hex.

    ``url`` is as in ``RunLink``.
    Waits while the coordinator is unreachable.  Raises RunOver, and Unavailable if it
    refuses.
    """
    digest = hashlib.sha256(data).hexdigest()
    path = _RunUrl(url, token, f"pieces/{digest}")

    async def store() -> None:
        async with run_session(token, tls) as session:
            for delay in chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1])):
                try:
                    async with session.put(str(path), data=data) as response:
                        if response.status in FINAL_STATUSES:
                            raise RunOver(f"no such open run: {path}")
                        if response.ok:
                            return
                        if response.status < SERVER_ERRORS:
                            raise Unavailable(await response.text())
                except (aiohttp.ClientError, OSError) as error:
                    log.debug("url=%s error=%s", path, describe_http_error(error))
                path.turn()
                await asyncio.sleep(delay)

    asyncio.run(store())
    return digest


class RunLink:
    """One participant's connection to a run.

    Args:
        url: the coordinator's, http:// or https://; several, separated by commas, are
            tried in turn.
        token: the run's.
        fingerprint: that of the coordinator's certificate, in hexadecimal digits;
            empty: it has none, or the system's authorities vouch for it.
        tls: how to verify the coordinator, in place of a fingerprint.
        purpose: ``RANKS`` or ``EVENTS``.
        size: the number of ranks of the run; 0: one of each member.
        round_number: which start of the script a rank belongs to.
        greeting: returns the messages to send first over each connection.
    """

    def __init__(
        self,
        url: str,
        token: str,
        fingerprint: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        purpose: str = RANKS,
        size: int = 0,
        round_number: int = 0,
        greeting: Callable[[], Sequence[Message]] = tuple,
    ) -> None:
        self.member = secrets.token_hex(8)
        self._url = _RunUrl(url, token, purpose)
        self._token = token
        self._tls = tls or tls_for(fingerprint)
        self._query = {"member": self.member, "round": str(round_number)}
        self._query |= {"size": str(size)} if size else {}
        self._greeting = greeting
        self._unsent: deque[str] = deque()
        self._unread: queue.Queue[Message | RunOver] = queue.Queue(UNREAD_MAX)
        self._over: RunOver | None = None
        self._closing = False
        self._connections = 0
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()  # whether `receive` has taken a message
        self._thread = threading.Thread(
            target=self._run, name=f"shoal-run-{purpose}", daemon=True
        )
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Queue a message; return False if 1000 wait already, or the run has ended."""
        if self._over is not None or len(self._unsent) >= UNSENT_MAX:
            return False
        self._unsent.append(json.dumps(message))
        self._notify()
        return True

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for a message; return None after ``timeout`` seconds without one.

        After each connection, the first message is ``{"connected": its number}``.

        Raises RunOver once the run has ended.
        """
        if self._over is not None and self._unread.empty():
            raise self._over
        try:
            message = self._unread.get(timeout=timeout)
        except queue.Empty:
            return None
        if not self._room.is_set():
            self._notify()
        if isinstance(message, RunOver):
            raise message
        return message

    def close(self) -> None:
        """Send what waits, for two seconds at most, and disconnect."""
        self._closing = True
        self._notify()
        self._thread.join(2 * DRAIN_TIMEOUT)

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._wake.set)
            self._loop.call_soon_threadsafe(self._room.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stay_connected())

    async def _stay_connected(self) -> None:
        try:
            await self._connect_again_and_again()
        finally:
            if str(self._url).startswith("https:"):
                await asyncio.sleep(TLS_CLOSE_DELAY)

    async def _connect_again_and_again(self) -> None:
        async with run_session(self._token, self._tls) as session:
            delays = chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1]))
            while not self._closing:
                try:
                    async with session.ws_connect(
                        as_given(str(self._url)),
                        params=self._query,
                        heartbeat=HEARTBEAT,
                        max_msg_size=MESSAGE_MAX,
                    ) as socket:
                        delays = chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1]))
                        await self._serve(socket)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in FINAL_STATUSES:
                        self._end(f"the coordinator has no such open run: {self._url}")
                except (aiohttp.ClientError, OSError) as error:
                    log.debug("run=%s error=%s", self._url, describe_http_error(error))
                    self._url.turn()
                if self._over is not None:
                    return
                if not self._closing:
                    # Jitter: after a restart, all members connect again.
                    await self._pause(next(delays) * random.uniform(0.5, 1.0))

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the link is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._wake.clear()
                    await self._wake.wait()

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._connections += 1
        await self._deliver({CONNECTED: self._connections})
        writer = asyncio.ensure_future(self._write(socket))
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    await self._deliver(json.loads(message.data))
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await writer
        if socket.close_code == RUN_ENDED:
            self._end("the run has ended")
        elif socket.close_code == REPLACED:
            self._end("another process has replaced this member")

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        for message in self._greeting():
            await socket.send_str(json.dumps(message))
        while True:
            while self._unsent:
                await socket.send_str(self._unsent[0])
                self._unsent.popleft()  # not before: it may have to be sent again
            if self._closing:
                await socket.close()
                return
            self._wake.clear()
            if not self._unsent:
                await self._wake.wait()

    async def _deliver(self, message: Message) -> None:
        """Queue a message for ``receive``, waiting while too many are unread."""
        while self._unread.full() and not self._closing:
            self._room.clear()
            await self._room.wait()
        with suppress(queue.Full):  # the link is closed
            self._unread.put_nowait(message)

    def _end(self, reason: str) -> None:
        self._over = RunOver(reason)
        with suppress(queue.Full):  # it is raised once the rest has been received
            self._unread.put_nowait(self._over)


class RelayedSockets:
    """The way of one process to other ranks of its run, over the coordinator.

    Args:
        url, token: as those of ``RunLink``.
        fingerprint: as that of ``RunLink``.
    """

    def __init__(self, url: str, token: str, fingerprint: str = "") -> None:
        self._url = _RunUrl(url, token, "relay")
        self._token = token
        self._tls = tls_for(fingerprint)
        self._stop = asyncio.Event()
        self._listening: set[asyncio.Task[None]] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)),
            name="shoal-run-relay",
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
        """Return a connection to the port of another rank.

        It is closed at once if no rank listens there.

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
        async with run_session(self._token, self._tls) as self._session:
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
                        accept(self._open({"ticket": message.json()["ticket"]}))
                if listener.close_code in (REPLACED, RUN_ENDED):
                    return
            except aiohttp.WSServerHandshakeError as error:
                if error.status in FINAL_STATUSES:
                    return
            except (aiohttp.ClientError, OSError) as error:
                log.debug("run=%s error=%s", self._url, describe_http_error(error))
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
                log.debug("run=%s error=%s", self._url, describe_http_error(error))

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
            as_given(str(self._url)), params=query, heartbeat=HEARTBEAT, compress=0
        )


async def _end(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    """Wait for tasks, and cancel them after ``timeout`` seconds."""
    if tasks and timeout:
        await asyncio.wait([*tasks], timeout=timeout)
    left = [*tasks]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
