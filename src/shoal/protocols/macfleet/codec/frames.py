"""Frames of the transport port: a header of 24 bytes, and a payload with a checksum.

Source: the MacFleet document, "Transport".  The checksum is CRC-32 (IEEE 802.3, as in
zlib) of the payload alone.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError, TooLarge
from shoal.protocols.seam.framing import OTHER_PROTOCOLS, FramedMessage
from shoal.protocols.seam.session import Bulk, Send

try:
    from isal.isal_zlib import crc32 as crc32  # many times as fast
except ImportError:  # not available for this processor
    from zlib import crc32 as crc32

Payload: TypeAlias = bytes | bytearray | memoryview

HEADER = struct.Struct("!IHHIIII")
PAYLOAD_MAX = 256 << 20  # bytes: the limit of upstream
START_SIZE = 4 << 10  # bytes that are kept of a frame beyond the limit
DEFAULT_STREAM = 1  # of all upstream frames after the handshake
SEND_MAX = 256 << 10  # bytes of a payload that is copied into its frame
CHECKSUM_STEP = 1 << 20  # bytes of a payload whose checksum is computed at a time

_SIZE = struct.Struct("!H2xI").unpack_from  # type and size, from byte 4
_pack = HEADER.pack
_unpack = HEADER.unpack


class FrameType(IntEnum):
    """The types of frames."""

    CONTROL = 1  # the handshake
    TENSOR = 2
    HEARTBEAT = 3
    GRADIENT = 4
    COMPRESSED_GRADIENT = 5
    BARRIER = 6
    STATE = 7
    TASK = 8
    RESULT = 9


class Flag(IntFlag):
    """The flags of frames; upstream uses ``V2`` only."""

    COMPRESSED = 1
    CHUNKED = 2
    LAST = 4
    V2 = 8  # the handshake with hardware


class Frame(NamedTuple):
    """A frame.  ``flags`` may contain unknown ones.

    ``dropped`` is the number of bytes after the payload that were read and not kept.
    """

    type: FrameType
    stream: int
    flags: int
    sequence: int
    payload: Payload
    dropped: int = 0


_TYPES: tuple[FrameType | None, ...] = (None, *FrameType)


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as bytes, with a copy of the payload: for small ones."""
    kind, stream, flags, sequence, payload, _ = frame
    return frame_header(kind, payload, stream, flags, sequence) + payload


def frame_header(
    type: FrameType,
    payload: Payload,
    stream: int = DEFAULT_STREAM,
    flags: int = 0,
    sequence: int = 0,
) -> bytes:
    """Return the header for a payload.

    Raises TooLarge if it exceeds the limit of upstream.
    """
    size = len(payload)
    crc = crc32(payload) if size <= PAYLOAD_MAX else 0
    return encode_header(type, size, crc, stream, flags, sequence)


def encode_header(
    type: FrameType,
    size: int,
    checksum: int,
    stream: int = DEFAULT_STREAM,
    flags: int = 0,
    sequence: int = 0,
) -> bytes:
    """Return the header for a payload of this size and checksum.

    Raises TooLarge if the size exceeds the limit of upstream.
    """
    if size > PAYLOAD_MAX:
        raise TooLarge(
            f"a frame of {size} bytes exceeds the limit of {PAYLOAD_MAX}: split it"
        )
    return _pack(stream, type, flags, size, sequence, checksum, 0)


def write_frame(
    type: FrameType, *parts: bytes | memoryview, stream: int = DEFAULT_STREAM
) -> Send | Bulk:
    """Return the frame of a payload; large parts are not copied.

    The caller checks the size.
    """
    size = sum(map(len, parts))
    if size <= SEND_MAX:
        return Send(encode_frame(Frame(type, stream, 0, 0, b"".join(parts))))
    return Bulk(_large_frame(type, stream, parts), HEADER.size + size)


def _large_frame(
    type: FrameType, stream: int, parts: tuple[bytes | memoryview, ...]
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a frame, after the steps of its checksum."""
    crc = 0
    views = [memoryview(part) for part in parts]
    for view in views:
        for at in range(0, len(view), CHECKSUM_STEP):
            crc = crc32(view[at : at + CHECKSUM_STEP], crc)
            yield b""  # lets other frames go first
    yield encode_header(type, sum(map(len, views)), crc, stream)
    yield from views


class FrameReader:
    """Parses frames, whole ones or from a byte stream.

    ``limit`` is the current maximum of payload bytes: a session accepts little before
    the handshake.  Frames beyond it are an error, except those of the types in
    ``truncated``, of which the first ``START_SIZE`` bytes are kept and the rest is
    dropped.  Memory is bounded by the limit plus one read.
    """

    head_size = HEADER.size

    def __init__(self, limit: int = PAYLOAD_MAX) -> None:
        self.limit = limit
        self.truncated: frozenset[FrameType] = frozenset()
        self._truncated: _TruncatedFrame | None = None  # the one that is being read
        self._buffer = bytearray()
        self._missing = 0  # bytes until the buffer is worth parsing

    def body_size(self, head: bytes) -> int:
        """Return the payload size in a header.

        Raises LimitExceeded, or PeerError for an unknown type.  Both are checked before
        buffering: they are the peer's word, not a fact.
        """
        kind: int
        size: int
        kind, size = _SIZE(head, 4)
        if (size > self.limit and kind not in self.truncated) or not (
            0 < kind < len(_TYPES)
        ):
            raise _header_error(head, kind, size, self.limit)
        return size

    def is_truncated(self, head: bytes) -> bool:
        """Say whether only the start of a frame is kept, by its header."""
        size: int = _SIZE(head, 4)[1]
        return size > self.limit

    @staticmethod
    def checksum(piece: memoryview, so_far: int) -> int:
        """Return the checksum of a payload up to the end of a piece."""
        return crc32(piece, so_far)

    @staticmethod
    def read(whole: FramedMessage) -> Frame:
        """Return a frame whose header has passed ``body_size``.

        Raises PeerError if the checksum is wrong.
        """
        head, body, computed = whole
        stream, number, flags, size, sequence, checksum, _ = _unpack(head)
        kind = _TYPES[number]
        assert kind is not None, "body_size rejects unknown types"
        if (crc32(body) if computed is None else computed) != checksum:
            raise PeerError(
                f"frame {sequence} on stream {stream} ({kind.name}, {size} bytes) "
                "fails its CRC32: the data was corrupted in transit"
            )
        return Frame(kind, stream, flags, sequence, body, size - len(body))

    def split(self, data: bytes) -> Iterator[FramedMessage]:
        """Add bytes of the stream; yield the frames that are complete.

        Handling one may change the ``limit`` for the next.  A caller that does not
        exhaust the iterator loses the rest of the bytes.

        Raises PeerError as ``body_size`` does, after the frames before.
        """
        if self._buffer:
            self._buffer += data
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        at, end = 0, len(data)
        view = memoryview(data)
        while self._truncated is not None or end - at >= HEADER.size:
            if self._truncated is not None:
                at += self._truncated.add(view[at:])
                if self._truncated.missing:
                    return
                complete, self._truncated = self._truncated.message(), None
                yield complete
                continue
            begin = at + HEADER.size
            head = data[at:begin]
            size = self.body_size(head)
            following = begin + size
            if self.is_truncated(head):
                at, self._truncated = begin, _TruncatedFrame(head, size)
                continue
            if following > end:
                break
            at = following
            yield FramedMessage(head, view[begin:following])
        if at < end:
            self._missing = (
                following if end - at >= HEADER.size else at + HEADER.size
            ) - end
            self._buffer += view[at:]


class _TruncatedFrame:
    """A frame of which only the start is kept.

    ``missing`` is the number of its bytes that have not arrived.
    """

    def __init__(self, head: bytes, size: int) -> None:
        self.missing = size
        self._head = head
        self._start = bytearray()
        self._crc = 0

    def add(self, data: memoryview) -> int:
        """Add bytes of the stream; return how many belong to the frame."""
        piece = data[: self.missing]
        self._crc = crc32(piece, self._crc)
        self._start += piece[: START_SIZE - len(self._start)]
        self.missing -= len(piece)
        return len(piece)

    def message(self) -> FramedMessage:
        return FramedMessage(self._head, memoryview(self._start), self._crc)


def _header_error(head: bytes, kind: int, size: int, limit: int) -> PeerError:
    """Return what is wrong with a header, and a likely cause."""
    for begin, other in OTHER_PROTOCOLS.items():
        if head.startswith(begin):
            return PeerError(f"{other} instead of a frame: that needs another port")
    if size > limit:
        return LimitExceeded("frame payload", size, limit)
    return PeerError(f"frame type {kind}, expected 1 to {len(_TYPES) - 1}")
