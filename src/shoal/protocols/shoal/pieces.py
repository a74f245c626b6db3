"""Large messages in pieces, so that small ones can pass them.

The first byte of each piece says whether more of its message follow.  One message at a
time is sent in pieces; small ones, which are whole, may come between.
"""

from collections.abc import Iterator, Sequence

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.session import Bulk, Data, Send

PIECE_MAX = 256 << 10  # bytes of a message in a piece
FRAME_MAX = PIECE_MAX + 1  # bytes of a piece with its first byte
MESSAGE_MAX = 320 << 20  # bytes: a value of 256 MiB and what surrounds it

WHOLE, MORE, LAST = b"\0", b"\1", b"\2"


def write(
    parts: Sequence[bytes | memoryview], *, in_order: bool = False
) -> Send | Bulk:
    """Return a message, whose parts are joined at the other end.

    A large one is sent behind all small ones, and so is one that is sent ``in_order``:
    it must not overtake large ones before it.
    """
    if (size := sum(map(len, parts))) <= PIECE_MAX:
        whole = b"".join((WHOLE, *parts))
        return Bulk((whole,)) if in_order else Send(whole)
    count = -(-size // PIECE_MAX)
    return Bulk(_pieces(b"".join(parts), count), size + count)


def _pieces(message: bytes, count: int) -> Iterator[bytes]:
    view = memoryview(message)
    for number in range(1, count + 1):
        yield b""  # small messages go first
        kind = LAST if number == count else MORE
        yield kind + view[(number - 1) * PIECE_MAX : number * PIECE_MAX]


class PieceJoiner:
    """Joins the pieces of one end's messages.  ``message_max`` is in bytes."""

    def __init__(self, message_max: int) -> None:
        self.message_max = message_max
        self._pieces: list[memoryview] = []
        self._size = 0

    def receive(self, frame: Data) -> bytes | None:
        """Return the message that a piece completes; None: it completes none.

        Raises PeerError.
        """
        if isinstance(frame, str):
            raise PeerError("a text message")
        kind, piece = frame[:1], memoryview(frame)[1:]
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
