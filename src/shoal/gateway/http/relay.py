"""Connections between machines that cannot reach each other, passed on to each other.

A process *listens* under the id of its port.  When another one *dials* that id, the
listener gets a ticket, with which it opens the other half of the connection.  What is
passed on are bytes, which the two ends encrypt for each other.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from aiohttp import WSMsgType, web

from shoal.domain.errors import InvalidRequest
from shoal.gateway.http.ids import new_id
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.web_origins import PagePolicy
from shoal.transports.clock import Clock
from shoal.transports.relayed_sockets import ENDED, NOT_LISTENING, REPLACED

BYTES_PER_SECOND = 64 << 20  # of all relayed connections of a coordinator
ANSWER_TIMEOUT = 10.0  # seconds for a process that is dialled
PING_EVERY = 20.0  # seconds
CLOSE_TIMEOUT = 2.0  # seconds for the other end's half of the closing handshake
ID_MAX = 256  # characters of the id of a port
GOING_AWAY: Final = 1001  # WebSocket close code (RFC 6455, section 7.4.1)


class BytePace:
    """Bounds the bytes per second: traffic beyond the rate is delayed."""

    def __init__(self, rate: float = BYTES_PER_SECOND) -> None:
        self._rate = rate
        self._free_at = 0.0

    def delay(self, size: int, now: float) -> float:
        """Return the queueing delay of ``size`` bytes, in seconds."""
        begin = max(now, self._free_at)
        self._free_at = begin + size / self._rate
        return begin - now


class _Half:
    """The accepting end of a relayed connection."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket
        self.done = asyncio.Event()


class SocketRelay:
    """The relayed connections of one run or group; each method serves one WebSocket."""

    def __init__(self, pace: BytePace, clock: Clock) -> None:
        self._pace = pace
        self._clock = clock
        self._open: set[asyncio.Task[object]] = set()
        self._ended = False
        self._listeners: dict[str, web.WebSocketResponse] = {}
        self._listener_added = asyncio.Event()
        self._dialled: dict[str, asyncio.Future[_Half]] = {}

    @property
    def count(self) -> int:
        """The number of connections that are open."""
        return len(self._open)

    async def listen(self, port_id: str, socket: web.WebSocketResponse) -> None:
        """Notify a process of connections to its port, until it leaves."""
        older = self._listeners.get(port_id)
        self._listeners[port_id] = socket
        self._listener_added.set()
        if older is not None:
            await older.close(code=REPLACED)
        try:
            async with self._serving(socket):
                while not socket.closed:  # a listener has nothing to say
                    await socket.receive()
        finally:
            if self._listeners.get(port_id) is socket:
                del self._listeners[port_id]

    async def dial(self, port_id: str, socket: web.WebSocketResponse) -> None:
        """Connect a process to the one that listens, until either leaves."""
        async with self._serving(socket):
            half = await self._call(port_id)
            if half is None:
                await socket.close(code=NOT_LISTENING)
                return
            try:
                await self._connect(socket, half.socket)
            finally:
                half.done.set()

    async def accept(self, ticket: str, socket: web.WebSocketResponse) -> None:
        """Take the other half of a connection, until either end leaves."""
        async with self._serving(socket):
            dialled = self._dialled.get(ticket)
            if dialled is None or dialled.done():
                await socket.close(code=NOT_LISTENING)
                return
            half = _Half(socket)
            dialled.set_result(half)
            await half.done.wait()

    def end(self) -> None:
        """Close all connections: what they are for has ended."""
        self._ended = True
        for task in self._open:
            task.cancel()

    @asynccontextmanager
    async def _serving(self, socket: web.WebSocketResponse) -> AsyncIterator[None]:
        """Serve a WebSocket within the block, until the end of all."""
        task = asyncio.current_task()
        assert task is not None, "each request has one"
        self._open.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise
            task.uncancel()
            await socket.close(code=ENDED)
        finally:
            self._open.discard(task)

    async def _call(self, port_id: str) -> _Half | None:
        """Ask the process that listens for its half; None: it does not answer.

        One that is not there yet may be about to connect.
        """
        ticket = new_id()  # no secret: a token is asked for besides
        answer: asyncio.Future[_Half] = asyncio.get_running_loop().create_future()
        self._dialled[ticket] = answer
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                while (listener := self._listeners.get(port_id)) is None:
                    self._listener_added.clear()
                    await self._listener_added.wait()
                await listener.send_json({"ticket": ticket})
                return await answer
        except (TimeoutError, ConnectionError):
            return None
        finally:
            del self._dialled[ticket]

    async def _connect(
        self, one: web.WebSocketResponse, other: web.WebSocketResponse
    ) -> None:
        """Pass bytes on in both directions, until either end leaves."""
        copies = [
            asyncio.ensure_future(self._copy(one, other)),
            asyncio.ensure_future(self._copy(other, one)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.wait(copies)
            for socket in one, other:
                await socket.close(code=GOING_AWAY)

    async def _copy(
        self, source: web.WebSocketResponse, target: web.WebSocketResponse
    ) -> None:
        with suppress(ConnectionError):  # the target has left
            while (message := await source.receive()).type is WSMsgType.BINARY:
                delay = self._pace.delay(len(message.data), self._clock.now())
                if delay:
                    await asyncio.sleep(delay)
                await target.send_bytes(message.data)


RELAY_ROLES = {
    "at": SocketRelay.listen,
    "to": SocketRelay.dial,
    "ticket": SocketRelay.accept,
}
"""What a process does at the relay, by the parameter of its request."""


async def open_socket(
    request: web.Request, pages: PagePolicy, message_max: int
) -> web.WebSocketResponse:
    """Return the WebSocket that a request opens; ``message_max`` is in bytes.

    Raises InvalidRequest for any other request, and NotAdmitted for a web page's.
    """
    socket = web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT,
        heartbeat=PING_EVERY,
        max_msg_size=message_max,
        compress=False,
    )
    pages.check_upgrade(request.headers)
    if not socket.can_prepare(request):
        raise InvalidRequest(f"{request.path} is a WebSocket: connect with ws://")
    await socket.prepare(request)
    record_of(request).upgraded = True
    return socket


def role_of(request: web.Request) -> tuple[str, str]:
    """Return which of the ``RELAY_ROLES`` a request has, and for which id.

    Raises InvalidRequest.
    """
    roles = [each for each in RELAY_ROLES if each in request.query]
    if len(roles) != 1 or not 0 < len(request.query[roles[0]]) <= ID_MAX:
        raise InvalidRequest("expected one of the parameters at, to and ticket")
    return roles[0], request.query[roles[0]]
