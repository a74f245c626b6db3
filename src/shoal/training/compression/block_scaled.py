"""float32 numbers in one byte each, with a scale for each block: FP8 (E4M3) and int8.

A block is 256 numbers.  Encoded numbers are the scales, float32, then the bytes.  int8
divides a block's range evenly; FP8 has 3 bits of mantissa for numbers of any size.
(Micikevicius and others, "FP8 formats for deep learning", 2022.)

A block with a number that is not finite becomes NaN as a whole, so that all ranks see
that there was one.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.training.compression.compressed_collectives import Coding

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

BlockScaled: TypeAlias = Literal["fp8", "int8"]

BLOCK = 256  # numbers
INT8_TOP = 127
E4M3_TOP = 448  # 1.75 * 2^8
_NUMBER = 4  # bytes of a float32, and of a scale
_MARGIN = 1 - 2.0**-22  # the largest number of all must not be decoded as infinite
_SCALE_MIN = 2.0**-126  # a smaller number has no inverse


def _encoded_size(size: int) -> int:
    count = size // _NUMBER
    return _NUMBER * -(-count // BLOCK) + count


def _encode(
    numbers: memoryview,
    data: memoryview,
    top: int,
    quantize: "Callable[[Array, Array], None]",
) -> None:
    """Encode numbers, divided by scales that make the largest of each block ``top``.

    ``quantize`` takes such numbers, which it may change, and where their bytes go.
    """
    import numpy as np

    for values, scales, codes in _blocks(numbers, data):
        largest = np.abs(values).max(axis=1)
        np.maximum(largest * np.float32(_MARGIN / top), _SCALE_MIN, out=scales)
        finite = np.isfinite(largest)
        if not finite.all():
            scales[~finite] = np.nan
            values = np.where(finite[:, None], values, np.float32(0))
        inverse = np.divide(1, scales, out=np.ones_like(scales), where=finite)
        quantize(values * inverse[:, None], codes)


def _decode(
    data: memoryview, numbers: memoryview, dequantize: "Callable[[Array, Array], None]"
) -> None:
    """Decode numbers; ``dequantize`` takes bytes, and where their numbers go."""
    import numpy as np

    for values, scales, codes in _blocks(numbers, data):
        dequantize(codes, values)
        np.multiply(values, scales[:, None], out=values)


def _blocks(
    numbers: memoryview, data: memoryview
) -> "list[tuple[Array, Array, Array]]":
    """Return numbers, scales and bytes, one row a block; the last may be shorter."""
    import numpy as np

    values = np.frombuffer(numbers, np.float32)
    count = -(-values.size // BLOCK)
    scales = np.frombuffer(data, np.float32, count)
    codes = np.frombuffer(data, np.uint8, offset=_NUMBER * count)
    whole = values.size // BLOCK
    split = whole * BLOCK
    parts = (
        (values[:split].reshape(-1, BLOCK), scales[:whole], codes[:split]),
        (values[split:].reshape(1, -1), scales[whole:], codes[split:]),
    )
    return [(v, s, c.reshape(v.shape)) for v, s, c in parts if v.size]


def _to_int8(values: "Array", codes: "Array") -> None:
    import numpy as np

    np.rint(values, out=values)
    np.copyto(codes.view(np.int8), values, casting="unsafe")


def _from_int8(codes: "Array", values: "Array") -> None:
    import numpy as np

    np.copyto(values, codes.view(np.int8))


def _to_e4m3(values: "Array", codes: "Array") -> None:
    import numpy as np

    # By a table of all bfloat16: five times as fast as ml_dtypes, which has the type.
    # Rounding twice is off by 1/32 of a rounding error, and only near a tie.
    bits = values.view(np.uint32)
    bits += 0x8000
    bits >>= 16
    np.take(_e4m3_of_bfloat16(), bits.astype(np.uint16), out=codes, mode="clip")


def _from_e4m3(codes: "Array", values: "Array") -> None:
    import numpy as np

    np.take(e4m3_numbers(), codes, out=values, mode="clip")


@cache
def e4m3_numbers() -> "Array":
    """Return the float32 numbers of all 256 bytes.

    A byte is the sign, 4 bits of exponent with bias 7, and 3 of mantissa; 0x7F and 0xFF
    are NaN, and there are no infinities.
    """
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(8 + mantissa, exponent - 10)
    numbers = np.where(exponent, normal, np.ldexp(mantissa, -9))
    numbers = np.where(codes & 0x7F == 0x7F, np.nan, numbers)
    return np.where(codes & 0x80, -numbers, numbers).astype(np.float32)


@cache
def _e4m3_of_bfloat16() -> "Array":
    """Return the byte of the nearest number, for each bfloat16; ties go to even."""
    import numpy as np

    numbers = e4m3_numbers()[:0x7F]  # those that are not negative, in order
    bits = np.arange(1 << 15, dtype=np.uint32) << 16
    values = np.nan_to_num(bits.view(np.float32), nan=0).clip(0, E4M3_TOP)
    above = np.searchsorted(numbers, values).clip(1)
    below = above - 1
    middle = (numbers[below] + numbers[above]) / 2
    even = np.where(above % 2, below, above)
    nearest = np.where(
        values == middle, even, np.where(values > middle, above, below)
    ).astype(np.uint8)
    return np.concatenate([nearest, nearest | np.uint8(0x80)])


BLOCK_SCALED: Mapping[BlockScaled, Coding] = {
    "fp8": Coding(
        _encoded_size,
        lambda numbers, data: _encode(numbers, data, E4M3_TOP, _to_e4m3),
        lambda data, numbers: _decode(data, numbers, _from_e4m3),
    ),
    "int8": Coding(
        _encoded_size,
        lambda numbers, data: _encode(numbers, data, INT8_TOP, _to_int8),
        lambda data, numbers: _decode(data, numbers, _from_int8),
    ),
}
