"""Joins tasks and results that arrive in chunks, as the document has them.

The chunks of a payload are on one stream, in order of the sequence, which may begin
with any number; the last is flagged.  Other frames may come between them.  Neither
upstream nor Shoal sends any.
"""

from dataclasses import dataclass, field

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Flag, Frame, FrameType

STREAMS_MAX = 16  # chunked payloads in progress at the same time
BUFFERED_MAX = PAYLOAD_MAX  # bytes of them together
CHUNK_TIMEOUT = 120.0  # seconds between chunks, as upstream waits for a frame
SEQUENCES = 1 << 32  # after the last, a stream's sequence is 0 again

# IntFlag operations cost a microsecond a frame.
_LAST = int(Flag.LAST)
_CHUNK_FLAGS = int(Flag.CHUNKED | Flag.LAST)
_COMPRESSED = int(Flag.COMPRESSED)


@dataclass(slots=True)
class _PartialPayload:
    """``sequence`` is that of the next chunk, and ``due`` when it has to arrive."""

    type: FrameType
    sequence: int
    due: float = 0.0
    buffer: bytearray = field(default_factory=bytearray)


class ChunkJoiner:
    """Joins the chunks of several payloads at a time, in bounded memory."""

    def __init__(self) -> None:
        self._partial: dict[int, _PartialPayload] = {}  # by stream, the next due first
        self._buffered = 0  # bytes

    @property
    def deadline(self) -> float | None:
        """When the first missing chunk is late; None: none is missing."""
        return next((each.due for each in self._partial.values()), None)

    def late_reason(self, now: float) -> str:
        """Return which chunk is late; empty: none."""
        for stream, partial in self._partial.items():
            if now < partial.due:
                break
            return (
                f"the next chunk on stream {stream} did not arrive within "
                f"{CHUNK_TIMEOUT:g} s"
            )
        return ""

    def join(self, frame: Frame, now: float) -> Frame | None:
        """Return a whole frame, or the frame whose last chunk this is; None: neither.

        Raises PeerError for a compressed frame, and for a chunk out of order or of
        another type than the first, and LimitExceeded.
        """
        type, stream, flags, sequence, payload, dropped = frame
        if not flags & (_CHUNK_FLAGS | _COMPRESSED):
            return frame
        if flags & _COMPRESSED:
            raise PeerError(
                f"a compressed {type.name} frame: tasks and results have to be "
                "sent uncompressed"
            )
        if dropped:
            raise LimitExceeded("chunk", len(payload) + dropped, PAYLOAD_MAX)
        partial = self._partial.pop(stream, None)
        if partial is None:
            if len(self._partial) >= STREAMS_MAX:
                raise PeerError(f"more than {STREAMS_MAX} chunked payloads at once")
            partial = _PartialPayload(type, sequence)
        if sequence != partial.sequence or type is not partial.type:
            raise PeerError(
                f"chunk {sequence} ({type.name}) on stream {stream}, expected chunk "
                f"{partial.sequence} ({partial.type.name})"
            )
        self._buffered += len(payload)
        if self._buffered > BUFFERED_MAX:
            raise LimitExceeded("chunked payloads", self._buffered, BUFFERED_MAX)
        partial.buffer += payload
        partial.sequence = (sequence + 1) % SEQUENCES
        partial.due = now + CHUNK_TIMEOUT
        if not flags & _LAST:
            self._partial[stream] = partial
            return None
        self._buffered -= len(partial.buffer)
        return Frame(type, stream, flags & ~_CHUNK_FLAGS, 0, memoryview(partial.buffer))
