"""Large messages in pieces, so that small ones can pass them.

Before each piece is a byte that says whether more of its message follow, and its size.
One message at a time is sent in pieces; small ones, which are whole, may come between.
Pieces that are sent together may arrive as one message of the WebSocket.
"""

import struct
from collections.abc import Iterator, Sequence

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.session import Bulk, Data, Send

PIECE_MAX = 256 << 10  # bytes of a message in a piece
MESSAGE_MAX = 320 << 20  # bytes: a value of 256 MiB and what surrounds it

WHOLE, MORE, LAST = range(3)
HEAD = struct.Struct(">BI")  # which of them, and the size in bytes
FRAME_MAX = HEAD.size + PIECE_MAX


def write(
    parts: Sequence[bytes | memoryview], *, in_order: bool = False
) -> Send | Bulk:
    """Return a message, whose parts are joined at the other end.

    A large one is sent behind all small ones, and so is one that is sent ``in_order``:
    it must not overtake large ones before it.
    """
    if (size := sum(map(len, parts))) <= PIECE_MAX:
        whole = b"".join((HEAD.pack(WHOLE, size), *parts))
        return Bulk((whole,)) if in_order else Send(whole)
    count = -(-size // PIECE_MAX)
    return Bulk(_pieces(parts, size), size + count * HEAD.size)


def _pieces(parts: Sequence[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield the pieces of a message, which are copied one at a time."""
    for begin in range(0, size, PIECE_MAX):
        yield b""  # small messages go first
        end = min(begin + PIECE_MAX, size)
        head = HEAD.pack(LAST if end == size else MORE, end - begin)
        piece: list[bytes | memoryview] = [head]
        before = 0  # bytes of the parts before this one
        for part in parts:
            view = memoryview(part)
            piece.append(view[max(begin - before, 0) : max(end - before, 0)])
            before += len(view)
        yield b"".join(piece)


class PieceJoiner:
    """Joins the pieces of one end's messages.  ``message_max`` is in bytes."""

    def __init__(self, message_max: int) -> None:
        self.message_max = message_max
        self._pieces: list[memoryview] = []
        self._size = 0

    def receive(self, data: Data) -> Sequence[bytes]:
        """Return the messages that are complete with some pieces.

        Raises PeerError.
        """
        if isinstance(data, str):
            raise PeerError("a text message")
        complete: list[bytes] = []
        view, at = memoryview(data), 0
        while at < len(view):
            try:
                kind, size = HEAD.unpack_from(view, at)
            except struct.error as error:
                raise PeerError("half of a piece's head") from error
            begin, at = at + HEAD.size, at + HEAD.size + size
            if at > len(view):
                raise PeerError(f"a piece of {size} bytes is cut")
            if (message := self._add(kind, view[begin:at])) is not None:
                complete.append(message)
        return complete

    def _add(self, kind: int, piece: memoryview) -> bytes | None:
        size = len(piece) + (0 if kind == WHOLE else self._size)
        if size > self.message_max:
            raise LimitExceeded("message", size, self.message_max)
        if kind == WHOLE:
            return bytes(piece)
        if kind not in (MORE, LAST):
            raise PeerError("not a piece of a message")
        self._pieces.append(piece)
        self._size = size
        if kind == MORE:
            return None
        message = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return message
