"""Payloads of the types of frames that the document has and real peers never send.

HEARTBEAT says that a connection is alive, STATE carries a blob, BARRIER waits until
everybody has come to the same point, and TENSOR is an array with a name.  Between our
own peers only.
"""

import struct
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.wire.arrays import pack_array, unpack_array
from shoal.protocols.macfleet.wire.frames import Payload

if TYPE_CHECKING:
    from shoal.protocols.macfleet.wire.arrays import Array

T = TypeVar("T")

DIGEST_SIZE = 32  # bytes, of SHA-256
PAYLOAD_SMALL = 4096  # bytes: no heartbeat, barrier or name of an array has more

Count = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=256)]


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat: the number of this one, and of the last that came from the peer."""

    number: Count
    heard: Count = 0


class Barrier(msgspec.Struct, frozen=True, array_like=True):
    """A rank has come to a step of something that has a name, and waits there.

    ``passed`` is the answer: all have come.
    """

    name: Name
    step: Count
    rank: Count
    passed: bool = False


class Label(msgspec.Struct, frozen=True, array_like=True):
    """What an array is, and of which step."""

    name: Name
    step: Count = 0


class Tensor(NamedTuple):
    """An array with its label."""

    label: Label
    array: "Array"


_SIZE = struct.Struct("!H")

_encode = msgspec.msgpack.Encoder().encode
_beat = msgspec.msgpack.Decoder(Beat)
_barrier = msgspec.msgpack.Decoder(Barrier)
_label = msgspec.msgpack.Decoder(Label)


def write_beat(beat: Beat) -> bytes:
    """Return the payload of a HEARTBEAT frame."""
    return _encode(beat)


def read_beat(payload: Payload) -> Beat:
    """Read the payload of a HEARTBEAT frame; real peers' would be empty.

    Raises PeerError if it is none.
    """
    return _read(_beat, payload) if payload else Beat(0)


def write_barrier(barrier: Barrier) -> bytes:
    """Return the payload of a BARRIER frame."""
    return _encode(barrier)


def read_barrier(payload: Payload) -> Barrier:
    """Read the payload of a BARRIER frame.  Raises PeerError if it is none."""
    return _read(_barrier, payload)


def write_tensor(label: Label, array: "Array") -> tuple[bytes, memoryview]:
    """Return the head of a TENSOR frame's payload, and its numbers without a copy.

    Raises as ``pack_array`` does.
    """
    said = _encode(label)
    head, numbers = pack_array(array)
    return _SIZE.pack(len(said)) + said + head, numbers


def read_tensor(payload: Payload) -> Tensor:
    """Read the payload of a TENSOR frame; the array looks into it.

    Raises PeerError if it is none.
    """
    if len(payload) < _SIZE.size:
        raise PeerError("an array without a label")
    (size,) = _SIZE.unpack_from(payload)
    view = memoryview(payload)
    begin = _SIZE.size + size
    label = _read(_label, view[_SIZE.size : begin])
    return Tensor(label, unpack_array(view[begin:]))


def read_blob(payload: Payload, *, check: bool = True) -> tuple[bytes, memoryview]:
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


def _read(decoder: msgspec.msgpack.Decoder[T], payload: Payload) -> T:
    if len(payload) > PAYLOAD_SMALL:
        raise PeerError(f"{len(payload)} bytes, where {PAYLOAD_SMALL} are the limit")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"frame: {error}") from error
