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

    ``on_open`` is called with it, then ``on_frame`` with each frame, and at last
    ``on_lost`` once.
    """

    def __init__(
        self,
        decoder: MessageDecoder,
        on_open: Callable[["Channel"], None],
        on_frame: Callable[["Channel", Any], None],
        on_lost: Callable[["Channel"], None],
    ) -> None:
        self.open = False
        self._decoder = decoder
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._before_flush: list[Callable[[], None]] = []
        self._flushes = False  # whether it is scheduled
        self._writable = asyncio.Event()

    @property
    def is_congested(self) -> bool:
        """Whether the other end reads more slowly than this one writes."""
        return not self._writable.is_set()

    async def writable(self) -> None:
        """Wait until the other end has read most of what was sent, or is gone."""
        await self._writable.wait()

    def send(self, frame: object) -> None:
        """Send a frame at the end of this turn of the loop, if it is open."""
        if self.open:
            data = encode(frame)
            self._schedule()
            self._outgoing += (HEAD.pack(WHOLE, len(data)), data)

    def before_flush(self, call: Callable[[], None]) -> None:
        """Call ``call`` at the end of this turn, to send what has gathered."""
        if self.open:
            self._schedule()
            self._before_flush.append(call)

    def close(self) -> None:
        """Send what there is, and close."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _schedule(self) -> None:
        if not self._flushes:
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
        self._writable.set()
        self.open = True
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for message in self._arrived():
                if not self.open:
                    return
                self._on_frame(self, self._decoder.decode(message))
        except PeerError as error:
            log.error("a link is cut: %s", error)  # a fault of this program
            self._drop()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()
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
