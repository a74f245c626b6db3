"""TCP links, plain or with TLS: byte streams, for wires with their own framing."""

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import Batch, Data
from shoal.transports.link import CLOSE_TIMEOUT, LinkClosed, OnMessages
from shoal.transports.message_splitter import READ_BUFFER, MessageSplitter
from shoal.transports.strangers import MESSAGE_MAX, Stranger

T = TypeVar("T")

UNREAD_MAX = 512 << 10  # bytes; beyond, reading pauses
UNSENT_MAX = 256 << 10  # bytes buffered for the system; beyond, senders wait
PIECE_OVERHEAD = 64  # bytes of memory for a piece, besides its data
JOINED_MAX = 64 << 10  # bytes; smaller writes are joined by a copy
SLICE = 256 << 10  # bytes of a large message per write
YIELD_AFTER = 1 << 20  # bytes of one message after which other tasks run
NOT_SENT_MAX = (
    512 << 10
)  # unsent bytes in the system's buffer, for links that split messages
ABRUPT = 1006  # no close frame (RFC 6455, section 7.4.1)
NO_CLOSE_CODE = 1005  # the end of a byte stream has none
PEER_CLOSED = ("closed by peer", NO_CLOSE_CODE)

# A vanished peer sends nothing: after 10 s of silence, three keepalive probes follow.
# macOS has a name of its own for the first.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
if sys.platform == "darwin":
    KEEP_ALIVE["TCP_KEEPALIVE"] = KEEP_ALIVE.pop("TCP_KEEPIDLE")


# asyncio's loop in these releases never pauses writing after ``writelines``
# (CVE-2024-12254): the buffer would grow without a limit.
_LISTS_FILL_MEMORY = (3, 12) <= sys.version_info < (3, 12, 9) or (
    3,
    13,
) <= sys.version_info < (3, 13, 2)


class TcpLink(asyncio.BufferedProtocol):
    """A TCP connection of either end.  One task may read it, and one write.

    It receives pieces of a byte stream, or messages once a session is attached.  Until
    ``admit`` is called, its peer counts as a ``stranger``.
    """

    def __init__(self, peer: str, stranger: Stranger | None = None) -> None:
        self.peer = peer
        self._stranger = stranger  # None: the peer is none, or has left
        self.is_stranger = stranger is not None
        self.transport: asyncio.Transport
        self._closed: asyncio.Future[None]
        self._end: tuple[str, int] | None = (
            None  # the reason, and a WebSocket's close code
        )
        self._eof = False  # from the peer, which may still read
        self._closed_here = False
        self._encrypted = False
        self._unread: list[Data] = []
        self._unread_size = 0  # bytes, about
        self._reading_paused = False
        self._splitter: MessageSplitter | None = None
        self._on_messages: OnMessages | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for something to read
        self._unsent: list[bytes] = []
        self._unsent_size = 0
        self._writing_paused = False
        self._writer: asyncio.Future[None] | None = None  # waits for room to write

    async def receive(self) -> Batch:
        while not self._unread or self._closed_here:
            self._check_open()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        arrived, self._unread, self._unread_size = self._unread, [], 0
        if self._reading_paused:
            self._resume_reading()
        return arrived

    def attach(
        self, framed: FramedSession[object], on_messages: OnMessages | None = None
    ) -> None:
        splitter = self._splitter = MessageSplitter(framed)
        self._on_messages = on_messages
        for piece in self._unread:
            assert isinstance(piece, bytes), "a byte stream has no text messages"
            splitter.feed(piece)
        self._unread.clear()
        if self._end is None:
            # Paused first: the loop may be about to fill the other protocol's buffer.
            self.transport.pause_reading()
            self.transport.set_protocol(_SplitterProtocol(self, splitter))
            self._reading_paused = True
            if not splitter.full:
                self._resume_reading()
            _limit_unsent(self.transport.get_extra_info("socket"))

    async def messages(self) -> Sequence[FramedMessage]:
        assert self._splitter is not None, "no session is attached"
        while True:
            messages = () if self._closed_here else self._splitter.take()
            if self._reading_paused and not self._splitter.full:
                self._resume_reading()
            if messages:
                return messages
            self._check_open()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def send(self, data: Data) -> None:
        assert isinstance(data, bytes), "a byte stream has no text messages"
        if self._end is None:
            self._enqueue(data)
        if self._write_blocked:
            await self._wait_writable()

    def try_send(self, data: Data) -> bool:
        assert isinstance(data, bytes), "a byte stream has no text messages"
        if self._write_blocked:
            return False
        self._enqueue(data)
        return True

    async def write(self, part: bytes | memoryview) -> None:
        if len(part) < JOINED_MAX:
            await self.send(bytes(part))
            return
        self._flush()
        view = memoryview(part)
        for at in range(0, len(view), SLICE):
            if self._end is None:
                self.transport.write(view[at : at + SLICE])
            if self._write_blocked:
                await self._wait_writable()
            elif (at + SLICE) % YIELD_AFTER == 0:
                await asyncio.sleep(0)  # the peer may read as fast as this writes

    async def close(self, code: int, text: str) -> None:
        self._closed_here = True
        self._set_end(f"closed here: {text}" if text else "closed here", code)
        self._flush()
        if not self._closed.done():
            self.transport.close()
        await asyncio.wait([self._closed], timeout=CLOSE_TIMEOUT)
        self.abort()

    def abort(self) -> None:
        """Drop the connection, if it is still open."""
        self._set_end("closed here", ABRUPT)
        if not self._closed.done():
            self.transport.abort()

    def admit(self) -> None:
        self.is_stranger = False
        if self._stranger is not None:
            self._stranger.admit()
            self._stranger = None

    def run(self, call: Callable[..., T], *args: object) -> T:
        if (stranger := self._stranger) is None:
            return call(*args)
        result = stranger.run(call, *args)
        stranger.pace(self.transport)
        return result

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        # A TLS transport that was closed cannot be asked any more.
        self._encrypted = transport.get_extra_info("sslcontext") is not None
        self._closed = asyncio.get_running_loop().create_future()
        self.transport.set_write_buffer_limits(UNSENT_MAX)
        set_options(transport.get_extra_info("socket"))
        if self._stranger is not None:
            self._stranger.on_open(transport, self._drop)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(READ_BUFFER[:nbytes])
        if self._stranger is None:
            self._receive(data)
        else:
            self.count_received(nbytes)
            self.run(self._receive, data)

    def _receive(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_size += len(data) + PIECE_OVERHEAD
        unread_max = MESSAGE_MAX if self.is_stranger else UNREAD_MAX
        if self._unread_size > unread_max and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        # TCP can end in one direction alone, and some programs half-close; with TLS,
        # asyncio closes both.
        if self._encrypted:
            self._set_end(*PEER_CLOSED)
            return False
        self._eof = True
        self._wake(self._reader)
        return True

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake(self._writer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None
        reason = (
            f"connection lost: {describe_socket_error(exc)}"
            if exc
            else "connection lost"
        )
        self._set_end(reason, ABRUPT)
        if not self._closed.done():
            self._closed.set_result(None)

    # For a protocol that replaces this one as the reader.

    def count_received(self, size: int) -> None:
        """Count bytes of a stranger.

        Its wire limits every message, so that it never holds more than the largest.
        """
        if self._stranger is not None:
            self._stranger.received(min(size, MESSAGE_MAX - self._stranger.held))

    def on_messages(self, splitter: MessageSplitter) -> None:
        """Pass small messages on, or wake the reader.

        Pause reading if there are too many.
        """
        waiting = self._reader is not None and not self._reader.done()
        if self._on_messages is not None and splitter.is_brief and waiting:
            self._on_messages(splitter.take())
            if not splitter.full:
                return
        if splitter.full and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def _drop(self, reason: str) -> None:
        self._set_end(f"refused: {reason}", ABRUPT)
        self.transport.abort()

    def _check_open(self) -> None:
        """Raise LinkClosed if no more data can arrive."""
        if self._end is not None:
            raise LinkClosed(*self._end)
        if self._eof:
            raise LinkClosed(*PEER_CLOSED)

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if self._end is None and not self._eof:
            self.transport.resume_reading()

    @property
    def _write_blocked(self) -> bool:
        # A closing link has ended; its reason follows in a moment.
        return (
            self._writing_paused or self._end is not None or self.transport.is_closing()
        )

    def _enqueue(self, data: bytes) -> None:
        """Queue data; all data of one iteration of the loop is written together."""
        self._unsent.append(data)
        self._unsent_size += len(data)
        if self._unsent_size >= JOINED_MAX:
            self._flush()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    async def _wait_writable(self) -> None:
        """Wait until the transport accepts more.  Raises LinkClosed."""
        while self._write_blocked and self._end is None:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self._end is not None:
            raise LinkClosed(*self._end)

    def _flush(self) -> None:
        if self._unsent and not self.transport.is_closing():
            unsent, self._unsent = self._unsent, []
            large, self._unsent_size = self._unsent_size >= JOINED_MAX, 0
            if large and not _LISTS_FILL_MEMORY:
                self.transport.writelines(unsent)
            else:
                self.transport.write(b"".join(unsent))

    def _set_end(self, reason: str, code: int) -> None:
        """Record the first reason for the end, and wake waiting callers."""
        self._end = self._end or (reason, code)
        self._wake(self._reader)
        self._wake(self._writer)

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class _SplitterProtocol(asyncio.BufferedProtocol):
    """Reads into the splitter of a link; forwards all other callbacks to the link."""

    def __init__(self, link: TcpLink, splitter: MessageSplitter) -> None:
        self._link = link
        self._splitter = splitter

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._splitter.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._link.is_stranger:
            self._link.count_received(nbytes)
            self._link.run(self._filled, nbytes)
        elif self._splitter.filled(nbytes):
            self._link.on_messages(self._splitter)

    def _filled(self, nbytes: int) -> None:
        if self._splitter.filled(nbytes):
            self._link.on_messages(self._splitter)

    def eof_received(self) -> bool:
        return self._link.eof_received()

    def pause_writing(self) -> None:
        self._link.pause_writing()

    def resume_writing(self) -> None:
        self._link.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.connection_lost(exc)


def _limit_unsent(sock: socket.socket) -> None:
    """Limit the unsent bytes in the system's buffer.

    Otherwise a small message would wait for megabytes of large ones.
    """
    if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, NOT_SENT_MAX)


def set_options(sock: socket.socket) -> None:
    """Let small messages go at once, and a vanished peer be noticed, if it is TCP."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Small messages must not wait for more data (Nagle's algorithm).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_ERROR_TEXTS: Mapping[type[Exception], str] = {
    ConnectionRefusedError: "connection refused",
    ConnectionResetError: "connection reset by peer",
    TimeoutError: "no answer",
}


def describe_socket_error(error: Exception) -> str:
    """Return a short text for an error."""
    return _ERROR_TEXTS.get(type(error)) or getattr(error, "strerror", "") or str(error)
