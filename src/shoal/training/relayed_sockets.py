"""Connections between ranks over the coordinator, where they cannot reach each other.

To the rest of the program each is an ordinary socket: one end of a pair, whose other
end a thread of this module connects to the coordinator, by a WebSocket.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing, suppress
from typing import Any, Final, TypeAlias

from aiohttp import (
    ClientError,
    ClientWebSocketResponse,
    WSMsgType,
    WSServerHandshakeError,
)

from shoal.training.run_link import (
    DRAIN_TIMEOUT,
    FINAL_STATUSES,
    HEARTBEAT,
    REPLACED,
    RUN_ENDED,
    TLS_CLOSE_DELAY,
    run_session,
    tls_for,
)
from shoal.training.run_token import run_id_of
from shoal.transports.http_client import describe_http_error
from shoal.transports.rank_socket import Disconnected

NOT_LISTENING: Final = 4003  # WebSocket close code: no rank listens under this id
PIECE_SIZE = 48 << 10  # bytes of one message
RETRY_INTERVAL = 1.0  # seconds between attempts to listen

Accept: TypeAlias = Callable[[socket.socket], None]

log = logging.getLogger("shoal.training")


class RelayedSockets:
    """The way of one process to other ranks of its run, over the coordinator.

    Args:
        url: the coordinator's, http:// or https://.
        token: the run's.
        fingerprint: as that of ``RunLink``.
    """

    def __init__(self, url: str, token: str, fingerprint: str = "") -> None:
        self._url = f"{url.rstrip('/')}/v1/runs/{run_id_of(token)}/relay"
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
            raise Disconnected("the way over the coordinator is closed") from error

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        async with run_session(self._token, self._tls) as self._session:
            ready.set()
            await self._stop.wait()
            await _end(self._listening, 0)
            await _end(self._carrying, DRAIN_TIMEOUT)
        if self._url.startswith("https:"):
            await asyncio.sleep(TLS_CLOSE_DELAY)

    async def _listen(self, port_id: str, accept: Accept) -> None:
        while True:
            try:
                async with self._connect({"at": port_id}) as listener:
                    async for message in listener:
                        accept(self._open({"ticket": message.json()["ticket"]}))
                if listener.close_code in (REPLACED, RUN_ENDED):
                    return
            except WSServerHandshakeError as error:
                if error.status in FINAL_STATUSES:
                    return
            except (ClientError, OSError) as error:
                log.debug("run=%s error=%s", self._url, describe_http_error(error))
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
                            if message.type is WSMsgType.BINARY:
                                await self._loop.sock_sendall(local, message.data)
                    finally:
                        sending.cancel()
                        await asyncio.wait([sending])
            except (ClientError, OSError) as error:
                log.debug("run=%s error=%s", self._url, describe_http_error(error))

    async def _send(
        self, local: socket.socket, remote: ClientWebSocketResponse
    ) -> None:
        piece = memoryview(bytearray(PIECE_SIZE))
        with suppress(ClientError, OSError):
            while size := await self._loop.sock_recv_into(local, piece):
                await remote.send_bytes(bytes(piece[:size]))
        await remote.close()

    def _connect(self, query: Mapping[str, str]) -> Any:
        return self._session.ws_connect(
            self._url, params=query, heartbeat=HEARTBEAT, compress=0
        )


async def _end(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    """Wait for tasks, and cancel them after so many seconds."""
    if tasks and timeout:
        await asyncio.wait([*tasks], timeout=timeout)
    left = [*tasks]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
