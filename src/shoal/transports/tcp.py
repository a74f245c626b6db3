"""TCP links, plain or over TLS: byte streams, for wires with their own framing."""

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import cast

from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import Batch, Data
from shoal.transports.link import CLOSE_TIMEOUT, LinkClosed, OnMessages
from shoal.transports.message_splitter import MessageSplitter

UNREAD_MAX = 512 << 10  # bytes that wait for their reader; then the peer has to
UNSENT_MAX = 256 << 10  # bytes buffered for the system; beyond, senders wait
PIECE = 64  # bytes that a piece takes beside what is in it
JOINED_MAX = 64 << 10  # bytes that are copied together to be sent; more go uncopied
SLICE = 256 << 10  # bytes of a large message that are given to the system at a time
TURN = 1 << 20  # bytes of one after which others have their turn
UNSENT_HERE = 512 << 10  # bytes that the system may hold back, where messages are cut
ABRUPT = 1006  # no farewell came (RFC 6455, section 7.4.1)
FAREWELL_WITHOUT_CODE = 1005  # all that the end of a byte stream says
PEER_CLOSED = ("closed by peer", FAREWELL_WITHOUT_CODE)

# A vanished peer sends nothing: after 10 s of silence, three keepalive probes follow.
# macOS has a name of its own for the first.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
if sys.platform == "darwin":
    KEEP_ALIVE["TCP_KEEPALIVE"] = KEEP_ALIVE.pop("TCP_KEEPIDLE")


# asyncio's own loop of these releases does not say that its buffer is full once it was
# given a list (CVE-2024-12254): a sender would go on for ever.
_LISTS_FILL_MEMORY = (3, 12) <= sys.version_info < (3, 12, 9) or (
    3,
    13,
) <= sys.version_info < (3, 13, 2)


class TcpLink(asyncio.Protocol):
    """A TCP connection of either end.  One task may read it, and one write.

    What is received are pieces of a byte stream, or messages once there is something
    attached that cuts them.
    """

    def __init__(self, peer: str, certificate: bytes = b"") -> None:
        self.peer = peer
        self.certificate = certificate
        self.transport: asyncio.Transport
        self._gone: asyncio.Future[None]  # the system has nothing left of it
        self._end: tuple[str, int] | None = None  # why, and a WebSocket's code for it
        self._said_all = False  # the peer, which may still read
        self._ended_here = False
        self._unread: list[Data] = []
        self._unread_size = 0  # bytes, about
        self._full = False
        self._cutter: MessageSplitter | None = None
        self._on_messages: OnMessages | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for something to read
        self._unsent: list[bytes] = []
        self._unsent_size = 0
        self._stopped = False
        self._writer: asyncio.Future[None] | None = None  # waits for room to write

    async def receive(self) -> Batch:
        while not self._unread or self._ended_here:
            self._check_more_may_come()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        arrived, self._unread, self._unread_size = self._unread, [], 0
        if self._full:
            self._read_on()
        return arrived

    def attach(
        self, framed: FramedSession[object], on_messages: OnMessages | None = None
    ) -> None:
        cutter = self._cutter = MessageSplitter(framed)
        self._on_messages = on_messages
        for piece in self._unread:
            assert isinstance(piece, bytes), "a byte stream has no text messages"
            cutter.feed(piece)
        self._unread.clear()
        if self._end is None:
            # Not while it reads, for the loop may be about to fill the other's buffer.
            self.transport.pause_reading()
            self.transport.set_protocol(_Inlet(self, cutter))
            self._full = True
            if not cutter.full:
                self._read_on()
            _keep_little(self.transport.get_extra_info("socket"))

    async def messages(self) -> Sequence[FramedMessage]:
        assert self._cutter is not None, "nothing is attached that says how to cut"
        while True:
            messages = () if self._ended_here else self._cutter.take()
            if self._full and not self._cutter.full:
                self._read_on()
            if messages:
                return messages
            self._check_more_may_come()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def send(self, data: Data) -> None:
        assert isinstance(data, bytes), "a byte stream has no text messages"
        if self._end is None:
            self._put(data)
        if self._takes_no_more:
            await self._room()

    def try_send(self, data: Data) -> bool:
        assert isinstance(data, bytes), "a byte stream has no text messages"
        if self._takes_no_more:
            return False
        self._put(data)
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
            if self._takes_no_more:
                await self._room()
            elif (at + SLICE) % TURN == 0:
                await asyncio.sleep(0)  # the peer may read as fast as this writes

    async def close(self, code: int, text: str) -> None:
        self._ended_here = True
        self._over(f"closed here: {text}" if text else "closed here", code)
        self._flush()
        if not self._gone.done():
            self.transport.close()
        await asyncio.wait([self._gone], timeout=CLOSE_TIMEOUT)
        self.abort()

    def abort(self) -> None:
        """End the connection without a farewell, if it has not ended yet."""
        self._over("closed here", ABRUPT)
        if not self._gone.done():
            self.transport.abort()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, for uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self._gone = asyncio.get_running_loop().create_future()
        self.transport.set_write_buffer_limits(UNSENT_MAX)
        _set_options(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_size += len(data) + PIECE
        if self._unread_size > UNREAD_MAX and not self._full:
            self._full = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        # TCP can end in one direction alone, and some programs end what they say so;
        # with TLS, asyncio ends both.
        if self.transport.get_extra_info("sslcontext") is not None:
            self._over(*PEER_CLOSED)
            return False
        self._said_all = True
        self._wake(self._reader)
        return True

    def pause_writing(self) -> None:
        self._stopped = True

    def resume_writing(self) -> None:
        self._stopped = False
        self._wake(self._writer)

    def connection_lost(self, exc: Exception | None) -> None:
        why = (
            f"connection lost: {describe_socket_error(exc)}"
            if exc
            else "connection lost"
        )
        self._over(why, ABRUPT)
        if not self._gone.done():
            self._gone.set_result(None)

    # For who reads in its place.

    def on_messages(self, cutter: MessageSplitter) -> None:
        """Pass messages on, or wake the reader; pause reading if there are too many."""
        waiting = self._reader is not None and not self._reader.done()
        if self._on_messages is not None and cutter.ready and waiting:
            self._on_messages(cutter.take())
            if not cutter.full:
                return
        if cutter.full and not self._full:
            self._full = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def _check_more_may_come(self) -> None:
        """Raise LinkClosed if nothing will come any more."""
        if self._end is not None:
            raise LinkClosed(*self._end)
        if self._said_all:
            raise LinkClosed(*PEER_CLOSED)

    def _read_on(self) -> None:
        self._full = False
        if self._end is None and not self._said_all:
            self.transport.resume_reading()

    @property
    def _takes_no_more(self) -> bool:
        # A closing link has ended; its reason follows in a moment.
        return self._stopped or self._end is not None or self.transport.is_closing()

    def _put(self, data: bytes) -> None:
        """Have data written; what comes in one turn of the loop leaves together."""
        self._unsent.append(data)
        self._unsent_size += len(data)
        if self._unsent_size >= JOINED_MAX:
            self._flush()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    async def _room(self) -> None:
        """Wait until the system takes more.  Raises LinkClosed."""
        while self._takes_no_more and self._end is None:
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

    def _over(self, why: str, code: int) -> None:
        """Record the first reason for the end, and wake waiting callers."""
        self._end = self._end or (why, code)
        self._wake(self._reader)
        self._wake(self._writer)

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class _Inlet(asyncio.BufferedProtocol):
    """Reads what a link's messages are cut from; for the rest it is the link."""

    def __init__(self, link: TcpLink, cutter: MessageSplitter) -> None:
        self._link = link
        self._cutter = cutter

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._cutter.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._cutter.filled(nbytes):
            self._link.on_messages(self._cutter)

    def eof_received(self) -> bool:
        return self._link.eof_received()

    def pause_writing(self) -> None:
        self._link.pause_writing()

    def resume_writing(self) -> None:
        self._link.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.connection_lost(exc)


def _keep_little(sock: socket.socket) -> None:
    """Let the system take little more than it sends.

    Else a small message would wait for megabytes of large ones that it has already.
    """
    if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_HERE)


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


def describe_socket_error(error: Exception) -> str:
    """Return a short text for an error."""
    return _WORDS.get(type(error)) or getattr(error, "strerror", "") or str(error)
