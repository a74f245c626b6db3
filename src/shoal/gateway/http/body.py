"""Request bodies, with their limits."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from shoal.domain.errors import InvalidRequest, QueueFull, TooLarge, TooSlow
from shoal.gateway.http.forms import ReceivedForm, receive_form
from shoal.gateway.http.request_record import RequestRecord, record_of
from shoal.transports.clock import LoopClock
from shoal.transports.loop_share import LARGE, LoopShare

T = TypeVar("T")

ARRIVED = nullcontext()  # for a body that came with its head, as most do

BODY_MAX = 16 << 20  # bytes: the longest contexts need a few
BODY_TIMEOUT = 120.0  # seconds to send one
DECODE_INLINE_MAX = 256 << 10  # bytes that are decoded in the event loop's thread
BODIES_MAX = 512 << 20  # bytes of all unanswered requests
BODIES_OF_KEY_MAX = BODIES_MAX // 2


PIECE = 256 << 10  # bytes that are decompressed at once, which takes a millisecond

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's parameter for the format


class Inflater:
    """The decompressed pieces of a body.  ``encoding`` is ``gzip`` or ``deflate``."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None  # zlib's, whose type has no public name

    @classmethod
    def of(cls, content_encoding: str) -> "Inflater | None":
        """Return the one for a ``Content-Encoding``; None: it is not compressed.

        Raises InvalidRequest for an encoding that is not supported.
        """
        encoding = content_encoding.strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in ("gzip", "deflate"):
            raise InvalidRequest(
                f"Content-Encoding: {encoding[:40]!a} is not supported: send "
                "gzip, deflate, or the plain body"
            )
        return cls(encoding)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Return what more data becomes, in pieces of ``PIECE`` bytes at most.

        Raises InvalidRequest if it is damaged.
        """
        try:
            while data:
                if self._stream is None:
                    self._stream = zlib.decompressobj(self._format(data))
                yield self._stream.decompress(data, PIECE)
                data = self._stream.unconsumed_tail
                if self._stream.eof:
                    # More members of a gzip file may follow (RFC 1952, section 2.2).
                    data = self._stream.unused_data
                    self._stream = None
        except zlib.error as error:
            raise InvalidRequest(f"the body is damaged: {error}") from error

    def check_end(self) -> None:
        """Raise InvalidRequest if the end of the body is missing."""
        if self._stream is not None:
            raise InvalidRequest(
                f"the body is damaged: its {self._encoding} is cut off"
            )

    def _format(self, data: bytes) -> int:
        if self._encoding == "gzip":
            return _GZIP
        # Some clients leave out the header of zlib, whose low bits are 8.
        return _ZLIB if data[0] & 0x0F == 8 else _RAW


@dataclass(slots=True)
class BodyReader:
    """Reads request bodies, and limits the memory of all of them.

    A body counts until its request is answered, because its job is about as large.
    One key may hold half of it.
    Large ones are decoded in turns, which are a ``share`` of the event loop.
    """

    share: LoopShare = field(default_factory=lambda: LoopShare(LoopClock()))
    held_bytes: int = 0
    _held_by: dict[str, int] = field(default_factory=dict)

    async def read(self, request: web.Request, size_max: int = BODY_MAX) -> bytes:
        """Return a whole body; see ``decode``."""
        return await self.decode(request, "", bytes, size_max)

    async def decode(
        self,
        request: web.Request,
        owner: str,
        decode: Callable[[bytes], T],
        size_max: int = BODY_MAX,
    ) -> T:
        """Read a whole body; decode a large one when it is the turn of its ``owner``.

        Authorize the request before: reading costs memory.  ``size_max`` is in bytes.

        Raises what ``decode`` raises, TooLarge, TooSlow, QueueFull if all bodies
        together are too large, or InvalidRequest if the body is damaged.
        """
        content = request.content
        arrived = content.is_eof()
        if not arrived and (request.content_length or 0) > size_max:
            raise _too_large(size_max)
        encoding = request.headers.get("Content-Encoding")
        inflater = None if encoding is None else Inflater.of(encoding)
        body = bytearray()
        try:
            async with ARRIVED if arrived else asyncio.timeout(BODY_TIMEOUT):
                # Count received bytes: announcing a length must not block others.
                while not content.at_eof():
                    chunk = await content.readany()
                    if inflater is None:
                        self.hold(request, owner, len(chunk))
                        body += chunk
                    else:
                        await self._inflate(
                            request, owner, inflater.pieces(chunk), body, size_max
                        )
                    if len(body) > size_max:
                        raise _too_large(size_max)
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is damaged: {error}") from error
        except TimeoutError:
            raise _too_slow(len(body)) from None
        if inflater is not None:
            inflater.check_end()
        return await self.decode_bytes(bytes(body), owner, decode)

    async def decode_bytes(
        self, data: bytes, owner: str, decode: Callable[[bytes], T]
    ) -> T:
        """Decode what has come; if it is large, when it is the turn of its ``owner``.

        Raises what ``decode`` raises.
        """
        if len(data) < LARGE:
            return decode(data)
        async with self.share.turn(owner):
            if len(data) < DECODE_INLINE_MAX:
                return decode(data)
            return await asyncio.to_thread(decode, data)

    async def receive_form(
        self, request: web.Request, owner: str, size_max: int
    ) -> tuple[ReceivedForm, bytes]:
        """Receive a form with a file of at most ``size_max`` bytes.

        Raises what ``receive_form`` does, TooLarge, TooSlow, or QueueFull if all bodies
        together are too large.
        """
        file = _HeldFile(self, request, owner, size_max)
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                form = await receive_form(request, file)
        except TimeoutError:
            raise _too_slow(len(file.data)) from None
        return form, bytes(file.data)

    def release(self, record: RequestRecord) -> None:
        """Stop counting the body of a request."""
        self.held_bytes -= record.held_bytes
        left = self._held_by.pop(record.held_for, 0) - record.held_bytes
        if left:
            self._held_by[record.held_for] = left
        record.held_bytes = 0

    async def _inflate(
        self,
        request: web.Request,
        owner: str,
        pieces: Iterator[bytes],
        body: bytearray,
        size_max: int,
    ) -> None:
        """Append pieces to a body, a turn each, until it is too large."""
        while len(body) <= size_max:
            async with self.share.turn(owner):
                if (piece := next(pieces, None)) is None:
                    return
                self.hold(request, owner, len(piece))
                body += piece

    def hold(self, request: web.Request, owner: str, size: int) -> None:
        """Count bytes of a request until it is answered.  Raises QueueFull."""
        if self.held_bytes + size > BODIES_MAX:
            raise QueueFull(
                f"the open requests already have {BODIES_MAX} bytes: try again shortly"
            )
        held = self._held_by.get(owner, 0)
        if held + size > BODIES_OF_KEY_MAX:
            raise QueueFull(
                f"the open requests of this key already have {BODIES_OF_KEY_MAX} "
                "bytes: wait until some have finished"
            )
        record = record_of(request)
        record.held_for = owner
        record.held_bytes += size
        self._held_by[owner] = held + size
        self.held_bytes += size


@dataclass(slots=True)
class _HeldFile:
    """A file of a form, in memory."""

    bodies: BodyReader
    request: web.Request
    owner: str
    size_max: int
    data: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        if len(self.data) + len(data) > self.size_max:
            raise _too_large(self.size_max)
        self.bodies.hold(self.request, self.owner, len(data))
        self.data += data


def _too_large(size_max: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {size_max} bytes")


def _too_slow(size: int) -> TooSlow:
    return TooSlow(
        f"the body did not arrive within {BODY_TIMEOUT:g} s: only {size} bytes of it "
        "did"
    )
