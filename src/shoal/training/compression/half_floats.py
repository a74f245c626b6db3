"""float32 numbers in two bytes each: float16 with a scale, and bfloat16.

NumPy has no bfloat16: it is the upper half of a float32, rounded to even.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from shoal.training.compression.compressed_collectives import Coding

HalfFloat: TypeAlias = Literal["fp16", "bf16"]

_SCALE = struct.Struct("=f")
_EXPONENT = 15  # of the largest number of a segment: float16 has numbers below 2^16
_EXPONENT_MIN = -111  # so that a scale and its inverse are normal float32
_QUIET_NAN = 0x7FC0


def _encode_fp16(numbers: memoryview, data: memoryview) -> None:
    """Encode numbers, multiplied by the power of two that leaves the largest fitting.

    So a sum cannot overflow, a small gradient does not vanish, and a number that
    float16 has comes back unchanged.
    """
    import numpy as np

    values = np.frombuffer(numbers, np.float32)
    halves = np.frombuffer(data, np.float16, offset=_SCALE.size)
    # With numbers that are not finite, those that are may become infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        top = max(values.max(initial=0), -values.min(initial=0))
        exponent = 0
        if np.isfinite(top):
            exponent = max(int(np.frexp(top)[1]), _EXPONENT_MIN) - _EXPONENT
        np.multiply(values, np.float32(2.0**-exponent), out=halves, casting="same_kind")
    _SCALE.pack_into(data, 0, 2.0**exponent)


def _decode_fp16(data: memoryview, numbers: memoryview) -> None:
    import numpy as np

    (scale,) = _SCALE.unpack_from(data)
    halves = np.frombuffer(data, np.float16, offset=_SCALE.size)
    out = np.frombuffer(numbers, np.float32)
    np.multiply(halves, np.float32(scale), out=out)


def _encode_bf16(numbers: memoryview, data: memoryview) -> None:
    import numpy as np

    bits = np.frombuffer(numbers, np.uint32)
    upper = np.frombuffer(data, np.uint16)
    # Half a unit of the last place, and less by one where that place is even.
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    np.right_shift(rounded, 16, out=upper, casting="unsafe")
    upper[np.isnan(np.frombuffer(numbers, np.float32))] = _QUIET_NAN


def _decode_bf16(data: memoryview, numbers: memoryview) -> None:
    import numpy as np

    upper = np.frombuffer(data, np.uint16)
    np.left_shift(upper, 16, out=np.frombuffer(numbers, np.uint32), dtype=np.uint32)


def _two_bytes_each(head: int) -> Callable[[int], int]:
    return lambda size: head + size // 2


HALF_FLOATS: Mapping[HalfFloat, Coding] = {
    "fp16": Coding(_two_bytes_each(_SCALE.size), _encode_fp16, _decode_fp16),
    "bf16": Coding(_two_bytes_each(0), _encode_bf16, _decode_bf16),
}
