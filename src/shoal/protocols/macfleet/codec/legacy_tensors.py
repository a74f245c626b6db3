"""Tensors and compressed gradients in the layouts of MacFleet's first version.

The document describes COMPRESSED_GRADIENT frames by them; no program is known to send
any.  A tensor::

    message type u32 | dtype u32 | dimensions u32 | bytes u32 | each dimension u32
    | numbers

A compressed gradient has the largest numbers of an array, and where they are::

    5 u32 | dtype u32 | 0 u32 | bytes u32 | size u32 | count u32 | dtype u32
    | count indices i32 | count numbers float16

The integers of the header are big-endian; indices and numbers are little-endian.
"""

import struct
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, FrameType, Payload

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

DIMENSIONS_MAX = 64  # NumPy's limit
NUMBERS_MAX = 2_000_000_000  # of a gradient, as in MacFleet's programs

_HEAD = struct.Struct("!4I")
_SPARSE_HEAD = struct.Struct("!7I")
_ENTRY_SIZE = 6  # bytes: an index and a number

_CODES: Mapping[str, int] = {
    "float32": 0,
    "float16": 1,
    "float64": 2,
    "int32": 3,
    "int64": 4,
    "int16": 5,
    "int8": 6,
    "uint8": 7,
    "bfloat16": 8,
}
_NAMES = {code: name for name, code in _CODES.items()}
# The numbers of a bfloat16 tensor travel as float16, and are called so.
_TENSOR_NAMES = {code: name for code, name in _NAMES.items() if name != "bfloat16"}
_TENSOR_TYPES = (FrameType.TENSOR, FrameType.GRADIENT)


class SparseTensor(NamedTuple):
    """``values`` (float16) at ``indices`` (int32) of a flat array of ``size`` numbers.

    ``dtype`` is the name of the array's own, of which NumPy lacks bfloat16.
    """

    indices: "Array"
    values: "Array"
    size: int
    dtype: str = "float32"


def encode_tensor(array: "Array", type: FrameType = FrameType.GRADIENT) -> bytes:
    """Return a tensor's layout.

    Raises InvalidRequest for a dtype without a code, and TooLarge.
    """
    code = _CODES.get(array.dtype.name)
    if code is None:
        raise InvalidRequest(f"a tensor of {array.dtype} has no code: use astype")
    shape = struct.pack(f"!{array.ndim}I", *array.shape)
    head = _HEAD.pack(type, code, array.ndim, array.nbytes) + shape
    if len(head) + array.nbytes > PAYLOAD_MAX:
        raise TooLarge(f"a tensor of {array.nbytes} bytes exceeds {PAYLOAD_MAX}")
    return head + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_tensor(payload: Payload) -> tuple[FrameType, "Array"]:
    """Return a tensor's message type, and a read-only view of its numbers.

    Raises PeerError if it is malformed.
    """
    import numpy as np

    if len(payload) < _HEAD.size:
        raise PeerError(f"a tensor of {len(payload)} bytes has no header")
    type, code, dimensions, size = _HEAD.unpack_from(payload)
    name = _TENSOR_NAMES.get(code)
    if type not in _TENSOR_TYPES or name is None:
        raise PeerError(f"a tensor of message type {type} and dtype code {code}")
    begin = _HEAD.size + 4 * dimensions
    if dimensions > DIMENSIONS_MAX or begin + size != len(payload):
        raise PeerError(
            f"a tensor of {dimensions} dimensions and {size} bytes in a payload of "
            f"{len(payload)} bytes"
        )
    shape = struct.unpack_from(f"!{dimensions}I", payload, _HEAD.size)
    dtype = np.dtype(name).newbyteorder("<")
    if prod(shape) * dtype.itemsize != size:
        raise PeerError(f"a tensor of {name} and shape {shape} in {size} bytes")
    try:
        view = memoryview(payload).toreadonly()
        return FrameType(type), np.ndarray(shape, dtype, view, begin)
    except ValueError as error:
        raise PeerError(f"a tensor of shape {shape}: {error}") from error


def encode_sparse(tensor: SparseTensor) -> bytes:
    """Return a compressed gradient's layout.

    Numbers beyond float16's range become infinite, as in MacFleet's programs.

    Raises InvalidRequest for a dtype without a code, and for arrays that
    ``decode_sparse`` would reject.
    """
    import numpy as np

    code = _CODES.get(tensor.dtype)
    count = tensor.values.size
    if code is None:
        raise InvalidRequest(f"a gradient of {tensor.dtype} has no code")
    if count != tensor.indices.size or tensor.size > NUMBERS_MAX:
        raise InvalidRequest(
            f"{count} numbers at {tensor.indices.size} places of {tensor.size}: "
            f"expected as many, and {NUMBERS_MAX} at most"
        )
    if (problem := _misplaced(tensor.indices, tensor.size)) is not None:
        raise InvalidRequest(problem)
    with np.errstate(over="ignore"):
        values = tensor.values.astype("<f2")
    head = _SPARSE_HEAD.pack(
        FrameType.COMPRESSED_GRADIENT,
        code,
        0,
        count * _ENTRY_SIZE,
        tensor.size,
        count,
        code,
    )
    return head + tensor.indices.astype("<i4").tobytes() + values.tobytes()


def decode_sparse(payload: Payload) -> SparseTensor:
    """Return a compressed gradient, as read-only views of the payload.

    Nothing of its announced size is allocated.

    Raises PeerError if it is malformed, or an index is out of range or repeated.
    """
    import numpy as np

    if len(payload) < _SPARSE_HEAD.size:
        raise PeerError(f"a compressed gradient of {len(payload)} bytes has no header")
    type, code, dimensions, nbytes, size, count, again = _SPARSE_HEAD.unpack_from(
        payload
    )
    name = _NAMES.get(code)
    if type != FrameType.COMPRESSED_GRADIENT or dimensions or name is None:
        raise PeerError(
            f"a compressed gradient of message type {type}, dtype code {code} and "
            f"{dimensions} dimensions"
        )
    if again != code:
        raise PeerError(f"a compressed gradient of the dtype codes {code} and {again}")
    if count > size or size > NUMBERS_MAX:
        raise PeerError(
            f"a compressed gradient of {count} of {size} numbers; the limit is "
            f"{NUMBERS_MAX}"
        )
    found = len(payload) - _SPARSE_HEAD.size
    if not nbytes == found == count * _ENTRY_SIZE:
        raise PeerError(
            f"{count} numbers of a compressed gradient in {nbytes} bytes, of which "
            f"{found} were received"
        )
    view = memoryview(payload).toreadonly()
    indices = np.frombuffer(view, "<i4", count, _SPARSE_HEAD.size)
    values = np.frombuffer(view, "<f2", count, _SPARSE_HEAD.size + indices.nbytes)
    if (problem := _misplaced(indices, size)) is not None:
        raise PeerError(problem)
    return SparseTensor(indices, values, size, name)


def _misplaced(indices: "Array", size: int) -> str | None:
    """Return what is wrong with indices into ``size`` numbers; None: nothing."""
    import numpy as np

    if not indices.size:
        return None
    ordered = np.sort(indices)
    if ordered[0] < 0 or ordered[-1] >= size:
        return f"indices from {ordered[0]} to {ordered[-1]} of {size} numbers"
    if (ordered[1:] == ordered[:-1]).any():
        return "an index that is repeated"
    return None
