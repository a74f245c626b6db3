"""TCP links, plain or over TLS: byte streams, for wires with their own framing."""

import asyncio
import hashlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

from shoal.protocols.session import Batch, Data
from shoal.runtime.link import LinkClosed
from shoal.transports.websocket import CLOSE_TIMEOUT, CONNECT_TIMEOUT, WRONG_CERTIFICATE

UNREAD_MAX = 512 << 10  # bytes that wait for their reader; then the peer has to
UNSENT_MAX = 256 << 10  # bytes that wait for the system; then whoever sends has to
PIECE = 64  # bytes that a piece takes beside what is in it
JOINED_MAX = 64 << 10  # bytes that are copied together to be sent; more go uncopied
ABRUPT = 1006  # no farewell came (RFC 6455, section 7.4.1)
FAREWELL_WITHOUT_CODE = 1005  # all that the end of a byte stream says

# A peer that vanished sends nothing: after 10 s without a word it is asked three times.
# macOS has a name of its own for the first.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
if sys.platform == "darwin":
    KEEP_ALIVE["TCP_KEEPALIVE"] = KEEP_ALIVE.pop("TCP_KEEPIDLE")


class TcpLink(asyncio.Protocol):
    """A TCP connection of either end.  One task may read it, and one write.

    What is received are pieces of a byte stream.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._transport: asyncio.Transport
        self._gone: asyncio.Future[None]  # the system has nothing left of it
        self._end: tuple[str, int] | None = None  # why, and a WebSocket's code for it
        self._ended_here = False
        self._unread: list[Data] = []
        self._unread_size = 0  # bytes, about
        self._full = False
        self._reader: asyncio.Future[None] | None = None  # waits for something to read
        self._unsent: list[bytes] = []
        self._unsent_size = 0
        self._stopped = False
        self._writer: asyncio.Future[None] | None = None  # waits for room to write

    async def receive(self) -> Batch:
        while not self._unread or self._ended_here:
            if self._end is not None:
                raise LinkClosed(*self._end)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        arrived, self._unread, self._unread_size = self._unread, [], 0
        if self._full:
            self._full = False
            if self._end is None:
                self._transport.resume_reading()
        return arrived

    async def send(self, data: Data) -> None:
        assert isinstance(data, bytes), "a byte stream has no text messages"
        if self._end is None:
            self._unsent.append(data)
            self._unsent_size += len(data)
            # What is sent in one turn of the loop leaves together.
            if self._unsent_size >= JOINED_MAX:
                self._flush()
            elif len(self._unsent) == 1:
                asyncio.get_running_loop().call_soon(self._flush)
        while self._stopped and self._end is None:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self._end is not None:
            raise LinkClosed(*self._end)

    async def close(self, code: int, text: str) -> None:
        self._ended_here = True
        self._over(f"closed here: {text}" if text else "closed here", code)
        self._flush()
        if not self._gone.done():
            self._transport.close()
        await asyncio.wait([self._gone], timeout=CLOSE_TIMEOUT)
        self.abort()

    def abort(self) -> None:
        """End the connection without a farewell, if it has not ended yet."""
        self._over("closed here", ABRUPT)
        if not self._gone.done():
            self._transport.abort()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, for uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._gone = asyncio.get_running_loop().create_future()
        self._transport.set_write_buffer_limits(UNSENT_MAX)
        _set_options(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_size += len(data) + PIECE
        if self._unread_size > UNREAD_MAX and not self._full:
            self._full = True
            self._transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> None:
        self._over("closed by peer", FAREWELL_WITHOUT_CODE)

    def pause_writing(self) -> None:
        self._stopped = True

    def resume_writing(self) -> None:
        self._stopped = False
        self._wake(self._writer)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"connection lost: {words(exc)}" if exc else "connection lost"
        self._over(why, ABRUPT)
        if not self._gone.done():
            self._gone.set_result(None)

    def _flush(self) -> None:
        if self._unsent and not self._transport.is_closing():
            unsent, self._unsent = self._unsent, []
            large, self._unsent_size = self._unsent_size >= JOINED_MAX, 0
            if large:
                self._transport.writelines(unsent)
            else:
                self._transport.write(b"".join(unsent))

    def _over(self, why: str, code: int) -> None:
        """Note the first reason for the end, and wake whoever waits."""
        self._end = self._end or (why, code)
        self._wake(self._reader)
        self._wake(self._writer)

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


@asynccontextmanager
async def dial(url: str, *, fingerprint: bytes | None = None) -> AsyncIterator[TcpLink]:
    """Connect to ``tcp://HOST:PORT`` or ``tls://HOST:PORT``.

    With a ``fingerprint`` the server's certificate must be the one that it is of, and
    no authority is asked; it takes a URL that begins with ``tls:``.

    Raises LinkClosed if it does not come about.
    """
    host, port, tls = _address_in(url)
    if fingerprint is not None and not tls:
        raise LinkClosed(
            f"{url} has no certificate to be known by: use tls://, or a token that "
            "names none"
        )
    context = _client_context(pinned=fingerprint is not None) if tls else None
    link = await _connect(url, host, port, context)
    try:
        # Nothing was sent to it.
        if fingerprint is not None and _certificate_of(link) != fingerprint:
            reason = (
                f"{url} has another certificate than the token names: someone else "
                "answers there, or it was renewed; ask for a new token"
            )
            raise LinkClosed(reason, WRONG_CERTIFICATE, reason)
        yield link
    finally:
        await link.close(1000, "")


async def _connect(
    url: str, host: str, port: int, context: ssl.SSLContext | None
) -> TcpLink:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: TcpLink(url),
                host,
                port,
                ssl=context,
                server_hostname=host.partition("%")[0] if context else None,
                ssl_shutdown_timeout=CLOSE_TIMEOUT if context else None,
            )
            return link
    except ssl.SSLCertVerificationError as error:
        raise LinkClosed(
            f"the certificate of {url} leads to no authority that is known here "
            f"({error.verify_message}); a token that the coordinator prints names its "
            "certificate"
        ) from error
    except ssl.SSLError as error:
        raise LinkClosed(f"{url} does not speak TLS here") from error
    except TimeoutError as error:
        raise LinkClosed(f"cannot connect to {url}: no answer") from error
    except (OSError, ValueError) as error:
        why = words(error)
        if context is not None and isinstance(error, ConnectionResetError):
            why += ": without TLS it is tcp://HOST:PORT"
        raise LinkClosed(f"cannot connect to {url}: {why}") from error


def _address_in(url: str) -> tuple[str, int, bool]:
    """Return host, port, and whether TLS is spoken there.  Raises LinkClosed."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LinkClosed(f"cannot connect to {url}: {error}") from error
    if not host or not port:
        raise LinkClosed(
            f"cannot connect to {url}: expected {parts.scheme}://HOST:PORT"
        )
    # The zone of a link-local address: % is escaped in URLs (RFC 6874).
    return host.replace("%25", "%"), port, parts.scheme == "tls"


@lru_cache
def _client_context(*, pinned: bool) -> ssl.SSLContext:
    # Made once: reading the system's authorities takes tens of milliseconds.
    context = ssl.create_default_context()
    if pinned:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # ``dial`` looks at it
    return context


def _certificate_of(link: TcpLink) -> bytes:
    """Return the fingerprint of the other end's certificate."""
    tls: ssl.SSLObject = link._transport.get_extra_info("ssl_object")
    return hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()


def _set_options(sock: socket.socket) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Messages are small and wait for answers: none is to wait for a second one.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_WORDS: Mapping[type[Exception], str] = {
    ConnectionRefusedError: "connection refused",
    ConnectionResetError: "connection reset by peer",
    TimeoutError: "no answer",
}


def words(error: Exception) -> str:
    """Say what an error means, in a few words."""
    return _WORDS.get(type(error)) or getattr(error, "strerror", "") or str(error)
