"""``/v1/calls``: functions called over a WebSocket, many at a time (docs/tasks.md)."""

import asyncio
from functools import partial

from aiohttp import WSMsgType, web

from shoal.domain.credentials import Scope
from shoal.domain.errors import ClientError, InvalidRequest
from shoal.gateway.call_items import read_items
from shoal.gateway.calls_desk import Count, Desk
from shoal.gateway.parts import Gateway
from shoal.gateway.record import record_of
from shoal.gateway.unread import Unread

PATH = "/v1/calls"
MESSAGE_MAX = (64 << 20) + (1 << 16)  # bytes: what workers of any wire take, about
PING_EVERY = 20.0  # seconds
CLOSE_TIMEOUT = 2.0  # seconds to wait for the client's half of the closing handshake
TOO_SLOW = 1008  # WebSocket close codes (RFC 6455, section 7.4.1)
WRONG = 1007
TOO_MUCH = "the client leaves too much unread"


def routes(gateway: Gateway, count: Count) -> list[web.RouteDef]:
    """Return the path of this face; ``count`` is told of calls that have ended."""
    return [web.get(PATH, partial(_calls, gateway, count), allow_head=False)]


async def _calls(
    gateway: Gateway, count: Count, request: web.Request
) -> web.StreamResponse:
    caller = await gateway.access.admit(request, Scope.USE)
    socket = web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT,
        heartbeat=PING_EVERY,
        max_msg_size=MESSAGE_MAX,
        compress=False,
    )
    if not socket.can_prepare(request):
        raise InvalidRequest(f"{PATH} is a WebSocket: connect with ws:// or wss://")
    await socket.prepare(request)
    record_of(request).upgraded = True
    async with asyncio.TaskGroup() as tasks:
        unread = Unread()
        desk = Desk(gateway, caller, tasks.create_task, unread, count)
        writing = tasks.create_task(_write(socket, unread))
        watching = tasks.create_task(_watch(socket, unread, request.transport))
        try:
            await _read(socket, desk)
        finally:
            desk.close()
            writing.cancel()
            watching.cancel()
    return socket


async def _read(socket: web.WebSocketResponse, desk: Desk) -> None:
    """Take what the client says until it has left, or is sent away."""
    while True:
        message = await socket.receive()
        if message.type is not WSMsgType.BINARY:
            if message.type is WSMsgType.TEXT:
                await _close(socket, WRONG, "expected MessagePack in binary messages")
            return
        try:
            desk.take(read_items(message.data))
        except ClientError as error:
            await _close(socket, WRONG, str(error))
            return


async def _write(socket: web.WebSocketResponse, unread: Unread) -> None:
    """Tell the client what there is to tell, as fast as it reads."""
    try:
        while True:
            await socket.send_bytes(await unread.take())
    except ConnectionError:
        pass  # the client is gone, which the reader finds out for itself


async def _watch(
    socket: web.WebSocketResponse,
    unread: Unread,
    transport: asyncio.Transport | None,
) -> None:
    """Send a client away that does not read, whether it hears of it or not."""
    await unread.full()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await _close(socket, TOO_SLOW, TOO_MUCH)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if transport is not None:
            transport.abort()


async def _close(socket: web.WebSocketResponse, code: int, text: str) -> None:
    await socket.close(code=code, message=text.encode()[:123])
