"""WebSocket links over aiohttp, for both ends."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import (
    ClientError,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    TraceConfig,
    WSMsgType,
    WSServerHandshakeError,
    web,
)
from yarl import URL

from shoal.protocols.session import Data
from shoal.runtime.link import LinkClosed

CLOSE_TEXT_MAX = 123  # bytes that a close frame holds (RFC 6455, section 5.5)
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
        message = text.encode()[:CLOSE_TEXT_MAX].decode(errors="ignore").encode()
        try:
            # aiohttp waits for as long as the peer goes on talking.
            async with asyncio.timeout(2 * CLOSE_TIMEOUT):
                await self._socket.close(code=code, message=message)
        except (ConnectionError, RuntimeError, TimeoutError):
            pass  # it is closed already, or the peer does not listen
        except asyncio.CancelledError:
            # aiohttp also raises it for an earlier write that was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise


def _closed_by_peer(code: int, text: str) -> str:
    # The peer's own words, which a terminal may be shown.
    return f"closed by peer: {code} {ascii(text)[1:-1]}".rstrip()


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
    trace = TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    async with ClientSession(
        timeout=ClientTimeout(total=None), trace_configs=[trace]
    ) as session:
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
        except ClientResponseError as error:
            # It would print the whole URL.
            raise LinkClosed(f"{peer} does not speak HTTP here") from error
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


async def _refuse_redirect(*_: object) -> None:
    # Whoever gave us a token meant this server and no other.
    raise ClientError("the server wants to send us elsewhere")
