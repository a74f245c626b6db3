"""Relays to the hub's process what a front does not answer itself.

Requests are sent on as they are, and WebSockets as bytes.  A first header names the
client; the hub's process believes it, because only fronts reach its sockets.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from shoal.domain.errors import ShuttingDown
from shoal.front.front_access import FrontAccess
from shoal.front.linked_jobs import NO_HUB, LinkedJobs, OnlyAtHub
from shoal.gateway.http.proxies import ADMITTED, CLIENT, client_header
from shoal.gateway.http.request_record import REQUEST_ID, record_of
from shoal.transports import http_server

BODY = web.RequestKey("body", bytes)
"""The body of a request that was read here before it turned out that the hub has to."""

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "expect", CLIENT.lower()),
    }
)
READ_MAX = 64 << 10  # bytes of a relayed connection that are read at a time
SENT_MAX = 1 << 20  # bytes that wait to be sent on until no more are read
NO_BODY = frozenset({204, 304})
SWITCHING_PROTOCOLS = 101


class RequestRelay:
    """Sends requests on to the hub's process."""

    def __init__(self, jobs: LinkedJobs, access: FrontAccess, path: Path) -> None:
        self._jobs = jobs
        self._access = access
        self._path = path
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep connections for the length of the block."""
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._path), limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=(
                "User-Agent",
                "Accept",
                "Accept-Encoding",
                "Content-Type",
            ),
        ) as self._session:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request as the hub's process does.

        Raises ShuttingDown if there is none.
        """
        record = record_of(request)
        record.relayed = True
        await self._admit(request)
        await self._jobs.wait_up()
        if request.headers.get("Upgrade", "").lower() == "websocket":
            self._jobs.upgraded += 1
            try:
                return await relay_upgrade(request, self._path)
            finally:
                self._jobs.upgraded -= 1
        try:
            async with self._session.request(
                request.method,
                f"http://hub{request.raw_path}",
                headers=_sent_headers(request, record.id),
                data=_body(request),
                allow_redirects=False,
            ) as answered:
                return await _passed_on(request, answered)
        except aiohttp.ClientConnectionError as error:
            raise ShuttingDown(NO_HUB) from error

    async def _admit(self, request: web.Request) -> None:
        """Lift the limits of strangers from a client with a key."""
        try:
            key = await self._access.key_of(request)
        except OnlyAtHub:
            return
        if key is not None:
            http_server.admit(request)


def _sent_headers(request: web.Request, request_id: str) -> CIMultiDict[str]:
    sent = CIMultiDict([(CLIENT, client_header(request.remote or "", request.scheme))])
    kept = BODY not in request
    for name, value in request.headers.items():
        lower = name.lower()
        if lower in HOP_BY_HOP or lower == REQUEST_ID:
            continue
        if kept or lower not in ("content-length", "content-encoding"):
            sent.add(name, value)
    sent[REQUEST_ID] = request_id
    return sent


def _body(request: web.Request) -> bytes | aiohttp.StreamReader | None:
    if BODY in request:
        return request[BODY]
    return request.content if request.body_exists else None


async def _passed_on(
    request: web.Request, answered: aiohttp.ClientResponse
) -> web.StreamResponse:
    response = web.StreamResponse(status=answered.status, reason=answered.reason)
    response.headers.clear()
    for name, value in answered.headers.items():
        if name.lower() == ADMITTED:
            http_server.admit(request)
        elif name.lower() not in HOP_BY_HOP:
            response.headers.add(name, value)
    await response.prepare(request)
    if request.method != "HEAD" and answered.status not in NO_BODY:
        try:
            async for data in answered.content.iter_any():
                await response.write(data)
        except aiohttp.ClientError as error:
            # The hub's process ended: no client may take this for the whole answer.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError from error
    await response.write_eof()
    return response


class Switched(web.StreamResponse):
    """The response to a request whose connection is relayed: it is written already."""

    def __init__(self) -> None:
        super().__init__(status=SWITCHING_PROTOCOLS)
        self.force_close()

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Write nothing."""


class ToHub:
    """Sends on what a client sends after its request, as a parser of aiohttp."""

    def __init__(self, client: asyncio.Transport, hub: asyncio.StreamWriter) -> None:
        self._client = client
        self._hub = hub
        self._waiting: asyncio.Task[None] | None = None

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if self._hub.is_closing():  # uvloop raises an error for what is written then
            return False, b""
        self._hub.write(data)
        if self._waiting is None and self._sent_too_much():
            self._client.pause_reading()
            self._waiting = asyncio.get_running_loop().create_task(self._drain())
        return False, b""

    def feed_eof(self) -> None:
        """The client has left; the hub may have, too."""
        self._hub.close()

    def _sent_too_much(self) -> bool:
        return self._hub.transport.get_write_buffer_size() > SENT_MAX

    async def _drain(self) -> None:
        with suppress(ConnectionError):  # who reads from the hub notices it
            await self._hub.drain()
        self._waiting = None
        self._client.resume_reading()


async def relay_upgrade(request: web.Request, hub: Path) -> web.StreamResponse:
    """Relay the bytes of a connection that asks for another protocol, to its end.

    Raises ShuttingDown if there is no hub.
    """
    if sys.platform == "win32":
        raise ShuttingDown(NO_HUB)  # there are no fronts
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    try:
        reader, writer = await asyncio.open_unix_connection(hub)
    except OSError as error:
        raise ShuttingDown(NO_HUB) from error
    # The hub's process counts it among its strangers, until it is admitted there.
    http_server.release(request)
    try:
        client = client_header(request.remote or "", request.scheme)
        fields = [(CLIENT.encode(), client.encode()), *request.raw_headers]
        lines = [b"%b: %b" % field for field in fields]
        first = f"{request.method} {request.raw_path} HTTP/1.1".encode()
        writer.write(b"\r\n".join((first, *lines, b"", b"")))
        parser: Any = ToHub(transport, writer)  # aiohttp names one class of its own
        request.protocol.set_parser(parser)
        # An error here would be answered, within what the client reads as its own
        # protocol.
        with suppress(ConnectionError):
            while data := await reader.read(READ_MAX):
                transport.write(data)
                await request.writer.drain()
    finally:
        writer.close()
    return Switched()
