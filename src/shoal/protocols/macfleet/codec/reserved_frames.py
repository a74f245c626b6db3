"""Frame types that MacFleet reserves and only Shoal nodes send to each other.

HEARTBEAT keeps a connection alive, STATE carries a blob, BARRIER waits until every rank
has reached the same step, and TENSOR is an array with a label.  A blob is named by its
SHA-256 digest, which precedes it; it is hashed chunk by chunk as it arrives, because
hashing the largest at once would block the event loop for a sixth of a second.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import SendBlob
from shoal.protocols.macfleet.codec.arrays import decode_array, encode_array
from shoal.protocols.macfleet.codec.chunks import CHUNK_SIZE
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import (
    DEFAULT_STREAM,
    Frame,
    FrameType,
    Payload,
)
from shoal.protocols.seam.session import Output

if TYPE_CHECKING:
    from shoal.protocols.macfleet.codec.arrays import Array

T = TypeVar("T")

DIGEST_SIZE = 32  # bytes, of SHA-256
SMALL_PAYLOAD_MAX = 4096  # bytes: no heartbeat, barrier or name of an array has more

Count = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=256)]


class HeartbeatPayload(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat: the number of this one, and of the last that came from the peer."""

    number: Count
    last_received: Count = 0


class Barrier(msgspec.Struct, frozen=True, array_like=True):
    """A rank has come to a step of something that has a name, and waits there.

    ``passed`` is the answer: all have come.
    """

    name: Name
    step: Count
    rank: Count
    passed: bool = False


class TensorLabel(msgspec.Struct, frozen=True, array_like=True):
    """What an array is, and of which step."""

    name: Name
    step: Count = 0


class Tensor(NamedTuple):
    """An array with its label."""

    label: TensorLabel
    array: "Array"


_SIZE = struct.Struct("!H")

_encode = msgspec.msgpack.Encoder().encode
_heartbeat = msgspec.msgpack.Decoder(HeartbeatPayload)
_barrier = msgspec.msgpack.Decoder(Barrier)
_label = msgspec.msgpack.Decoder(TensorLabel)


def encode_heartbeat(heartbeat: HeartbeatPayload) -> bytes:
    """Return the payload of a HEARTBEAT frame."""
    return _encode(heartbeat)


def decode_heartbeat(payload: Payload) -> HeartbeatPayload:
    """Read the payload of a HEARTBEAT frame; real peers' would be empty.

    Raises PeerError if it is none.
    """
    return _decode(_heartbeat, payload) if payload else HeartbeatPayload(0)


def encode_barrier(barrier: Barrier) -> bytes:
    """Return the payload of a BARRIER frame."""
    return _encode(barrier)


def decode_barrier(payload: Payload) -> Barrier:
    """Read the payload of a BARRIER frame.  Raises PeerError if it is none."""
    return _decode(_barrier, payload)


def encode_tensor(label: TensorLabel, array: "Array") -> tuple[bytes, memoryview]:
    """Return the head of a TENSOR frame's payload, and its numbers without a copy.

    Raises as ``encode_array`` does.
    """
    said = _encode(label)
    head, numbers = encode_array(array)
    return _SIZE.pack(len(said)) + said + head, numbers


def decode_tensor(payload: Payload) -> Tensor:
    """Read the payload of a TENSOR frame; the array looks into it.

    Raises PeerError if it is none.
    """
    if len(payload) < _SIZE.size:
        raise PeerError("an array without a label")
    (size,) = _SIZE.unpack_from(payload)
    view = memoryview(payload)
    begin = _SIZE.size + size
    label = _decode(_label, view[_SIZE.size : begin])
    return Tensor(label, decode_array(view[begin:]))


def decode_blob(payload: Payload, *, check: bool = True) -> tuple[bytes, memoryview]:
    """Read a whole STATE payload: a blob's SHA-256 digest, and the blob after it.

    Without ``check`` somebody else has to see that they belong together: hashing takes
    half a second for what is largest.

    Raises PeerError if there is none, or it is another.
    """
    view = memoryview(payload)
    digest, blob = bytes(view[:DIGEST_SIZE]), view[DIGEST_SIZE:]
    if len(digest) < DIGEST_SIZE:
        raise PeerError(f"a blob in {len(payload)} bytes has no digest before it")
    if check and sha256(blob).digest() != digest:
        raise PeerError(f"a blob is not what its digest says: {digest.hex()}")
    return digest, blob


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: Payload) -> T:
    if len(payload) > SMALL_PAYLOAD_MAX:
        raise PeerError(
            f"{len(payload)} bytes, where {SMALL_PAYLOAD_MAX} are the limit"
        )
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"frame: {error}") from error


if TYPE_CHECKING:
    from hashlib import _Hash

BLOB_REFERENCE = b"\xc7\x20\x02"
"""How a blob's name begins among values: MessagePack's ext, 32 bytes, of type 2."""


def may_reference_blob(*parts: Payload) -> bool:
    """Say whether a blob may be named in a payload, so that it has to come before.

    Of a large one it is not asked: all large ones go in turn.
    """
    if sum(map(len, parts)) > CHUNK_SIZE:
        return True
    return any(BLOB_REFERENCE in bytes(part) for part in parts)


def write_blob(command: SendBlob, writer: FrameWriter) -> Output:
    """Return how a blob goes to one of ours: in pieces, between which others go."""
    if len(command.data) + DIGEST_SIZE > CHUNK_SIZE:
        return writer.write_chunks(
            FrameType.STATE, command.digest, command.data, stream=writer.new_stream()
        )
    payload = command.digest + bytes(command.data)
    return writer.write(FrameType.STATE, payload, DEFAULT_STREAM, in_order=True)


@dataclass(slots=True)
class _PartialBlob:
    digest: bytes
    hash: "_Hash" = field(default_factory=hashlib.sha256)


class IncomingBlobs:
    """The blobs that are on their way to us, by stream."""

    def __init__(self) -> None:
        self._partial: dict[int, _PartialBlob] = {}

    def add_chunk(self, frame: Frame) -> None:
        """Take note of a piece, which was found to be the next one of its stream.

        Raises PeerError if a blob begins without its digest.
        """
        data = memoryview(frame.payload)
        coming = self._partial.get(frame.stream)
        if coming is None:
            if len(data) < DIGEST_SIZE:
                raise PeerError("a blob has no digest before it")
            coming = _PartialBlob(bytes(data[:DIGEST_SIZE]))
            self._partial[frame.stream] = coming
            data = data[DIGEST_SIZE:]
        coming.hash.update(data)

    def complete(self, frame: Frame) -> SendBlob:
        """Return a blob that is whole.

        Raises PeerError if it is another than its digest says.
        """
        coming = self._partial.pop(frame.stream, None)
        if coming is None:
            return SendBlob(*decode_blob(frame.payload))
        if coming.hash.digest() != coming.digest:
            raise PeerError(
                f"a blob is not what its digest says: {coming.digest.hex()}"
            )
        return SendBlob(*decode_blob(frame.payload, check=False))
