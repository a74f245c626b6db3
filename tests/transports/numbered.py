"""Messages of a byte stream that have a number, and a session that has them cut."""

import struct
import zlib
from collections.abc import Callable, Sequence

from shoal.domain.errors import LimitExceeded
from shoal.protocols.seam.framing import FramedMessage

HEAD = struct.Struct(">II")  # a number, and the size of what follows

START = 1000  # bytes


class Numbered:
    """What has messages cut: a number, a size, and a body that may be ``limit``.

    Of bodies above ``start_of`` bytes only ``START`` bytes are kept; None: of none.
    """

    head_size = HEAD.size

    def __init__(self, limit: int = 256 << 20, start_of: int | None = None) -> None:
        self.limit = limit
        self.start_of = start_of
        self.asked: list[int] = []  # sizes of which it was asked

    def body_size(self, head: bytes) -> int:
        _, size = HEAD.unpack(head)
        self.asked.append(size)
        if size > self.limit:
            raise LimitExceeded("message", size, self.limit)
        assert isinstance(size, int)
        return size

    def buffer_for(
        self, head: bytes, take: Callable[[int], memoryview]
    ) -> memoryview | None:
        if self.start_of is None or HEAD.unpack(head)[1] <= self.start_of:
            return None
        return take(START)

    def checksum(self, piece: memoryview, so_far: int) -> int:
        return zlib.crc32(piece, so_far)

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[object]:
        return messages


def message(number: int, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body
