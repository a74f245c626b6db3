"""Encodes payloads for a peer as frames or chunks."""

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
    default_stream,
    encode_frame,
    encode_header,
)
from shoal.protocols.seam.session import Bulk, Send

Part: TypeAlias = bytes | memoryview

CHECKSUM_STEP = 1 << 20  # bytes of a payload whose checksum is computed at a time


class FrameWriter:
    """Writes frames for one peer; ``is_shoal``: it can join chunks.

    Small messages may overtake bulk data.  ``in_order`` prevents that, for messages
    that refer to earlier ones.
    """

    def __init__(self, *, is_shoal: bool) -> None:
        self._is_shoal = is_shoal
        self._stream = DEFAULT_STREAM

    def write(
        self,
        type: FrameType,
        payload: Payload,
        stream: int | None = None,
        *,
        in_order: bool = False,
    ) -> Send | Bulk:
        """Return the frame of a payload; ``stream`` is by default that of its type."""
        size = len(payload)
        if stream is None:
            stream = default_stream(type)
        if size <= CHUNK_SIZE:
            data = encode_frame(Frame(type, stream, 0, 0, payload))
            return Bulk((data,)) if in_order else Send(data)
        if self._is_shoal:
            return self.write_chunks(type, payload, stream=stream)
        # The checksum in the header takes long to compute, so it is done in steps.
        return Bulk(_whole(type, stream, payload), HEADER.size + size)

    def write_parts(
        self,
        type: FrameType,
        *parts: Payload,
        stream: int | None = None,
        in_order: bool = False,
    ) -> Send | Bulk:
        """Return the frame of a payload in several parts, without joining large ones.

        Without a ``stream``, chunks have a frame stream of their own.
        """
        size = sum(map(len, parts))
        if size <= CHUNK_SIZE:
            return self.write(type, b"".join(parts), stream, in_order=in_order)
        if self._is_shoal:
            chunk_stream = self.new_stream() if stream is None else stream
            return self.write_chunks(type, *parts, stream=chunk_stream)
        whole_stream = default_stream(type) if stream is None else stream
        return Bulk(_whole(type, whole_stream, *parts), HEADER.size + size)

    def write_chunks(
        self, type: FrameType, *parts: Payload, stream: int = DEFAULT_STREAM
    ) -> Bulk:
        """Return a payload as chunks, for Shoal nodes only."""
        size = sum(map(len, parts))
        pieces = max(1, -(-size // CHUNK_SIZE))
        return Bulk(_chunks(type, stream, *parts), size + pieces * HEADER.size)

    def new_stream(self) -> int:
        """Return an unused frame stream."""
        self._stream += 1
        return self._stream


def _whole(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    crc = 0
    views = [memoryview(part) for part in parts]
    for view in views:
        for at in range(0, len(view), CHECKSUM_STEP):
            crc = FrameReader.checksum(view[at : at + CHECKSUM_STEP], crc)
            yield b""  # lets other frames go first
    yield encode_header(type, sum(map(len, parts)), crc, stream)
    yield from views


def _chunks(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    left = sum(map(len, parts))
    for _, _, flags, sequence, payload, _ in split_payload(type, stream, *parts):
        size, crc = len(payload), FrameReader.checksum(memoryview(payload), 0)
        yield encode_header(type, size, crc, stream, flags, sequence, left)
        yield memoryview(payload)
        yield b""  # lets other frames go first
        left -= size
