"""Arrays as they follow each other in GRADIENT frames: a head, and the numbers in it.

Source: real peers (the document does not say)::

    size of the type's name u16 | dimensions u16 | each u32 | name of the type | numbers

all big-endian but the numbers, which are as the type says, in C order.  NumPy reads
more names of types than are safe to read from a stranger: fields, pictures of other
types, Python's objects.  So names are taken by a pattern.
"""

import re
import struct
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet.wire.frames import PAYLOAD_MAX, Payload

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

HEAD = struct.Struct("!HH")
DIMENSIONS_MAX = 64  # as many as NumPy has
NAME_MAX = 64  # characters of a type's name

_NAMED = re.compile(
    r"bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256)"
    r"|(?:datetime64|timedelta64)(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>=|]?(?:[?bBhHiIlLqQefdgFDG]|b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)"
    r"|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)"
)
"""The names of types that hold nothing but numbers, letters, bytes and times."""


def pack_array(array: "Array") -> tuple[bytes, memoryview]:
    """Return the head of an array of any shape, and its numbers as bytes.

    They are the array's own memory, if it is in C order, and a copy if not.

    Raises InvalidRequest for a type that cannot be written, and TooLarge.
    """
    import numpy as np

    name = str(array.dtype)
    if len(name) > NAME_MAX or _NAMED.fullmatch(name) is None:
        raise InvalidRequest(
            f"an array of {name} cannot be sent: convert it to numbers, with astype"
        )
    label = name.encode()
    shape = struct.pack(f"!{array.ndim}I", *array.shape)
    head = HEAD.pack(len(label), array.ndim) + shape + label
    if len(head) + array.nbytes > PAYLOAD_MAX:
        raise TooLarge(
            f"an array of {array.nbytes} bytes exceeds the limit of {PAYLOAD_MAX} with "
            "its head: send it in several"
        )
    if not array.nbytes:
        return head, memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    return head, flat.view(np.uint8).data


def unpack_array(payload: Payload) -> "Array":
    """Return the array in a payload: a view of it, which can be written if that can be.

    Raises PeerError if it is no array, of a type that is not taken, or not of the size
    that its shape says.
    """
    import numpy as np

    if len(payload) < HEAD.size:
        raise PeerError(f"an array in {len(payload)} bytes")
    label, dimensions = HEAD.unpack_from(payload)
    begin = HEAD.size + 4 * dimensions + label
    if dimensions > DIMENSIONS_MAX or label > NAME_MAX or begin > len(payload):
        raise PeerError(
            f"an array of {dimensions} dimensions with a type's name of {label} "
            f"characters in {len(payload)} bytes"
        )
    shape = struct.unpack_from(f"!{dimensions}I", payload, HEAD.size)
    name = bytes(payload[begin - label : begin]).decode("ascii", "replace")
    if _NAMED.fullmatch(name) is None:
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
