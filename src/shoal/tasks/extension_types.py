"""MessagePack extension types, for values that MessagePack has no type for.

Arrays are ext 1 and their scalars ext 5, in NumPy's words; ext 4 is a pair of a tag and
what the value is made of.  Only our own peers know them (``Feature.VALUES``).
"""

import math
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import msgspec

from shoal.domain.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

ARRAY, REFERENCE, PICKLED, TAGGED, SCALAR = 1, 2, 3, 4, 5

ALIGNMENT = 64  # bytes: where an array begins in its value, so that it needs no copy
_DTYPE_MAX = 32 + ALIGNMENT  # characters
_DIMENSIONS_MAX = 64  # NumPy's own limit
_SIMPLE = "biufcmMSU"  # NumPy's kinds of types that their names say all of
_EXT32 = struct.Struct(">BIB")
_BIN32 = struct.Struct(">BI")
_STR8 = struct.Struct(">BB")

TaggedParts: TypeAlias = tuple[str, Any]
"""A tag, and what a value is made of."""


def decompose(value: object) -> TaggedParts | None:
    """Return what a value is made of, with its tag; None if it is of no known type.

    Parts may be values of these types again.
    """
    how = _DECOMPOSERS.get(type(value))
    return None if how is None else how(value)


def compose(tag: object, parts: Any) -> object:
    """Return the value of such parts.

    Raises InvalidRequest if there is no such tag, or it has other parts.
    """
    how = _COMPOSERS.get(tag) if isinstance(tag, str) else None
    if how is None:
        raise InvalidRequest(f"a value has the tag {tag!r:.40}, which is not known")
    try:
        return how(parts)
    except (TypeError, ValueError, InvalidOperation, OverflowError) as error:
        raise InvalidRequest(f"a value with the tag {tag!r} is broken") from error


def _hashable(value: Any) -> Any:
    """Return what can be in a set: tuples were written as lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _pairs(value: dict[Any, Any]) -> TaggedParts:
    return "dict", [[key, item] for key, item in value.items()]


_DECOMPOSERS: Mapping[type, Callable[[Any], TaggedParts]] = {
    complex: lambda value: ("complex", [value.real, value.imag]),
    set: lambda value: ("set", list(value)),
    frozenset: lambda value: ("frozenset", list(value)),
    Decimal: lambda value: ("decimal", str(value)),
    UUID: lambda value: ("uuid", value.bytes),
    date: lambda value: ("date", value.isoformat()),
    time: lambda value: ("time", value.isoformat()),
    datetime: lambda value: ("datetime", value.isoformat()),
    timedelta: lambda value: (
        "timedelta",
        [value.days, value.seconds, value.microseconds],
    ),
    int: lambda value: ("int", hex(value)),
    dict: _pairs,
}

_COMPOSERS: Mapping[str, Callable[[Any], object]] = {
    "complex": lambda parts: complex(*parts),
    "set": lambda parts: set(map(_hashable, parts)),
    "frozenset": lambda parts: frozenset(map(_hashable, parts)),
    "decimal": Decimal,
    "uuid": lambda parts: UUID(bytes=parts),
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "datetime": datetime.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "int": lambda parts: int(parts, 16),
    "dict": lambda parts: {_hashable(key): item for key, item in parts},
}


def is_array(value: object) -> bool:
    """Say whether a value is NumPy's, without importing that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def write_array(value: Any) -> bytes:
    """Return an array or a scalar of NumPy's as a value in MessagePack.

    An array's data begins at a multiple of ``ALIGNMENT`` in it.

    Raises InvalidRequest if it holds objects, or records, or is masked.
    """
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise InvalidRequest("a masked array: send its data and its mask")
    if value.dtype.kind not in _SIMPLE:
        raise InvalidRequest(f"an array of {value.dtype}: only plain numbers can go")
    name = value.dtype.str
    if isinstance(value, np.generic):
        body = msgspec.msgpack.encode([name, value.tobytes()])
        return msgspec.msgpack.encode(msgspec.msgpack.Ext(SCALAR, body))
    array = np.ascontiguousarray(value)
    shape = msgspec.msgpack.encode(value.shape)
    size = array.nbytes
    head = _EXT32.size + 1 + _STR8.size + len(name) + len(shape) + _BIN32.size
    padded = name.encode() + b" " * (-head % ALIGNMENT)
    inner = b"".join((_STR8.pack(0xD9, len(padded)), padded, shape))
    inner = b"\x93" + inner + _BIN32.pack(0xC6, size)
    data = array.reshape(-1).view(np.uint8).data if size else b""
    return b"".join((_EXT32.pack(0xC9, len(inner) + size, ARRAY), inner, data))


def read_array(data: memoryview, *, shared: bool) -> "np.ndarray[Any, Any]":
    """Return an array, on the data itself if it may be; ``shared``: also read-only.

    Raises InvalidRequest if it is none.
    """
    import numpy as np

    try:
        name, shape, raw = _array.decode(data)
        dtype = _dtype(name)
        if len(shape) > _DIMENSIONS_MAX or min(shape, default=0) < 0:
            raise InvalidRequest("an array has dimensions that cannot be")
        if math.prod(shape) * dtype.itemsize != raw.nbytes:
            raise InvalidRequest("an array's data is not of the size of its shape")
        array: np.ndarray[Any, Any] = np.ndarray(tuple(shape), dtype, buffer=raw)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("an array is broken") from error
    if array.flags.aligned and (shared or array.flags.writeable):
        return array
    return array.copy()


def read_scalar(data: memoryview) -> object:
    """Return one of NumPy's scalars.  Raises InvalidRequest if it is none."""
    import numpy as np

    try:
        name, raw = _scalar.decode(data)
        scalar: object = np.frombuffer(raw, _dtype(name), 1)[0]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidRequest("a scalar of NumPy's is broken") from error
    return scalar


def _dtype(name: str) -> "np.dtype[Any]":
    import numpy as np

    if len(name) > _DTYPE_MAX:
        raise InvalidRequest("an array is of a type with too long a name")
    dtype: np.dtype[Any] = np.dtype(name.strip())
    if dtype.kind not in _SIMPLE or dtype.shape:
        raise InvalidRequest(f"an array of {dtype}: only plain numbers are taken")
    return dtype


_array = msgspec.msgpack.Decoder(tuple[str, list[int], memoryview])
_scalar = msgspec.msgpack.Decoder(tuple[str, bytes])
