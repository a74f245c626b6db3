"""Large payloads in pieces, so that small frames need not wait for them.

Between our own peers only: the document has the flags, and real peers do not read them.
The pieces of a payload are on a stream of their own, counted from 0 by the sequence;
the last is flagged as such.  Other frames may come between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.wire.frames import (
    PAYLOAD_MAX,
    Flag,
    Frame,
    FrameType,
    Payload,
)

CHUNK = 256 << 10  # bytes: what is larger is sent in pieces of that
STREAMS_MAX = 16  # payloads that may be on their way at the same time
HELD_MAX = 2 * PAYLOAD_MAX  # bytes of them together

_CHUNKED = int(Flag.CHUNKED)
_LAST = int(Flag.CHUNKED | Flag.LAST)


def split(
    type: FrameType, stream: int, *parts: Payload, flags: int = 0
) -> Iterator[Frame]:
    """Cut a payload into frames, whose payloads look into it.

    It may have several parts, one after the other: no frame has bytes of two of them.
    """
    pieces = [
        memoryview(part)[at : at + CHUNK]
        for part in parts
        for at in range(0, len(part), CHUNK)
    ] or [memoryview(b"")]
    for sequence, piece in enumerate(pieces):
        flag = _LAST if sequence == len(pieces) - 1 else _CHUNKED
        yield Frame(type, stream, flags | flag, sequence, piece)


@dataclass(slots=True)
class _Coming:
    type: FrameType
    pieces: int = 0
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
            coming = self._coming[stream] = _Coming(type)
        if sequence != coming.pieces or type is not coming.type:
            raise PeerError(
                f"piece {sequence} ({type.name}) on stream {stream}, expected piece "
                f"{coming.pieces} ({coming.type.name})"
            )
        size = len(coming.whole) + len(payload)
        if size > self._payload_max:
            raise LimitExceeded("payload in pieces", size, self._payload_max)
        self._held += len(payload)
        if self._held > self._held_max:
            raise LimitExceeded("payloads in pieces", self._held, self._held_max)
        coming.whole += payload
        coming.pieces += 1
        if not flags & Flag.LAST:
            return None
        del self._coming[stream]
        self._held -= size
        return Frame(type, stream, flags & ~_LAST, 0, memoryview(coming.whole))
