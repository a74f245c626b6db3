"""Frames over a stream socket: all that is sent in a turn of the loop in one write."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from shoal.domain.errors import PeerError
from shoal.protocols.shoal.codec import MessageDecoder, encode
from shoal.protocols.shoal.streams import HEAD, MESSAGE_MAX, WHOLE

log = logging.getLogger("shoal.front")

UNSENT_MAX = 1 << 20  # bytes that may wait for the other end to read


class Channel(asyncio.Protocol):
    """One end of a link.

    ``on_open`` is called with it, and returns what is called with each frame;
    ``on_lost`` is called at last, once.
    """

    def __init__(
        self,
        decoder: MessageDecoder,
        on_open: Callable[["Channel"], Callable[[Any], None]],
        on_lost: Callable[["Channel"], None],
    ) -> None:
        self.open = False
        self._decoder = decoder
        self._on_open = on_open
        self._on_frame: Callable[[Any], None] | None = None  # until it is open
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._before_flush: list[Callable[[], None]] = []
        self._flushes = False  # whether it is scheduled
        self.is_congested = False  # whether the other end reads too slowly
        self._on_writable: list[Callable[[], None]] = []

    def when_writable(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the other end has read most of what was sent."""
        self._on_writable.append(call)

    def send(self, frame: object) -> None:
        """Send a frame at the end of this turn of the loop, if it is open."""
        if self.open:
            data = encode(frame)
            if not self._flushes:
                self._schedule()
            self._outgoing += (HEAD.pack(WHOLE, len(data)), data)

    def before_flush(self, call: Callable[[], None]) -> None:
        """Call ``call`` at the end of this turn, to send what has gathered."""
        if self.open:
            if not self._flushes:
                self._schedule()
            self._before_flush.append(call)

    def close(self) -> None:
        """Send what there is, and close."""
        self._on_frame = None
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _schedule(self) -> None:
        self._flushes = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        calls, self._before_flush = self._before_flush, []
        for call in calls:
            call()
        self._flushes = False
        data, self._outgoing = b"".join(self._outgoing), []
        if data and self._transport is not None:
            self._transport.write(data)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(UNSENT_MAX)
        self.open = True
        self._on_frame = self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for message in self._arrived():
                if not self.open or self._on_frame is None:
                    return
                self._on_frame(self._decoder.decode(message))
        except PeerError as error:
            log.error("a link is cut: %s", error)  # a fault of this program
            self._drop()

    def pause_writing(self) -> None:
        self.is_congested = True

    def resume_writing(self) -> None:
        self.is_congested = False
        calls, self._on_writable = self._on_writable, []
        for call in calls:
            call()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.open:
            self.open = False
            self._on_lost(self)

    def _arrived(self) -> list[bytes]:
        """Take the messages that have arrived whole.  Raises PeerError."""
        received, messages, at = self._received, [], 0
        while len(received) >= at + HEAD.size:
            kind, size = HEAD.unpack_from(received, at)
            if kind != WHOLE or size > MESSAGE_MAX:
                raise PeerError("what arrived is no frame")
            begin, end = at + HEAD.size, at + HEAD.size + size
            if len(received) < end:
                break
            messages.append(bytes(received[begin:end]))
            at = end
        del received[:at]
        return messages

    def _drop(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._transport is not None:
                self._transport.abort()
