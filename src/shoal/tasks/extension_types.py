"""MessagePack extension types for Python values.

Arrays are ext 1 and scalars ext 5, with NumPy's type names; ext 4 is a tag and the
parts of a value.  Only Shoal's peers know them (``Feature.VALUES``).
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

ALIGNMENT = 64  # bytes; alignment of an array in its value, which avoids a copy
_DTYPE_MAX = 32 + ALIGNMENT  # characters
_DIMENSIONS_MAX = 64  # NumPy's own limit
_SIMPLE = "biufcmMSU"  # NumPy's kinds that a type name fully describes
_EXT32 = struct.Struct(">BIB")
_BIN32 = struct.Struct(">BI")
_STR8 = struct.Struct(">BB")

TaggedParts: TypeAlias = tuple[str, Any]
"""A tag, and the parts of a value."""


def decompose(value: object) -> TaggedParts | None:
    """Return the tag and the parts of a value; None for an unknown type.

    Parts may themselves be values of these types.
    """
    convert = _DECOMPOSERS.get(type(value))
    return None if convert is None else convert(value)


def compose(tag: object, parts: Any) -> object:
    """Return the value of a tag and its parts.

    Raises InvalidRequest if the tag is unknown, or the parts do not fit.
    """
    convert = _COMPOSERS.get(tag) if isinstance(tag, str) else None
    if convert is None:
        raise InvalidRequest(f"unknown tag of a value: {tag!r:.40}")
    try:
        return convert(parts)
    except (TypeError, ValueError, InvalidOperation, OverflowError) as error:
        raise InvalidRequest(
            f"invalid parts of a value with the tag {tag!r}"
        ) from error


def _hashable(value: Any) -> Any:
    """Return a hashable value: tuples were encoded as lists."""
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
    """Return whether a value is NumPy's, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def write_array(value: Any) -> bytes:
    """Encode an array or a scalar of NumPy in MessagePack.

    The data of an array is aligned to ``ALIGNMENT``.

    Raises InvalidRequest if it holds objects or records, or is masked.
    """
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise InvalidRequest("masked arrays cannot be sent: send the data and the mask")
    if value.dtype.kind not in _SIMPLE:
        raise InvalidRequest(
            f"arrays of {value.dtype} cannot be sent: only plain numbers"
        )
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
    """Decode an array, without a copy if it is aligned; ``shared``: also if read-only.

    Raises InvalidRequest if it is malformed.
    """
    import numpy as np

    try:
        name, shape, raw = _array.decode(data)
        dtype = _dtype(name)
        if len(shape) > _DIMENSIONS_MAX or min(shape, default=0) < 0:
            raise InvalidRequest("invalid dimensions of an array")
        if math.prod(shape) * dtype.itemsize != raw.nbytes:
            raise InvalidRequest("an array's data does not fit its shape")
        array: np.ndarray[Any, Any] = np.ndarray(tuple(shape), dtype, buffer=raw)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("malformed array") from error
    if array.flags.aligned and (shared or array.flags.writeable):
        return array
    return array.copy()


def read_scalar(data: memoryview) -> object:
    """Decode a scalar of NumPy.  Raises InvalidRequest if it is malformed."""
    import numpy as np

    try:
        name, raw = _scalar.decode(data)
        scalar: object = np.frombuffer(raw, _dtype(name), 1)[0]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidRequest("malformed NumPy scalar") from error
    return scalar


def _dtype(name: str) -> "np.dtype[Any]":
    import numpy as np

    if len(name) > _DTYPE_MAX:
        raise InvalidRequest("the type name of an array is too long")
    dtype: np.dtype[Any] = np.dtype(name.strip())
    if dtype.kind not in _SIMPLE or dtype.shape:
        raise InvalidRequest(f"arrays of {dtype} are not accepted: only plain numbers")
    return dtype


_array = msgspec.msgpack.Decoder(tuple[str, list[int], memoryview])
_scalar = msgspec.msgpack.Decoder(tuple[str, bytes])
