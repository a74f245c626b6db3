"""A blocking program's connections to its run at the coordinator.

The process that trains uses a link, and so do the member that starts it and programs
that watch the run.  It is a WebSocket in a thread of its own, which connects again by
itself: what is not sent yet waits, and training goes on meanwhile.
"""

import asyncio
import hashlib
import json
import logging
import queue
import random
import secrets
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, repeat

import aiohttp

from shoal.domain.addresses import split_addresses
from shoal.domain.errors import Unavailable
from shoal.training.run_events import MESSAGE_MAX, Message, run_id_of
from shoal.transports.http_client import as_given, describe_http_error
from shoal.transports.relayed_sockets import (
    DRAIN_TIMEOUT,
    ENDED,
    FINAL_STATUSES,
    HEARTBEAT,
    REPLACED,
    TLS_CLOSE_DELAY,
    RelayedSockets,
    TriedUrl,
    bearer_session,
    tls_for,
)

RANKS, EVENTS = "ranks", "events"
"""What a connection is for: forming groups, or reporting and watching events."""

SERVER_ERRORS = 500  # HTTP: those from here on may go away
UNSENT_MAX = 1000  # messages that wait for the connection
UNREAD_MAX = 10_000  # messages that wait for `receive`; then the connection is not read
RETRY_DELAYS = (0.1, 0.25, 0.5, 1.0, 2.0)  # seconds; the last one repeats
CONNECTED = "connected"
"""The key of the message that ``receive`` returns after each connection: its number.

What was sent over the previous connection may be lost.
"""

log = logging.getLogger("shoal.training")


class RunOver(Unavailable):
    """The run has ended, or the coordinator does not know it."""


def relay_of(url: str, token: str, fingerprint: str = "") -> RelayedSockets:
    """Return the way of this process to other ranks of its run.

    All arguments are as those of ``RunLink``.
    """
    return RelayedSockets(_url_of(url, token, "relay"), token, fingerprint)


def store_piece(url: str, token: str, tls: ssl.SSLContext | None, data: bytes) -> str:
    """Store a part of a file at a run's coordinator; return its SHA-256 in hex.

    ``url`` is as in ``RunLink``.
    Waits while the coordinator is unreachable.  Raises RunOver, and Unavailable if it
    refuses.
    """
    digest = hashlib.sha256(data).hexdigest()
    path = _url_of(url, token, f"pieces/{digest}")

    async def store() -> None:
        async with bearer_session(token, tls) as session:
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
        self._url = _url_of(url, token, purpose)
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
        async with bearer_session(self._token, self._tls) as session:
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
        if socket.close_code == ENDED:
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


def _url_of(urls: str, token: str, part: str) -> TriedUrl:
    """Return the URL of a part of a run; ``urls`` are separated by commas."""
    return TriedUrl(split_addresses(urls), f"/v1/runs/{run_id_of(token)}/{part}")
