"""Reads connections to the HTTP port until their peers are admitted.

aiohttp bounds the parts of a request and the messages of a WebSocket, each by a limit
that is fixed before anyone knows who sends, and it bounds no sum.  So the bytes of a
stranger pass through a protocol of its own, which counts them and then leaves them to
aiohttp's; once the peer is admitted it takes itself out, and costs nothing more.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TypeVar, cast

from shoal.transports import strangers
from shoal.transports.strangers import Stranger, Strangers

T = TypeVar("T")

LINGER = 1.0  # seconds in which a refused peer can read why
MESSAGE_TOO_BIG = 1009  # WebSocket close codes (RFC 6455, section 7.4.1)
POLICY_VIOLATION = 1008
READ_OVERHEAD = 16 << 10  # bytes: of what came beside a message, and of its pieces
PINGS_MAX = 4 << 10  # bytes between two messages that may be no part of one

_END_OF_HEAD = b"\r\n\r\n"
_CLOSE_FRAME = 0x88
_TOO_LARGE = "431 Request Header Fields Too Large"
_TOO_SLOW = "408 Request Timeout"


class _Stage(Enum):
    """What arrives: the head of the first request, or what follows.

    That is bodies and more requests, or the messages of a WebSocket.
    """

    HEAD = auto()
    REQUEST = auto()
    MESSAGES = auto()
    UNLIMITED = auto()  # messages, each as large as the wire allows


class UnadmittedConnection(asyncio.Protocol):
    """Passes the bytes of one connection on to ``inner`` within a stranger's limits.

    The head of its first request, and each message of a WebSocket, has ``MESSAGE_MAX``
    bytes at most, about, and takes ``MESSAGE_TIMEOUT`` at most.  Bodies are as large as
    aiohttp lets them become before somebody reads them, and count like all else.
    ``refusal`` says why the connection was ended here; empty: it was not.  ``stranger``
    is its account; None: it has none yet.
    """

    def __init__(
        self,
        all_strangers: Strangers,
        inner: asyncio.Protocol,
        stranger: Stranger | None = None,
        *,
        address: str = "",
    ) -> None:
        self.refusal = ""
        self._address = address
        self._strangers = all_strangers
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._stranger = stranger
        self._stage = _Stage.HEAD
        self._message_max = strangers.MESSAGE_MAX
        self._head_end = b""  # the last bytes of the head so far
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(
        cls, transport: asyncio.BaseTransport | None
    ) -> "UnadmittedConnection | None":
        """Return the one that reads from a transport; None: its peer was admitted."""
        protocol = None if transport is None else transport.get_protocol()
        return protocol if isinstance(protocol, cls) else None

    @classmethod
    def begin_messages(
        cls, transport: asyncio.Transport, all_strangers: Strangers, address: str
    ) -> "UnadmittedConnection":
        """Count messages of a WebSocket from now on.

        The peer, at an ``address``, is a stranger again, whatever it was to HTTP.
        """
        if (connection := cls.of(transport)) is None:
            inner = cast(asyncio.Protocol, transport.get_protocol())
            connection = cls(all_strangers, inner, address=address)
            connection._attach(transport)
            transport.set_protocol(connection)
        connection._stage = _Stage.MESSAGES
        connection._check_size()
        return connection

    def progressed(self) -> None:
        """Restart the count: a message was taken, or a request is being answered."""
        if self._stranger is not None:
            self._stranger.progressed()
        self._stop_timer()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count ``size`` bytes, received but not yet processed, during a block."""
        if self._stranger is not None:
            self._stranger.received(size)
        try:
            yield
        finally:
            if self._stranger is not None:
                self._stranger.released(size)

    def share_budget(
        self, all_strangers: Strangers, message_max: int | None = None
    ) -> None:
        """Count among other strangers, with another limit of a message, or none."""
        if message_max is None:
            self._stop_timer()
            self._stage = _Stage.UNLIMITED
        else:
            self._stage, self._message_max = _Stage.MESSAGES, message_max
        if self._stranger is not None:
            self._stranger.move(all_strangers)

    def charge(self, seconds: float) -> None:
        """Charge CPU time that was used for the connection."""
        if self._stranger is not None:
            self._stranger.charge(seconds)

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Call, and charge the CPU time that it takes."""
        if self._stranger is None:
            return call(*args)
        return self._stranger.run(call, *args)

    def admit(self) -> None:
        """Lift all limits, and pay back what it has cost."""
        if self._stranger is not None:
            self._stranger.admit()
        self.release()

    def release(self) -> None:
        """Lift all limits: another process counts the peer from now on."""
        self._leave()
        if self._transport is not None and not self.refusal:
            self._transport.set_protocol(self._inner)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._attach(cast(asyncio.Transport, transport))
        self.run(self._inner.connection_made, transport)

    def data_received(self, data: bytes) -> None:
        if self.refusal:
            return
        self.run(self._receive, data)
        if self._stranger is not None and self._transport is not None:
            self._stranger.pace(self._transport)

    def eof_received(self) -> bool | None:
        return None if self.refusal else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self.run(self._inner.connection_lost, exc)
            self._transport = None
        self._leave()

    def _attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        if self._stranger is not None:
            self._stranger.on_open(transport, self._drop)
        else:
            address = _address_of(transport) or self._address
            self._stranger = self._strangers.add(address, self._drop)

    def _receive(self, data: bytes) -> None:
        size = self._after_head(data) if self._stage is _Stage.HEAD else len(data)
        if self._stranger is not None:
            self._stranger.received(size + strangers.PIECE_OVERHEAD)
        self._check_size()
        if not self.refusal:
            self._inner.data_received(data)

    def _after_head(self, data: bytes) -> int:
        """Return how many bytes of data count: all, or those after the head."""
        joined = self._head_end + data
        end = joined.find(_END_OF_HEAD)
        if end < 0:
            self._head_end = joined[1 - len(_END_OF_HEAD) :]
            return len(data)
        self._stage = _Stage.REQUEST
        self.progressed()
        return len(joined) - end - len(_END_OF_HEAD)

    def _check_size(self) -> None:
        """Refuse what is too large, and watch that what has begun ends."""
        stranger = self._stranger
        if stranger is None or self._stage in (_Stage.REQUEST, _Stage.UNLIMITED):
            return
        if stranger.held > self._message_max + READ_OVERHEAD:
            limit = f"over {self._message_max} bytes of a message before admission"
            self._refuse(limit, MESSAGE_TOO_BIG, _TOO_LARGE)
        elif self._timer is None and (
            self._stage is _Stage.HEAD or stranger.held > PINGS_MAX
        ):
            self._timer = asyncio.get_running_loop().call_later(
                strangers.MESSAGE_TIMEOUT, self._on_timeout
            )

    def _on_timeout(self) -> None:
        self._timer = None
        limit = f"a message took over {strangers.MESSAGE_TIMEOUT:g} s before admission"
        self._refuse(limit, POLICY_VIOLATION, _TOO_SLOW)

    def _refuse(self, reason: str, code: int, status: str) -> None:
        """End the connection; the peer gets a moment to read why."""
        assert self._transport is not None, "it is open"
        self.refusal = reason
        self._stop_timer()
        if self._stage is not _Stage.HEAD:
            text = code.to_bytes(2, "big") + reason.encode()
            self._transport.write(bytes([_CLOSE_FRAME, len(text)]) + text)
        else:
            head = (
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            self._transport.write(head.encode())
        self._timer = asyncio.get_running_loop().call_later(
            LINGER, self._transport.abort
        )

    def _drop(self, reason: str) -> None:
        self.refusal = self.refusal or reason
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._stop_timer()
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _address_of(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""
