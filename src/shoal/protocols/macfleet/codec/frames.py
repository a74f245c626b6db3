"""Frames of the transport port: a head of 24 bytes, and a payload that it vouches for.

Source: the MacFleet document, "Transport".  The checksum is that of zlib and Ethernet
(CRC-32, IEEE 802.3), of the payload alone.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import LimitExceeded, PeerError, TooLarge
from shoal.protocols.seam.framing import OTHER_PROTOCOLS, FramedMessage

try:
    from isal.isal_zlib import crc32 as crc32  # many times as fast
except ImportError:  # there is none for this processor
    from zlib import crc32 as crc32

Payload: TypeAlias = bytes | bytearray | memoryview

HEADER = struct.Struct("!IHHIIII")
PAYLOAD_MAX = 256 << 20  # bytes: real peers take no more
DEFAULT_STREAM = 1  # what real peers write after the handshake, whatever it is about

_SIZE = struct.Struct("!H2xI").unpack_from  # type and size, from byte 4 on
_pack = HEADER.pack
_unpack = HEADER.unpack


class FrameType(IntEnum):
    """What a frame is about."""

    CONTROL = 1  # the handshake; between our peers also whatever has no type
    TENSOR = 2
    HEARTBEAT = 3
    GRADIENT = 4
    COMPRESSED_GRADIENT = 5
    BARRIER = 6
    STATE = 7
    TASK = 8
    RESULT = 9


class Flag(IntFlag):
    """What else a frame says about itself; real peers only know ``V2``."""

    COMPRESSED = 1
    CHUNKED = 2
    LAST = 4
    V2 = 8  # the handshake that tells the hardware
    STRONG = 16  # ours, which real peers ignore


class Frame(NamedTuple):
    """A frame.  ``flags`` are those of ``Flag``, and others that nobody knows."""

    type: FrameType
    stream: int
    flags: int
    sequence: int
    payload: Payload


_TYPES: tuple[FrameType | None, ...] = (None, *FrameType)


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as one piece, which copies the payload: for small ones."""
    kind, stream, flags, sequence, payload = frame
    return frame_header(kind, payload, stream, flags, sequence) + payload


def frame_header(
    type: FrameType,
    payload: Payload,
    stream: int = DEFAULT_STREAM,
    flags: int = 0,
    sequence: int = 0,
) -> bytes:
    """Return what goes before a payload.

    Raises TooLarge if real peers would not take it.
    """
    size = len(payload)
    crc = crc32(payload) if size <= PAYLOAD_MAX else 0
    return encode_header(type, size, crc, stream, flags, sequence)


def encode_header(
    type: FrameType,
    size: int,
    crc: int,
    stream: int = DEFAULT_STREAM,
    flags: int = 0,
    sequence: int = 0,
    remaining: int = 0,
) -> bytes:
    """Return what goes before a payload of which these are size and checksum.

    ``remaining`` is for pieces: how many bytes come with this one and after it.  It
    stands where the document has nothing yet, and real peers do not look.

    Raises TooLarge if real peers would not take it.
    """
    if size > PAYLOAD_MAX:
        raise TooLarge(
            f"a frame of {size} bytes exceeds the limit of {PAYLOAD_MAX}: send it in "
            "several"
        )
    return _pack(stream, type, flags, size, sequence, crc, remaining)


class FrameReader:
    """Reads frames, whole ones or out of a byte stream.

    ``limit`` is how many bytes of payload are taken, now: a session takes few from
    peers that it does not know yet.  Memory is bounded by that plus one read.
    """

    head_size = HEADER.size

    def __init__(self, limit: int = PAYLOAD_MAX) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._missing = 0  # bytes until it is of use to look at what is held

    def body_size(self, head: bytes) -> int:
        """Return how many bytes of payload follow a head.

        Raises LimitExceeded, and PeerError if the frame is of no type that there is:
        refused before it is held, for both are the peer's word, not a fact.
        """
        kind: int
        size: int
        kind, size = _SIZE(head, 4)
        if size > self.limit or not 0 < kind < len(_TYPES):
            raise _header_error(head, kind, size, self.limit)
        return size

    @staticmethod
    def checksum(piece: memoryview, so_far: int) -> int:
        """Return the checksum of a payload up to the end of a piece."""
        return crc32(piece, so_far)

    @staticmethod
    def read(whole: FramedMessage) -> Frame:
        """Return a frame whose head was taken by ``body_size``.

        Raises PeerError if the payload is not what was sent.
        """
        head, body, computed = whole
        stream, number, flags, size, sequence, checksum, _ = _unpack(head)
        kind = _TYPES[number]
        assert kind is not None, "refused by its head"
        if (crc32(body) if computed is None else computed) != checksum:
            raise PeerError(
                f"frame {sequence} on stream {stream} ({kind.name}, {size} bytes) "
                "fails its CRC32: something on the way changes what is sent"
            )
        return Frame(kind, stream, flags, sequence, body)

    def split(self, data: bytes) -> Iterator[FramedMessage]:
        """Take a piece of the stream; yield the frames that are whole with it.

        What is done with one may change the ``limit`` for the next.  Whoever does not
        take all of them loses the rest of the piece.

        Raises PeerError as ``body_size`` does, after what came before.
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
        while end - at >= HEADER.size:
            begin = at + HEADER.size
            head = data[at:begin]
            following = begin + self.body_size(head)
            if following > end:
                break
            at = following
            yield FramedMessage(head, view[begin:following])
        if at < end:
            self._missing = (
                following if end - at >= HEADER.size else at + HEADER.size
            ) - end
            self._buffer += view[at:]


def _header_error(head: bytes, kind: int, size: int, limit: int) -> PeerError:
    """Return what is wrong with a head, and what is more likely with its port."""
    for begin, other in OTHER_PROTOCOLS.items():
        if head.startswith(begin):
            return PeerError(f"{other} came, not a frame: for that take another port")
    if size > limit:
        return LimitExceeded("frame payload", size, limit)
    return PeerError(f"frame type {kind} is none of 1 to {len(_TYPES) - 1}")
