"""Large payloads in pieces, so that small frames need not wait for them.

Between our own peers only: the document has the flags, and real peers do not read them.
The pieces of a payload are on a stream of their own, counted from 0 by the sequence;
the last is flagged as such.  Other frames may come between them.  Each says how much
there is left, so that pieces can be read straight to where they belong.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.frames import (
    HEADER,
    PAYLOAD_MAX,
    Flag,
    Frame,
    FrameType,
    Payload,
)

CHUNK_SIZE = 256 << 10  # bytes: what is larger is sent in pieces of that
STREAMS_MAX = 16  # payloads that may be on their way at the same time
BUFFERED_MAX = 2 * PAYLOAD_MAX  # bytes of them together

Allocate: TypeAlias = Callable[[int], memoryview]
"""Returns memory of so many bytes, which need not be empty."""

_CHUNKED = int(Flag.CHUNKED)
_LAST = int(Flag.CHUNKED | Flag.LAST)


def split_payload(
    type: FrameType, stream: int, *parts: Payload, flags: int = 0
) -> Iterator[Frame]:
    """Cut a payload into frames, whose payloads look into it.

    It may have several parts, one after the other.  All frames but the last are of the
    same size; one that has bytes of two parts has a copy of them.
    """
    left = sum(map(len, parts))
    pieces = _chunks(parts)
    for sequence in range(max(1, -(-left // CHUNK_SIZE))):
        left -= CHUNK_SIZE
        flag = _CHUNKED if left > 0 else _LAST
        yield Frame(type, stream, flags | flag, sequence, next(pieces, b""))


def _chunks(parts: tuple[Payload, ...]) -> Iterator[Payload]:
    begun = bytearray()
    for part in parts:
        view = memoryview(part)
        at = 0
        if begun:
            at = CHUNK_SIZE - len(begun)
            begun += view[:at]
            if len(begun) < CHUNK_SIZE:
                continue
            yield begun
            begun = bytearray()
        while at < len(view):
            piece = view[at : at + CHUNK_SIZE]
            at += CHUNK_SIZE
            if len(piece) == CHUNK_SIZE or part is parts[-1]:
                yield piece
            else:
                begun += piece
    if begun:
        yield begun


class _Reservation:
    """Memory for a payload that said its size, given out from its begin to its end."""

    __slots__ = ("_views", "memory", "reserved")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.reserved = 0  # bytes
        self._views: deque[tuple[int, memoryview]] = deque()  # not taken, and where

    def reserve(self, size: int) -> memoryview:
        """Return where the next bytes belong."""
        at, self.reserved = self.reserved, self.reserved + size
        view = self.memory[at : self.reserved]
        self._views.append((at, view))
        return view

    def begins_with(self, payload: Payload) -> bool:
        """Say whether a payload is what was given out first."""
        return bool(self._views) and payload is self._views[0][1]

    def fill(self, payload: Payload, at: int) -> None:
        """Take a payload that belongs somewhere, where it mostly is already.

        Raises PeerError if it was said to belong elsewhere, or there is no room.
        """
        where = at
        if self.begins_with(payload):
            where, _ = self._views.popleft()
        else:
            self.memory[at : at + len(payload)] = payload
        if where != at:
            raise PeerError(f"a piece for byte {where} came, expected one for {at}")


@dataclass(slots=True)
class _PartialPayload:
    type: FrameType
    reservation: _Reservation | None
    chunks: int = 0
    size: int = 0
    buffer: bytearray = field(default_factory=bytearray)


class ChunkJoiner:
    """Puts payloads together again, several at a time.

    Memory is bounded by ``buffered_max`` bytes; a payload has at most ``payload_max``.
    """

    def __init__(
        self,
        payload_max: int = PAYLOAD_MAX,
        streams_max: int = STREAMS_MAX,
        buffered_max: int = BUFFERED_MAX,
    ) -> None:
        self._payload_max = payload_max
        self._streams_max = streams_max
        self._buffered_max = buffered_max
        self._buffered = 0  # bytes
        self._partial: dict[int, _PartialPayload] = {}
        self._reservations: dict[int, _Reservation] = {}  # the newest of each stream
        self._unclaimed: deque[_Reservation] = (
            deque()
        )  # those of which nothing was taken yet
        self._reserved = 0  # bytes of them all

    def buffer_for(self, head: bytes, take: Allocate) -> memoryview | None:
        """Return where a large frame is to be read to; None: it does not matter.

        Frames are asked about in order, and taken in order later.  Each byte of memory
        is given out once, so that nobody can change what was looked at.
        """
        stream, _, flags, size, sequence, _, left = HEADER.unpack(head)
        if not flags & _CHUNKED or size > left:
            return None
        if sequence == 0:
            too_large = left > self._payload_max
            if too_large or self._reserved + left > self._buffered_max:
                self._reservations.pop(stream, None)
                return None
            self._reserved += left
            self._reservations[stream] = _Reservation(take(left))
            self._unclaimed.append(self._reservations[stream])
        placed = self._reservations.get(stream)
        if placed is None or len(placed.memory) - left != placed.reserved:
            return None
        return placed.reserve(size)

    def add(self, chunk: Frame) -> Frame | None:
        """Take a frame that is flagged as a piece; return the whole with the last one.

        Raises PeerError for a piece out of order or of another type than those before,
        and LimitExceeded.
        """
        type, stream, flags, sequence, payload = chunk
        coming = self._partial.get(stream)
        if coming is None:
            if len(self._partial) >= self._streams_max:
                raise PeerError(
                    f"more than {self._streams_max} payloads come in pieces at once"
                )
            coming = self._partial[stream] = _PartialPayload(
                type, self._reservation_of(payload)
            )
        if sequence != coming.chunks or type is not coming.type:
            raise PeerError(
                f"piece {sequence} ({type.name}) on stream {stream}, expected piece "
                f"{coming.chunks} ({coming.type.name})"
            )
        size = coming.size + len(payload)
        if size > self._payload_max:
            raise LimitExceeded("payload in pieces", size, self._payload_max)
        self._buffered += len(payload)
        if self._buffered > self._buffered_max:
            raise LimitExceeded(
                "payloads in pieces", self._buffered, self._buffered_max
            )
        _append(coming, payload, last=bool(flags & Flag.LAST))
        if not flags & Flag.LAST:
            return None
        del self._partial[stream]
        self._buffered -= size
        return Frame(type, stream, flags & ~_LAST, 0, self._complete(stream, coming))

    def _reservation_of(self, payload: Payload) -> _Reservation | None:
        """Return the place that was begun with a payload, if there is one."""
        if self._unclaimed and self._unclaimed[0].begins_with(payload):
            return self._unclaimed.popleft()
        return None

    def _complete(self, stream: int, coming: _PartialPayload) -> memoryview:
        placed = coming.reservation
        if placed is None:
            return memoryview(coming.buffer)
        self._reserved -= len(placed.memory)
        if self._reservations.get(stream) is placed:
            del self._reservations[stream]
        return placed.memory


def _append(coming: _PartialPayload, payload: Payload, *, last: bool) -> None:
    """Add a piece.  Raises PeerError if there is more or less than was said."""
    at = coming.size
    coming.chunks += 1
    coming.size += len(payload)
    if coming.reservation is None:
        coming.buffer += payload
        return
    total = len(coming.reservation.memory)
    if coming.size > total or (last and coming.size < total):
        raise PeerError(f"{coming.size} bytes came in pieces, expected {total}")
    coming.reservation.fill(payload, at)
