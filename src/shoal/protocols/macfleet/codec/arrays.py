"""Arrays in GRADIENT frames: a header, then the numbers, without a copy.

Source: MacFleet's own programs (the document does not describe the format)::

    size of the dtype u16 | dimensions u16 | each u32 | dtype | numbers

All integers are big-endian; the numbers are in the dtype's byte order, in C order.
NumPy accepts more dtype names than are safe to read from a stranger (records,
subarrays, Python objects), so a pattern selects the names that are read.  MacFleet's
own programs put each array into one frame, and their collectives tell arrays apart by
order alone; between Shoal nodes a large array travels in chunks.
"""

import re
import struct
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Frame, FrameType, Payload
from shoal.protocols.seam.session import Bulk, Send

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ARRAY_HEADER = struct.Struct("!HH")
DIMENSIONS_MAX = 64  # as many as NumPy has
DTYPE_NAME_MAX = 64  # characters of a type's name

_DTYPE = re.compile(
    r"bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256)"
    r"|(?:datetime64|timedelta64)(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>=|]?(?:[?bBhHiIlLqQefdgFDG]|b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)"
    r"|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)"
)
"""The names of types that hold nothing but numbers, letters, bytes and times."""


def encode_array(array: "Array") -> tuple[bytes, memoryview]:
    """Return the head of an array of any shape, and its numbers as bytes.

    They are the array's own memory, if it is in C order, and a copy if not.

    Raises InvalidRequest for a type that cannot be written, and TooLarge.
    """
    import numpy as np

    name = str(array.dtype)
    if len(name) > DTYPE_NAME_MAX or _DTYPE.fullmatch(name) is None:
        raise InvalidRequest(
            f"an array of {name} cannot be sent: convert it to numbers, with astype"
        )
    label = name.encode()
    shape = struct.pack(f"!{array.ndim}I", *array.shape)
    head = ARRAY_HEADER.pack(len(label), array.ndim) + shape + label
    if len(head) + array.nbytes > PAYLOAD_MAX:
        raise TooLarge(
            f"an array of {array.nbytes} bytes exceeds the limit of {PAYLOAD_MAX} with "
            "its head: send it in several"
        )
    if not array.nbytes:
        return head, memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    return head, flat.view(np.uint8).data


def decode_array(payload: Payload) -> "Array":
    """Return the array in a payload: a view of it, which can be written if that can be.

    Raises PeerError if it is no array, of a type that is not taken, or not of the size
    that its shape says.
    """
    import numpy as np

    if len(payload) < ARRAY_HEADER.size:
        raise PeerError(f"an array in {len(payload)} bytes")
    label, dimensions = ARRAY_HEADER.unpack_from(payload)
    begin = ARRAY_HEADER.size + 4 * dimensions + label
    if dimensions > DIMENSIONS_MAX or label > DTYPE_NAME_MAX or begin > len(payload):
        raise PeerError(
            f"an array of {dimensions} dimensions with a type's name of {label} "
            f"characters in {len(payload)} bytes"
        )
    shape = struct.unpack_from(f"!{dimensions}I", payload, ARRAY_HEADER.size)
    name = bytes(payload[begin - label : begin]).decode("ascii", "replace")
    if _DTYPE.fullmatch(name) is None:
        raise PeerError(f"an array of {name!r}, which is no type that is taken")
    try:
        dtype = np.dtype(name)
        wanted = prod(shape) * dtype.itemsize
        if wanted != len(payload) - begin:
            raise PeerError(
                f"an array of {name} and shape {shape} has {wanted} bytes, and "
                f"{len(payload) - begin} came"
            )
        return np.ndarray(shape, dtype, payload, begin)
    except (TypeError, ValueError, OverflowError) as error:
        raise PeerError(f"an array of {name} and shape {shape}: {error}") from error


def write_array_frame(array: "Array", writer: FrameWriter) -> Send | Bulk:
    """Return how an array of any shape goes out.

    A large one is read from its own memory while it is written, if it is in C order:
    until then it must not change.

    Raises InvalidRequest for a type that cannot be written, and TooLarge beyond what
    real peers take: 256 MiB with its head.
    """
    return writer.write_parts(FrameType.GRADIENT, *encode_array(array))


def read_array_frame(frame: Frame) -> "Array":
    """Return the array in a frame: a view of what was received, without a copy.

    A large one can be worked on in place; a small one may be read-only.  It need not be
    aligned, for the head before it has any length.

    Raises PeerError if the frame is of another type, or holds no array.
    """
    if frame.type is not FrameType.GRADIENT:
        raise PeerError(f"{frame.type.name} came, where an array was expected")
    return decode_array(frame.payload)
