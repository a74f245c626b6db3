"""Splits large payloads into chunks, so that small frames need not wait for them.

Sent between Shoal nodes only: the document defines the flags, but upstream does not
support them.  The chunks of a payload are on a stream of their own, numbered from 0 by
the sequence; the last is flagged.  Other frames may come between them.  Each header has
the number of remaining bytes, so chunks can be received straight into the final buffer.

Other peers may send chunks as the document has them: without that number, and numbered
from any number, because the document orders all frames of a stream by their sequence.
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

CHUNK_SIZE = 256 << 10  # bytes: larger payloads are split
STREAMS_MAX = 16  # chunked payloads in progress at the same time
BUFFERED_MAX = 2 * PAYLOAD_MAX  # bytes of them together
SEQUENCES = 1 << 32  # after the last, a stream's sequence is 0 again

Allocate: TypeAlias = Callable[[int], memoryview]
"""Returns memory of so many bytes, with any contents."""

_CHUNKED = int(Flag.CHUNKED)
_LAST = int(Flag.CHUNKED | Flag.LAST)


def split_payload(
    type: FrameType, stream: int, *parts: Payload, flags: int = 0
) -> Iterator[Frame]:
    """Split a payload into frames, whose payloads are views of it.

    It may consist of several parts.  All frames but the last have the same size; one
    that contains bytes of two parts is a copy.
    """
    left = sum(map(len, parts))
    chunks = _chunks(parts)
    for sequence in range(max(1, -(-left // CHUNK_SIZE))):
        left -= CHUNK_SIZE
        flag = _CHUNKED if left > 0 else _LAST
        yield Frame(type, stream, flags | flag, sequence, next(chunks, b""))


def _chunks(parts: tuple[Payload, ...]) -> Iterator[Payload]:
    pending = bytearray()
    for part in parts:
        view = memoryview(part)
        at = 0
        if pending:
            at = CHUNK_SIZE - len(pending)
            pending += view[:at]
            if len(pending) < CHUNK_SIZE:
                continue
            yield pending
            pending = bytearray()
        while at < len(view):
            piece = view[at : at + CHUNK_SIZE]
            at += CHUNK_SIZE
            if len(piece) == CHUNK_SIZE or part is parts[-1]:
                yield piece
            else:
                pending += piece
    if pending:
        yield pending


class _Reservation:
    """The buffer of a payload of known size; its slices are handed out in order."""

    __slots__ = ("_views", "memory", "reserved")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.reserved = 0  # bytes
        self._views: deque[tuple[int, memoryview]] = deque()  # not filled, with offset

    def reserve(self, size: int) -> memoryview:
        """Return the slice for the next bytes."""
        at, self.reserved = self.reserved, self.reserved + size
        view = self.memory[at : self.reserved]
        self._views.append((at, view))
        return view

    def begins_with(self, payload: Payload) -> bool:
        """Say whether a payload is the first slice that is not filled."""
        return bool(self._views) and payload is self._views[0][1]

    def fill(self, payload: Payload, at: int) -> None:
        """Put a payload at an offset; usually it was received there.

        Raises PeerError if it was received at another offset.
        """
        where = at
        if self.begins_with(payload):
            where, _ = self._views.popleft()
        else:
            self.memory[at : at + len(payload)] = payload
        if where != at:
            raise PeerError(f"a chunk for byte {where}, expected one for {at}")


@dataclass(slots=True)
class _PartialPayload:
    type: FrameType
    reservation: _Reservation | None
    due: int  # sequence of the next chunk
    size: int = 0
    buffer: bytearray = field(default_factory=bytearray)


class ChunkJoiner:
    """Joins the chunks of several payloads at a time.

    Memory is bounded by ``buffered_max`` bytes; a payload has at most ``payload_max``.
    ``counts_from_zero``: the first chunk of each payload has the sequence 0.
    """

    def __init__(
        self,
        payload_max: int = PAYLOAD_MAX,
        streams_max: int = STREAMS_MAX,
        buffered_max: int = BUFFERED_MAX,
        *,
        counts_from_zero: bool = True,
    ) -> None:
        self._payload_max = payload_max
        self._counts_from_zero = counts_from_zero
        self._streams_max = streams_max
        self._buffered_max = buffered_max
        self._buffered = 0  # bytes
        self._partial: dict[int, _PartialPayload] = {}
        self._reservations: dict[int, _Reservation] = {}  # the newest of each stream
        self._unclaimed: deque[_Reservation] = deque()  # no slice is filled yet
        self._reserved = 0  # bytes of all reservations

    def buffer_for(self, head: bytes, take: Allocate) -> memoryview | None:
        """Return memory for a large frame; None: any memory will do.

        Called for each frame in order, before ``add``.  No memory is handed out twice,
        so a peer cannot change bytes that were already checked.
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
        reservation = self._reservations.get(stream)
        if (
            reservation is None
            or len(reservation.memory) - left != reservation.reserved
        ):
            return None
        return reservation.reserve(size)

    def add(self, chunk: Frame) -> Frame | None:
        """Add a chunk; return the whole payload with the last one.

        Raises PeerError for a chunk out of order or of another type than the first, and
        LimitExceeded.
        """
        type, stream, flags, sequence, payload, _ = chunk
        partial = self._partial.get(stream)
        if partial is None:
            if len(self._partial) >= self._streams_max:
                raise PeerError(
                    f"more than {self._streams_max} chunked payloads at once"
                )
            first = 0 if self._counts_from_zero else sequence
            partial = self._partial[stream] = _PartialPayload(
                type, self._reservation_of(payload), first
            )
        if sequence != partial.due or type is not partial.type:
            raise PeerError(
                f"chunk {sequence} ({type.name}) on stream {stream}, expected chunk "
                f"{partial.due} ({partial.type.name})"
            )
        size = partial.size + len(payload)
        if size > self._payload_max:
            raise LimitExceeded("chunked payload", size, self._payload_max)
        self._buffered += len(payload)
        if self._buffered > self._buffered_max:
            raise LimitExceeded("chunked payloads", self._buffered, self._buffered_max)
        _append(partial, payload, last=bool(flags & Flag.LAST))
        if not flags & Flag.LAST:
            return None
        del self._partial[stream]
        self._buffered -= size
        return Frame(type, stream, flags & ~_LAST, 0, self._complete(stream, partial))

    def _reservation_of(self, payload: Payload) -> _Reservation | None:
        """Return the reservation whose first slice is this payload, if there is one."""
        if self._unclaimed and self._unclaimed[0].begins_with(payload):
            return self._unclaimed.popleft()
        return None

    def _complete(self, stream: int, partial: _PartialPayload) -> memoryview:
        reservation = partial.reservation
        if reservation is None:
            return memoryview(partial.buffer)
        self._reserved -= len(reservation.memory)
        if self._reservations.get(stream) is reservation:
            del self._reservations[stream]
        return reservation.memory


def _append(partial: _PartialPayload, payload: Payload, *, last: bool) -> None:
    """Append a chunk.  Raises PeerError if the size differs from the one announced."""
    at = partial.size
    partial.due = (partial.due + 1) % SEQUENCES
    partial.size += len(payload)
    if partial.reservation is None:
        partial.buffer += payload
        return
    total = len(partial.reservation.memory)
    if partial.size > total or (last and partial.size < total):
        raise PeerError(f"{partial.size} bytes in chunks, expected {total}")
    partial.reservation.fill(payload, at)
