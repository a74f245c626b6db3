"""How what is said to a peer becomes frames."""

from collections.abc import Iterator
from typing import TypeAlias

from shoal.protocols.macfleet.wire.chunks import CHUNK, split
from shoal.protocols.macfleet.wire.frames import (
    HEAD,
    STREAM,
    Frame,
    FrameReader,
    FrameType,
    Payload,
    encode,
    head_with,
)
from shoal.protocols.session import Bulk, Send

Part: TypeAlias = bytes | memoryview

CRC_STEP = 1 << 20  # bytes of a payload whose checksum is computed at a time


class Voice:
    """Speaks to one peer; ``ours`` says that it puts pieces together again.

    Small messages may go out before larger ones that were said before.  ``in_turn``
    keeps one from that: it is about something that was.
    """

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours
        self._stream = STREAM

    def say(
        self,
        type: FrameType,
        payload: Payload,
        stream: int = STREAM,
        *,
        in_turn: bool = False,
    ) -> Send | Bulk:
        """Return how a payload goes out."""
        size = len(payload)
        if size <= CHUNK:
            data = encode(Frame(type, stream, 0, 0, payload))
            return Bulk((data,)) if in_turn else Send(data)
        if self._ours:
            return self.say_in_pieces(type, payload, stream=stream)
        # The checksum comes first and takes long, so it is made in steps.
        return Bulk(_whole(type, stream, payload), HEAD.size + size)

    def say_parts(
        self, type: FrameType, *parts: Payload, in_turn: bool = False
    ) -> Send | Bulk:
        """Return how a payload goes out whose parts are not to be put together first.

        A large one is on a stream of its own, if it goes in pieces.
        """
        size = sum(map(len, parts))
        if size <= CHUNK:
            return self.say(type, b"".join(parts), in_turn=in_turn)
        if self._ours:
            return self.say_in_pieces(type, *parts, stream=self.new_stream())
        return Bulk(_whole(type, STREAM, *parts), HEAD.size + size)

    def say_in_pieces(
        self, type: FrameType, *parts: Payload, stream: int = STREAM
    ) -> Bulk:
        """Return how a payload, of several parts perhaps, goes to one of ours."""
        size = sum(map(len, parts))
        pieces = max(1, -(-size // CHUNK))
        return Bulk(_pieces(type, stream, *parts), size + pieces * HEAD.size)

    def new_stream(self) -> int:
        """Return a stream on which nothing was said yet."""
        self._stream += 1
        return self._stream


def _whole(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    crc = 0
    views = [memoryview(part) for part in parts]
    for view in views:
        for at in range(0, len(view), CRC_STEP):
            crc = FrameReader.checksum(view[at : at + CRC_STEP], crc)
            yield b""  # here others may go first
    yield head_with(type, sum(map(len, parts)), crc, stream)
    yield from views


def _pieces(type: FrameType, stream: int, *parts: Payload) -> Iterator[Part]:
    left = sum(map(len, parts))
    for _, _, flags, sequence, payload in split(type, stream, *parts):
        size, crc = len(payload), FrameReader.checksum(memoryview(payload), 0)
        yield head_with(type, size, crc, stream, flags, sequence, left)
        yield memoryview(payload)
        yield b""  # here others may go first
        left -= size
