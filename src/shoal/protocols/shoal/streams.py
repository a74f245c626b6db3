"""Large messages as streams of pieces, each with credit, so that none holds up others.

A piece begins with its kind and its size.  A small message is one piece.  A larger one
is a stream: its pieces take turns with those of others, and small messages come between
them.  What has arrived of a stream is acknowledged with credit for more, so each end
decides how much it holds of unfinished messages, and the sender how much is on its way:
what is buffered on a slow link, small messages have to wait for.

An end that announces no window is of a release without streams: it gets one large
message at a time, as fast as it is read.
"""

import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import IntEnum

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.session import Bulk, Data, Send

SMALL_MAX = 256 << 10  # bytes of a message that is one piece
PIECE_MAX = 63 << 10  # bytes of a larger one in a piece, which fits into one record
MESSAGE_MAX = 320 << 20  # bytes: a value of 256 MiB and what surrounds it

WINDOW = 4 << 20  # bytes of a stream that may arrive before they are acknowledged
STREAMS_MAX = 16  # streams of one end that have begun
HELD_MAX = 64 << 20  # bytes of unfinished messages; above it only the oldest continues

UNDERWAY_MIN = 2 * PIECE_MAX  # bytes that may be on their way, however slow it is
UNDERWAY_FIRST = 4 * PIECE_MAX  # the same at first
QUEUED_FOR = 0.1  # seconds that a piece may be queued on the way, and a token behind it
GAIN = 0.5  # of the bytes acknowledged, how many more or fewer may be on their way


class PieceKind(IntEnum):
    """What follows the head of a piece."""

    WHOLE = 0  # a message
    MORE = 1  # a part of the only large message, to ends without streams
    LAST = 2  # its last part
    STREAM_MORE = 3  # the number of a stream, and a part of it
    STREAM_LAST = 4  # its last part
    CREDIT = 5  # of a stream: bytes that arrived, and bytes that may follow


WHOLE, MORE, LAST, STREAM_MORE, STREAM_LAST, CREDIT = PieceKind
HEAD = struct.Struct(">BI")  # kind, and the size of what follows
NUMBER = struct.Struct(">I")
_CREDIT = struct.Struct(">III")
FRAME_MAX = HEAD.size + SMALL_MAX


class _Stream:
    """A message that is being sent.

    ``after`` are the numbers of those that it must not overtake.
    """

    __slots__ = ("after", "credit", "key", "number", "sent", "size")

    def __init__(self, number: int, key: Hashable, size: int, credit: int) -> None:
        self.number = number
        self.key = key
        self.size = size
        self.sent = 0
        self.credit = credit
        self.after: frozenset[int] = frozenset()


class OutgoingStreams:
    """What one end sends.

    ``window`` is the other end's: how many bytes of each stream it takes at first; 0:
    it knows no streams.  ``now`` is the time of the last call of the session.
    """

    def __init__(self) -> None:
        self.window = 0
        self.now = 0.0
        self._number = 0
        self._open: dict[int, _Stream] = {}  # also small ones that wait for others
        self._begun: set[int] = set()
        self._last: dict[Hashable, int] = {}  # by key, while it is open
        # Congestion control like LEDBAT's (RFC 6817): by the time that pieces take
        # beyond the shortest.
        self._underway = 0  # bytes
        self._underway_max = float(UNDERWAY_FIRST)
        self._sent: deque[tuple[int, float]] = deque()  # pieces: bytes, and when
        self._shortest = 0.0  # seconds

    @property
    def waiting(self) -> bool:
        """Whether a message is open that others may have to wait for."""
        return bool(self._open)

    def write(
        self,
        parts: Sequence[bytes | memoryview],
        key: Hashable = None,
        after: Iterable[Hashable] = (),
    ) -> Send | Bulk:
        """Return a message, whose parts are joined at the other end.

        It does not overtake messages of its ``key``, nor of those in ``after``.
        """
        size = sum(map(len, parts))
        is_small = size <= SMALL_MAX
        if is_small and not self._open:
            return Send(b"".join((HEAD.pack(WHOLE, size), *parts)))
        keys = (*after, *(() if key is None else (key,)))
        before = frozenset(self._last[each] for each in keys if each in self._last)
        if is_small and not before:
            return Send(b"".join((HEAD.pack(WHOLE, size), *parts)))
        self._number = (self._number + 1) & 0xFFFFFFFF
        stream = _Stream(self._number, key, size, self.window)
        stream.after = before
        self._open[stream.number] = stream
        if key is not None:
            self._last[key] = stream.number
        step, head = SMALL_MAX, HEAD.size
        if self.window and not is_small:
            step, head = PIECE_MAX, HEAD.size + NUMBER.size
        count = max(1, -(-size // step))
        pieces = self._pieces(stream, parts, step)
        return Bulk(pieces, size + count * head, lambda: self._is_ready(stream))

    def _is_ready(self, stream: _Stream) -> bool:
        """Return whether the next piece may be sent."""
        if not stream.after.isdisjoint(self._open):
            return False
        if stream.size <= SMALL_MAX:
            return True
        if not self.window:
            large = (n for n, each in self._open.items() if each.size > SMALL_MAX)
            return next(large) == stream.number
        if stream.number not in self._begun and len(self._begun) >= STREAMS_MAX:
            return False
        piece = min(PIECE_MAX, stream.size - stream.sent)
        return piece <= min(stream.credit, self._underway_max - self._underway)

    def _pieces(
        self, stream: _Stream, parts: Sequence[bytes | memoryview], step: int
    ) -> Iterator[bytes]:
        """Yield the pieces of a message, which are copied one at a time.

        An empty part ends a turn.
        """
        size = stream.size
        while True:
            begin, end = stream.sent, min(stream.sent + step, size)
            piece = _slice(parts, begin, end)
            stream.sent = end
            yield b"".join((self._head(stream, end - begin), *piece))
            if end == size:
                break
            yield b""
        del self._open[stream.number]
        self._begun.discard(stream.number)
        if self._last.get(stream.key) == stream.number:
            del self._last[stream.key]

    def _head(self, stream: _Stream, size: int) -> bytes:
        """Return what precedes a piece, which is sent now."""
        is_last = stream.sent == stream.size
        if stream.size <= SMALL_MAX:
            return HEAD.pack(WHOLE, size)
        if not self.window:
            return HEAD.pack(LAST if is_last else MORE, size)
        if not self._underway:
            self._shortest = float("inf")  # the route may be another one by now
        stream.credit -= size
        self._begun.add(stream.number)
        self._underway += size
        self._sent.append((size, self.now))
        kind = STREAM_LAST if is_last else STREAM_MORE
        head = HEAD.pack(kind, NUMBER.size + size)
        return head + NUMBER.pack(stream.number)

    def on_credit(self, number: int, arrived: int, credit: int) -> None:
        """Count bytes of a stream that arrived, and how many more may follow.

        Raises PeerError.
        """
        if arrived > self._underway:
            raise PeerError("more has arrived of streams than was sent")
        if (stream := self._open.get(number)) is not None:
            stream.credit += credit
        if not arrived:
            return
        self._underway -= arrived
        left = arrived
        while left > 0:
            size, at = self._sent.popleft()
            if size > left:
                self._sent.appendleft((size - left, at))
            left -= size
        took = self.now - at
        self._shortest = min(self._shortest, took)
        early = 1.0 - (took - self._shortest) / QUEUED_FOR
        change = GAIN * arrived * max(early, -1.0)
        grown = max(self._underway_max + change, UNDERWAY_MIN)
        self._underway_max = min(grown, WINDOW)


def _slice(
    parts: Sequence[bytes | memoryview], begin: int, end: int
) -> Iterator[memoryview]:
    """Yield the bytes of joined parts from ``begin`` to ``end``."""
    before = 0  # bytes of the parts before this one
    for part in parts:
        view = memoryview(part)
        yield view[max(begin - before, 0) : max(end - before, 0)]
        before += len(view)


class _Unfinished:
    """What has arrived of a stream: how much may follow, and is not granted yet."""

    __slots__ = ("arrived", "credit", "pieces", "size", "ungranted")

    def __init__(self, credit: int) -> None:
        self.pieces: list[memoryview] = []
        self.size = 0
        self.credit = credit
        self.ungranted = 0
        self.arrived = 0  # and is not acknowledged yet


class IncomingStreams:
    """Joins the pieces of the other end's messages.

    A message has ``message_max`` bytes at most.  ``window`` is how much of each stream
    may arrive at first; 0: streams are refused.  ``on_credit`` takes what the other end
    says of streams: number, bytes that arrived, and bytes of credit.
    """

    def __init__(
        self, message_max: int, on_credit: Callable[[int, int, int], None]
    ) -> None:
        self.message_max = message_max
        self.window = 0
        self.held_max = HELD_MAX
        self.unacknowledged = False
        self._on_credit = on_credit
        self._pieces: list[memoryview] = []  # of the only one, by ends without streams
        self._size = 0
        self._streams: dict[int, _Unfinished] = {}  # the oldest first
        self._ended: list[tuple[int, int]] = []  # numbers, and bytes that arrived
        self._held = 0  # bytes of streams

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

    def acknowledge(self) -> bytes:
        """Return the pieces that acknowledge what has arrived, and grant credit."""
        self.unacknowledged = False
        pieces = [
            HEAD.pack(CREDIT, _CREDIT.size) + _CREDIT.pack(number, arrived, 0)
            for number, arrived in self._ended
        ]
        self._ended.clear()
        for place, (number, each) in enumerate(self._streams.items()):
            credit = 0
            if not place or self._held <= self.held_max:
                credit, each.ungranted = each.ungranted, 0
                each.credit += credit
            if credit or each.arrived:
                body = _CREDIT.pack(number, each.arrived, credit)
                pieces.append(HEAD.pack(CREDIT, _CREDIT.size) + body)
                each.arrived = 0
        return b"".join(pieces)

    def _add(self, kind: int, piece: memoryview) -> bytes | None:
        if kind == WHOLE:
            if len(piece) > self.message_max:
                raise LimitExceeded("message", len(piece), self.message_max)
            return bytes(piece)
        try:
            match kind:
                case PieceKind.MORE | PieceKind.LAST:
                    return self._add_unnumbered(piece, is_last=kind == LAST)
                case PieceKind.STREAM_MORE | PieceKind.STREAM_LAST:
                    return self._add_to_stream(piece, is_last=kind == STREAM_LAST)
                case PieceKind.CREDIT:
                    self._on_credit(*_CREDIT.unpack(piece))
                    return None
                case _:
                    raise PeerError("not a piece of a message")
        except struct.error as error:
            raise PeerError("a piece of a stream has another size") from error

    def _add_unnumbered(self, piece: memoryview, *, is_last: bool) -> bytes | None:
        self._size += len(piece)
        if self._size > self.message_max:
            raise LimitExceeded("message", self._size, self.message_max)
        self._pieces.append(piece)
        if not is_last:
            return None
        message = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return message

    def _add_to_stream(self, piece: memoryview, *, is_last: bool) -> bytes | None:
        (number,) = NUMBER.unpack_from(piece)
        part = piece[NUMBER.size :]
        stream = self._streams.get(number)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                raise PeerError(f"more than {STREAMS_MAX} streams at once")
            stream = self._streams[number] = _Unfinished(self.window)
        if len(part) > stream.credit:
            raise PeerError(f"a stream has {stream.credit} bytes of credit left")
        stream.size += len(part)
        if stream.size > self.message_max:
            raise LimitExceeded("message", stream.size, self.message_max)
        stream.pieces.append(part)
        stream.credit -= len(part)
        stream.ungranted += len(part)
        stream.arrived += len(part)
        self._held += len(part)
        self.unacknowledged = True
        if not is_last:
            return None
        del self._streams[number]
        self._held -= stream.size
        self._ended.append((number, stream.arrived))
        return b"".join(stream.pieces)
