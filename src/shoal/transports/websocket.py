"""WebSocket links over aiohttp, for both ends."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    WSMsgType,
    WSServerHandshakeError,
    web,
)
from yarl import URL

from shoal.protocols.session import Data
from shoal.runtime.link import LinkClosed

CLOSE_TIMEOUT = 2.0  # seconds to wait for the peer's half of the closing handshake
CONNECT_TIMEOUT = 10.0  # seconds
PING_EVERY = 20.0  # seconds: a server that vanished sends no farewell


class WebSocketLink:
    """A WebSocket of either end."""

    def __init__(
        self, socket: web.WebSocketResponse | ClientWebSocketResponse, peer: str
    ) -> None:
        self.peer = peer
        self._socket = socket

    async def receive(self) -> Data:
        message = await self._socket.receive()
        match message.type:
            case WSMsgType.TEXT | WSMsgType.BINARY:
                data: Data = message.data
                return data
            case WSMsgType.CLOSE:
                code, text = message.data or 1005, message.extra or ""
                raise LinkClosed(_closed_by_peer(code, text), code, text)
            case WSMsgType.ERROR:
                code = self._socket.close_code or 1006
                raise LinkClosed(f"broken WebSocket: {message.data}", code)
            case _:
                raise LinkClosed("connection lost", self._socket.close_code or 1006)

    async def send(self, data: Data) -> None:
        try:
            if isinstance(data, str):
                await self._socket.send_str(data)
            else:
                await self._socket.send_bytes(data)
        except (ConnectionError, ClientError, RuntimeError) as error:
            # aiohttp says with a RuntimeError that the socket is closing.
            raise LinkClosed(f"connection lost: {error}") from error

    async def close(self, code: int, text: str) -> None:
        with suppress(ConnectionError, RuntimeError):  # it is closed already
            await self._socket.close(code=code, message=text.encode())


def _closed_by_peer(code: int, text: str) -> str:
    return f"closed by peer: {code} {text}".rstrip()


async def accept(
    request: web.Request, headers: Mapping[str, str], message_max: int
) -> tuple[WebSocketLink, web.StreamResponse]:
    """Answer an upgrade request; return the link and what the handler must return."""
    socket = web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT, max_msg_size=message_max, compress=False
    )
    socket.headers.update(headers)
    await socket.prepare(request)
    return WebSocketLink(socket, request.remote or "?"), socket


@asynccontextmanager
async def dial(
    url: str, headers: Mapping[str, str], message_max: int
) -> AsyncIterator[tuple[WebSocketLink, Mapping[str, str]]]:
    """Open a WebSocket; yield the link and the headers of the answer.

    Raises LinkClosed if it does not come about.
    """
    peer = url.partition("?")[0]  # what follows may hold a token
    async with ClientSession(timeout=ClientTimeout(total=None)) as session:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await session.ws_connect(
                    URL(url, encoded=True),
                    headers=headers,
                    max_msg_size=message_max,
                    heartbeat=PING_EVERY,
                    timeout=ClientWSTimeout(ws_close=CLOSE_TIMEOUT),
                )
        except WSServerHandshakeError as error:
            reason = f"{peer} does not speak WebSocket here: HTTP {error.status}"
            raise LinkClosed(reason) from error
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            why = str(error) or "no answer"
            raise LinkClosed(f"cannot connect to {peer}: {why}") from error
        try:
            # aiohttp has no public way to the headers of the answer.
            yield (
                WebSocketLink(socket, peer),
                {
                    name.lower(): value
                    for name, value in socket._response.headers.items()
                },
            )
        finally:
            await socket.close()
