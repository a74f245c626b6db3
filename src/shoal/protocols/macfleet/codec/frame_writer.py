"""How what is said to a peer becomes frames."""

from collections.abc import Iterator
from typing import TypeAlias

from shoal.protocols.macfleet.codec.chunks import CHUNK_SIZE, split_payload
from shoal.protocols.macfleet.codec.frames import (
    DEFAULT_STREAM,
    HEADER,
    Frame,
    FrameReader,
    FrameType,
    Payload,
    encode_frame,
    encode_header,
)
from shoal.protocols.seam.session import Bulk, Send

Part: TypeAlias = bytes | memoryview

CHECKSUM_STEP = 1 << 20  # bytes of a payload whose checksum is computed at a time


class FrameWriter:
    """Speaks to one peer; ``is_shoal`` says that it puts pieces together again.

    Small messages may go out before larger ones that were said before.  ``in_order``
    keeps one from that: it is about something that was.
    """

    def __init__(self, *, is_shoal: bool) -> None:
        self._is_shoal = is_shoal
        self._stream = DEFAULT_STREAM

    def write(
        self,
        type: FrameType,
        payload: Payload,
        stream: int = DEFAULT_STREAM,
        *,
        in_order: bool = False,
    ) -> Send | Bulk:
        """Return how a payload goes out."""
        size = len(payload)
        if size <= CHUNK_SIZE:
            data = encode_frame(Frame(type, stream, 0, 0, payload))
            return Bulk((data,)) if in_order else Send(data)
        if self._is_shoal:
            return self.write_chunks(type, payload, stream=stream)
        # The checksum comes first and takes long, so it is made in steps.
        return Bulk(_whole(type, stream, payload), HEADER.size + size)

    def write_parts(
        self, type: FrameType, *parts: Payload, in_order: bool = False
    ) -> Send | Bulk:
        """Return how a payload goes out whose parts are not to be put together first.

        A large one is on a stream of its own, if it goes in pieces.
        """
        size = sum(map(len, parts))
        if size <= CHUNK_SIZE:
            return self.write(type, b"".join(parts), in_order=in_order)
        if self._is_shoal:
            return self.write_chunks(type, *parts, stream=self.new_stream())
        return Bulk(_whole(type, DEFAULT_STREAM, *parts), HEADER.size + size)

    def write_chunks(
        self, type: FrameType, *parts: Payload, stream: int = DEFAULT_STREAM
    ) -> Bulk:
        """Return how a payload, of several parts perhaps, goes to one of ours."""
        size = sum(map(len, parts))
        pieces = max(1, -(-size // CHUNK_SIZE))
        return Bulk(_chunks(type, stream, *parts), size + pieces * HEADER.size)

    def new_stream(self) -> int:
        """Return a stream on which nothing was said yet."""
        self._stream += 1
        return self._stream


def _whole(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    crc = 0
    views = [memoryview(part) for part in parts]
    for view in views:
        for at in range(0, len(view), CHECKSUM_STEP):
            crc = FrameReader.checksum(view[at : at + CHECKSUM_STEP], crc)
            yield b""  # here others may go first
    yield encode_header(type, sum(map(len, parts)), crc, stream)
    yield from views


def _chunks(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    left = sum(map(len, parts))
    for _, _, flags, sequence, payload in split_payload(type, stream, *parts):
        size, crc = len(payload), FrameReader.checksum(memoryview(payload), 0)
        yield encode_header(type, size, crc, stream, flags, sequence, left)
        yield memoryview(payload)
        yield b""  # here others may go first
        left -= size
