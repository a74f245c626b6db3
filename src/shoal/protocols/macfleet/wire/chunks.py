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
from shoal.protocols.macfleet.wire.frames import (
    HEAD,
    PAYLOAD_MAX,
    Flag,
    Frame,
    FrameType,
    Payload,
)

CHUNK = 256 << 10  # bytes: what is larger is sent in pieces of that
STREAMS_MAX = 16  # payloads that may be on their way at the same time
HELD_MAX = 2 * PAYLOAD_MAX  # bytes of them together

Take: TypeAlias = Callable[[int], memoryview]
"""Returns memory of so many bytes, which need not be empty."""

_CHUNKED = int(Flag.CHUNKED)
_LAST = int(Flag.CHUNKED | Flag.LAST)


def split(
    type: FrameType, stream: int, *parts: Payload, flags: int = 0
) -> Iterator[Frame]:
    """Cut a payload into frames, whose payloads look into it.

    It may have several parts, one after the other.  All frames but the last are of the
    same size; one that has bytes of two parts has a copy of them.
    """
    left = sum(map(len, parts))
    pieces = _pieces(parts)
    for sequence in range(max(1, -(-left // CHUNK))):
        left -= CHUNK
        flag = _CHUNKED if left > 0 else _LAST
        yield Frame(type, stream, flags | flag, sequence, next(pieces, b""))


def _pieces(parts: tuple[Payload, ...]) -> Iterator[Payload]:
    begun = bytearray()
    for part in parts:
        view = memoryview(part)
        at = 0
        if begun:
            at = CHUNK - len(begun)
            begun += view[:at]
            if len(begun) < CHUNK:
                continue
            yield begun
            begun = bytearray()
        while at < len(view):
            piece = view[at : at + CHUNK]
            at += CHUNK
            if len(piece) == CHUNK or part is parts[-1]:
                yield piece
            else:
                begun += piece
    if begun:
        yield begun


class _Placed:
    """Memory for a payload that said its size, given out from its begin to its end."""

    __slots__ = ("_views", "given", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.given = 0  # bytes
        self._views: deque[tuple[int, memoryview]] = deque()  # not taken, and where

    def give(self, size: int) -> memoryview:
        """Return where the next bytes belong."""
        at, self.given = self.given, self.given + size
        view = self.memory[at : self.given]
        self._views.append((at, view))
        return view

    def begins_with(self, payload: Payload) -> bool:
        """Say whether a payload is what was given out first."""
        return bool(self._views) and payload is self._views[0][1]

    def put(self, payload: Payload, at: int) -> None:
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
class _Coming:
    type: FrameType
    placed: _Placed | None
    pieces: int = 0
    size: int = 0
    whole: bytearray = field(default_factory=bytearray)


class Joiner:
    """Puts payloads together again, several at a time.

    Memory is bounded by ``held_max`` bytes; a payload has at most ``payload_max``.
    """

    def __init__(
        self,
        payload_max: int = PAYLOAD_MAX,
        streams_max: int = STREAMS_MAX,
        held_max: int = HELD_MAX,
    ) -> None:
        self._payload_max = payload_max
        self._streams_max = streams_max
        self._held_max = held_max
        self._held = 0  # bytes
        self._coming: dict[int, _Coming] = {}
        self._placed: dict[int, _Placed] = {}  # the newest of each stream
        self._begun: deque[_Placed] = deque()  # those of which nothing was taken yet
        self._reserved = 0  # bytes of them all

    def place(self, head: bytes, take: Take) -> memoryview | None:
        """Return where a large frame is to be read to; None: it does not matter.

        Frames are asked about in order, and taken in order later.  Each byte of memory
        is given out once, so that nobody can change what was looked at.
        """
        stream, _, flags, size, sequence, _, left = HEAD.unpack(head)
        if not flags & _CHUNKED or size > left:
            return None
        if sequence == 0:
            too_large = left > self._payload_max
            if too_large or self._reserved + left > self._held_max:
                self._placed.pop(stream, None)
                return None
            self._reserved += left
            self._placed[stream] = _Placed(take(left))
            self._begun.append(self._placed[stream])
        placed = self._placed.get(stream)
        if placed is None or len(placed.memory) - left != placed.given:
            return None
        return placed.give(size)

    def take(self, piece: Frame) -> Frame | None:
        """Take a frame that is flagged as a piece; return the whole with the last one.

        Raises PeerError for a piece out of order or of another type than those before,
        and LimitExceeded.
        """
        type, stream, flags, sequence, payload = piece
        coming = self._coming.get(stream)
        if coming is None:
            if len(self._coming) >= self._streams_max:
                raise PeerError(
                    f"more than {self._streams_max} payloads come in pieces at once"
                )
            coming = self._coming[stream] = _Coming(type, self._place_of(payload))
        if sequence != coming.pieces or type is not coming.type:
            raise PeerError(
                f"piece {sequence} ({type.name}) on stream {stream}, expected piece "
                f"{coming.pieces} ({coming.type.name})"
            )
        size = coming.size + len(payload)
        if size > self._payload_max:
            raise LimitExceeded("payload in pieces", size, self._payload_max)
        self._held += len(payload)
        if self._held > self._held_max:
            raise LimitExceeded("payloads in pieces", self._held, self._held_max)
        _add(coming, payload, last=bool(flags & Flag.LAST))
        if not flags & Flag.LAST:
            return None
        del self._coming[stream]
        self._held -= size
        return Frame(type, stream, flags & ~_LAST, 0, self._whole(stream, coming))

    def _place_of(self, payload: Payload) -> _Placed | None:
        """Return the place that was begun with a payload, if there is one."""
        if self._begun and self._begun[0].begins_with(payload):
            return self._begun.popleft()
        return None

    def _whole(self, stream: int, coming: _Coming) -> memoryview:
        placed = coming.placed
        if placed is None:
            return memoryview(coming.whole)
        self._reserved -= len(placed.memory)
        if self._placed.get(stream) is placed:
            del self._placed[stream]
        return placed.memory


def _add(coming: _Coming, payload: Payload, *, last: bool) -> None:
    """Add a piece.  Raises PeerError if there is more or less than was said."""
    at = coming.size
    coming.pieces += 1
    coming.size += len(payload)
    if coming.placed is None:
        coming.whole += payload
        return
    total = len(coming.placed.memory)
    if coming.size > total or (last and coming.size < total):
        raise PeerError(f"{coming.size} bytes came in pieces, expected {total}")
    coming.placed.put(payload, at)
