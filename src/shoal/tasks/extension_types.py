"""MessagePack extension types for Python values.

Arrays are ext 1 and scalars ext 5, with NumPy's type names; ext 4 is a tag and the
parts of a value.  Only Shoal's peers know them (``Feature.VALUES``).
"""

import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks.class_instances import rebuild_instance

if TYPE_CHECKING:
    import numpy as np

ARRAY, REFERENCE, PICKLED, TAGGED, SCALAR = 1, 2, 3, 4, 5

INSTANCE = "instance"
"""The tag of an instance of a class: module, name, state."""
TRANSPOSED = "transposed"
"""The tag of an array whose first index varies fastest: its transpose."""
BUFFERED = "pickled"
"""The tag of a pickle, and of buffers that it refers to."""
EXACT = "exact"
"""The tag of a result that is plain data, and as it should be."""

ALIGNMENT = 64  # bytes; alignment of an array in its value, which avoids a copy
_DTYPE_MAX = 32 + ALIGNMENT  # characters
_DIMENSIONS_MAX = 64  # NumPy's own limit
_SIMPLE = "biufcmMSU"  # NumPy's kinds that a type name fully describes
_EXT32 = struct.Struct(">BIB")
_BIN32 = struct.Struct(">BI")
_STR8 = struct.Struct(">BB")

_EXT_BYTES = frozenset(
    bytes((each,)) for each in (*range(0xC7, 0xCA), *range(0xD4, 0xD9))
)
"""First bytes of extension values (MessagePack specification, ext family)."""

TaggedParts: TypeAlias = tuple[str, Any]
"""A tag, and the parts of a value."""


def is_extension(data: bytes) -> bool:
    """Return whether a value in MessagePack is of one of these types."""
    return data[:1] in _EXT_BYTES


def decompose(value: object) -> TaggedParts | None:
    """Return the tag and the parts of a value; None for an unknown type.

    Parts may themselves be values of these types.
    """
    convert = _DECOMPOSERS.get(type(value))
    if getattr(value, "__dict__", None):  # such as that of an OrderedDict
        return None
    if convert is None and isinstance(value, tzinfo):
        convert = _named_zone
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
    except InvalidRequest:
        raise
    except Exception as error:
        # The code of a class may run: the hash of a key, a Struct's __post_init__.
        raise InvalidRequest(
            f"invalid parts of a value with the tag {tag!r}"
        ) from error


def _hashable(value: Any) -> Any:
    """Return a hashable value: older programs encode tuples as lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _dict_of(pairs: Iterable[Any]) -> dict[Any, Any]:
    return {_hashable(key): item for key, item in pairs}


_FACTORIES = {each.__name__: each for each in (int, float, str, list, dict, set, tuple)}
"""The default factories that a ``defaultdict`` may have."""


def _default_parts(value: Any) -> TaggedParts | None:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        return None  # code of one's own
    return "defaultdict", [name, _pairs(value)]


def _compose_default(parts: Any) -> object:
    name, pairs = parts
    factory = None if name is None else _FACTORIES[name]
    return defaultdict(factory, _dict_of(pairs))


def _zone_parts(zone: Any) -> list[Any] | None:
    """Return a time zone as data: a name, or an offset and its name; None: unknown."""
    zoneinfo = sys.modules.get("zoneinfo")  # importing it takes longer than most calls
    if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo:
        return None if zone.key is None else [zone.key]
    if type(zone) is timezone:
        return [*_delta_parts(zone.utcoffset(None)), zone.tzname(None)]
    return None


def _compose_zone(parts: Any) -> tzinfo | None:
    if not parts:
        return None
    if len(parts) == 1:
        from zoneinfo import ZoneInfo

        return ZoneInfo(parts[0])
    *offset, name = parts
    delta = timedelta(*offset)
    plain = timezone(delta)
    return plain if plain.tzname(None) == name else timezone(delta, name)


def _time_parts(value: Any) -> TaggedParts | None:
    """Return a time or a date with one, its zone, and which of two equal hours it is.

    None if the zone is of a class that others need not have.
    """
    zone = [] if value.tzinfo is None else _zone_parts(value.tzinfo)
    if zone is None:
        return None
    text = value.replace(tzinfo=None).isoformat()
    return type(value).__name__, [text, zone, value.fold]


def _compose_time(kind: Any, parts: Any) -> object:
    if isinstance(parts, str):  # of an older program
        return kind.fromisoformat(parts)
    text, zone, fold = parts
    return kind.fromisoformat(text).replace(tzinfo=_compose_zone(zone), fold=fold)


def _delta_parts(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _named_zone(value: Any) -> TaggedParts | None:
    parts = _zone_parts(value)
    return None if parts is None else ("zone", parts)


_DECOMPOSERS: Mapping[type, Callable[[Any], TaggedParts | None]] = {
    tuple: lambda value: ("tuple", [*value]),
    bytearray: lambda value: ("bytearray", [bytes(value)]),
    complex: lambda value: ("complex", [value.real, value.imag]),
    set: lambda value: ("set", [*value]),
    frozenset: lambda value: ("frozenset", [*value]),
    Decimal: lambda value: ("decimal", str(value)),
    UUID: lambda value: ("uuid", value.bytes),
    date: lambda value: ("date", value.isoformat()),
    time: _time_parts,
    datetime: _time_parts,
    timedelta: lambda value: ("timedelta", _delta_parts(value)),
    int: lambda value: ("int", hex(value)),
    str: lambda value: ("text", value.encode(errors="surrogatepass")),
    dict: lambda value: ("dict", _pairs(value)),
    OrderedDict: lambda value: ("ordered", _pairs(value)),
    Counter: lambda value: ("counter", _pairs(value)),
    defaultdict: _default_parts,
    deque: lambda value: ("deque", [[*value], value.maxlen]),
}

_COMPOSERS: Mapping[str, Callable[[Any], object]] = {
    INSTANCE: rebuild_instance,
    TRANSPOSED: lambda parts: parts[0].T,
    EXACT: lambda parts: parts[0],
    "tuple": tuple,
    "bytearray": lambda parts: bytearray(parts[0]),
    "complex": lambda parts: complex(*parts),
    "set": lambda parts: set(map(_hashable, parts)),
    "frozenset": lambda parts: frozenset(map(_hashable, parts)),
    "decimal": Decimal,
    "uuid": lambda parts: UUID(bytes=parts),
    "date": date.fromisoformat,
    "time": partial(_compose_time, time),
    "datetime": partial(_compose_time, datetime),
    "timedelta": lambda parts: timedelta(*parts),
    "zone": _compose_zone,
    "int": lambda parts: int(parts, 16),
    "text": lambda parts: parts.decode(errors="surrogatepass"),
    "dict": _dict_of,
    "ordered": lambda parts: OrderedDict(_dict_of(parts)),
    "counter": lambda parts: Counter(_dict_of(parts)),
    "defaultdict": _compose_default,
    "deque": lambda parts: deque(*parts),
}


def is_array(value: object) -> bool:
    """Return whether a value is NumPy's, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def is_transposed(array: Any) -> bool:
    """Return whether the first index of an array varies fastest, and not the last."""
    flags = array.flags
    return bool(flags.f_contiguous and not flags.c_contiguous)


def write_array(value: Any) -> bytes:
    """Encode an array or a scalar of NumPy in MessagePack.

    The data of an array is aligned to ``ALIGNMENT``.

    Raises InvalidRequest if it holds objects or records, or is of a class of its own.
    """
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise InvalidRequest("masked arrays cannot be sent: send the data and the mask")
    if not isinstance(value, np.generic) and type(value) is not np.ndarray:
        raise InvalidRequest(
            f"a {type(value).__name__} cannot be sent: send numpy.asarray of it"
        )
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
        scalar: object = np.ndarray((), _dtype(name), raw)[()]
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
