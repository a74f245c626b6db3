"""Frame types that MacFleet reserves and only Shoal nodes send to each other.

HEARTBEAT keeps a connection alive, and STATE carries a blob.  A blob is identified by
its SHA-256 digest, which precedes it.  It is hashed chunk by chunk as it arrives:
hashing the largest at once would block the event loop for a sixth of a second.
"""

from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import SendBlob
from shoal.protocols.macfleet.codec.chunks import CHUNK_SIZE
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import (
    DEFAULT_STREAM,
    Frame,
    FrameType,
    Payload,
)
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.seam.session import Output

if TYPE_CHECKING:
    pass

T = TypeVar("T")

DIGEST_SIZE = 32  # bytes, of SHA-256
SMALL_PAYLOAD_MAX = 4096  # bytes of a heartbeat, a barrier or an array's label

Count = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=256)]


class HeartbeatPayload(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat: its own number, and that of the last one received from the peer."""

    number: Count
    last_received: Annotated[
        Count, Unread("the heartbeat itself is the sign of life")
    ] = 0


_encode = msgspec.msgpack.Encoder().encode
_heartbeat = msgspec.msgpack.Decoder(HeartbeatPayload)


def encode_heartbeat(heartbeat: HeartbeatPayload) -> bytes:
    """Encode the payload of a HEARTBEAT frame."""
    return _encode(heartbeat)


def decode_heartbeat(payload: Payload) -> HeartbeatPayload:
    """Decode the payload of a HEARTBEAT frame.

    Raises PeerError if it is malformed.
    """
    return _decode(_heartbeat, payload) if payload else HeartbeatPayload(0)


def decode_blob(payload: Payload, *, check: bool = True) -> tuple[bytes, memoryview]:
    """Decode a whole STATE payload: a blob's SHA-256 digest, and the blob.

    Without ``check`` the caller has to verify the digest: hashing the largest blob
    takes half a second.

    Raises PeerError if the payload has no digest, or the digest is wrong.
    """
    view = memoryview(payload)
    digest, blob = bytes(view[:DIGEST_SIZE]), view[DIGEST_SIZE:]
    if len(digest) < DIGEST_SIZE:
        raise PeerError(f"a blob payload of {len(payload)} bytes has no digest")
    if check and sha256(blob).digest() != digest:
        raise PeerError(f"a blob does not match its digest {digest.hex()}")
    return digest, blob


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: Payload) -> T:
    if len(payload) > SMALL_PAYLOAD_MAX:
        raise PeerError(f"{len(payload)} bytes exceed the limit of {SMALL_PAYLOAD_MAX}")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"frame: {error}") from error


BLOB_REFERENCE = b"\xc7\x20\x02"
"""The start of a blob reference in a value: MessagePack ext, 32 bytes, type 2."""


def may_reference_blob(*parts: Payload) -> bool:
    """Say whether a payload may reference a blob, and so must not overtake it.

    Large payloads are not searched: they are sent in order anyway.
    """
    if sum(map(len, parts)) > CHUNK_SIZE:
        return True
    return any(BLOB_REFERENCE in bytes(part) for part in parts)


def write_blob(command: SendBlob, writer: FrameWriter) -> Output:
    """Return the frames of a blob, in chunks if it is large."""
    if len(command.data) + DIGEST_SIZE > CHUNK_SIZE:
        return writer.write_chunks(
            FrameType.STATE, command.digest, command.data, stream=writer.new_stream()
        )
    payload = command.digest + bytes(command.data)
    return writer.write(FrameType.STATE, payload, DEFAULT_STREAM, in_order=True)


class _PartialBlob:
    __slots__ = ("digest", "hash")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.hash = sha256()


class IncomingBlobs:
    """The blobs that are being received, by frame stream."""

    def __init__(self) -> None:
        self._partial: dict[int, _PartialBlob] = {}

    def add_chunk(self, frame: Frame) -> None:
        """Hash a chunk, which ``ChunkJoiner`` has accepted.

        Raises PeerError if the first chunk of a blob has no digest.
        """
        data = memoryview(frame.payload)
        partial = self._partial.get(frame.stream)
        if partial is None:
            if len(data) < DIGEST_SIZE:
                raise PeerError("a blob has no digest before it")
            partial = _PartialBlob(bytes(data[:DIGEST_SIZE]))
            self._partial[frame.stream] = partial
            data = data[DIGEST_SIZE:]
        partial.hash.update(data)

    def complete(self, frame: Frame) -> SendBlob:
        """Return a completely received blob.

        Raises PeerError if it does not match its digest.
        """
        partial = self._partial.pop(frame.stream, None)
        if partial is None:
            return SendBlob(*decode_blob(frame.payload))
        if partial.hash.digest() != partial.digest:
            raise PeerError(f"a blob does not match its digest {partial.digest.hex()}")
        return SendBlob(*decode_blob(frame.payload, check=False))
