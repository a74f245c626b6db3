"""How float32 numbers travel in fewer bytes, each rounded, by the names of the codings.

fp16 and bf16 take two bytes each.  float16 has a scale for each segment; bfloat16 is
the upper half of a float32, rounded to even, and NumPy does not have it.

fp8 (E4M3) and int8 take one byte each, with a scale for each block of 256 numbers:
first the scales, float32, then the bytes.  int8 divides a block's range evenly; FP8 has
3 bits of mantissa for numbers of any size.  (Micikevicius and others, "FP8 formats for
deep learning", 2022.)  A block with a number that is not finite becomes NaN as a whole,
so that all ranks see that there was one.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training import collectives
from shoal.training.collectives import Array, Kind

CodingName: TypeAlias = Literal["fp16", "bf16", "fp8", "int8"]
Quantize: TypeAlias = Callable[[Array, Array], None]
"""Converts the numbers of the first array into the second."""

_SCALE = struct.Struct("=f")
_EXPONENT = 15  # of the largest number of a segment: float16 has numbers below 2^16
_EXPONENT_MIN = -111  # so that a scale and its inverse are normal float32
_QUIET_NAN = 0x7FC0

BLOCK = 256  # numbers
INT8_TOP = 127
E4M3_TOP = 448  # 1.75 * 2^8
_NUMBER = 4  # bytes of a float32, and of a scale
_MARGIN = 1 - 2.0**-22  # the largest number of all must not be decoded as infinite
_SCALE_MIN = 2.0**-126  # a smaller number has no inverse


@dataclass(frozen=True, slots=True)
class Coding:
    """How the numbers of a segment travel.

    ``encoded_size`` takes bytes of numbers and returns bytes on the way; ``encode``
    takes the numbers and where to put the bytes, ``decode`` the reverse.
    """

    encoded_size: Callable[[int], int]
    encode: Callable[[memoryview, memoryview], None]
    decode: Callable[[memoryview, memoryview], None]

    # The rest implements ``all_reduces.PartCoding``: a sum is sent as a part.

    is_selective = False
    head_size = 0

    @property
    def part_size(self) -> int:
        return collectives.SEGMENT_SIZE

    def encoded(self, numbers: memoryview) -> memoryview:
        # Memory of its own: it must not change until it has been sent.
        data = memoryview(bytearray(self.encoded_size(len(numbers))))
        self.encode(numbers, data)
        return data

    def begin_sum(self, own: memoryview, sums: memoryview) -> None:
        sums[:] = own

    def encode_sum(self, sums: memoryview) -> tuple[memoryview, memoryview]:
        return memoryview(b""), self.encoded(sums)

    def sum_size(self, head: memoryview, size: int) -> int:
        return self.encoded_size(size)

    def decode_sum(
        self, head: memoryview, data: memoryview, numbers: memoryview
    ) -> None:
        self.decode(data, numbers)


def coding_of(name: CodingName, dtype: np.dtype[Any]) -> Coding:
    """Return how float32 numbers travel under this name.

    Raises InvalidRequest for other names and dtypes.
    """
    coding = CODINGS.get(name)
    if coding is None:
        raise InvalidRequest(f"{name!r}: expected one of {', '.join(CODINGS)}")
    if dtype != "float32":
        raise InvalidRequest(f"{name} of {dtype}: only float32 can be compressed")
    return coding


def _encode_fp16(numbers: memoryview, data: memoryview) -> None:
    """Encode numbers, multiplied by the power of two that leaves the largest fitting.

    So a sum cannot overflow, a small gradient does not vanish, and a number that
    float16 has comes back unchanged.
    """
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
    (scale,) = _SCALE.unpack_from(data)
    halves = np.frombuffer(data, np.float16, offset=_SCALE.size)
    out = np.frombuffer(numbers, np.float32)
    np.multiply(halves, np.float32(scale), out=out)


def _encode_bf16(numbers: memoryview, data: memoryview) -> None:
    bits = np.frombuffer(numbers, np.uint32)
    upper = np.frombuffer(data, np.uint16)
    # Half a unit of the last place, and less by one where that place is even.
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    np.right_shift(rounded, 16, out=upper, casting="unsafe")
    upper[np.isnan(np.frombuffer(numbers, np.float32))] = _QUIET_NAN


def _decode_bf16(data: memoryview, numbers: memoryview) -> None:
    upper = np.frombuffer(data, np.uint16)
    np.left_shift(upper, 16, out=np.frombuffer(numbers, np.uint32), dtype=np.uint32)


def _block_scaled_size(size: int) -> int:
    count = size // _NUMBER
    return _NUMBER * -(-count // BLOCK) + count


def _encode_blocks(
    numbers: memoryview, data: memoryview, top: int, quantize: Quantize
) -> None:
    """Encode numbers, divided by scales that make the largest of each block ``top``.

    ``quantize`` takes such numbers, which it may change, and where their bytes go.
    """
    for values, scales, codes in _blocks(numbers, data):
        largest = np.abs(values).max(axis=1)
        np.maximum(largest * np.float32(_MARGIN / top), _SCALE_MIN, out=scales)
        finite = np.isfinite(largest)
        if not finite.all():
            scales[~finite] = np.nan
            values = np.where(finite[:, None], values, np.float32(0))
        inverse = np.divide(1, scales, out=np.ones_like(scales), where=finite)
        quantize(values * inverse[:, None], codes)


def _decode_blocks(data: memoryview, numbers: memoryview, dequantize: Quantize) -> None:
    """Decode numbers; ``dequantize`` takes bytes, and where their numbers go."""
    for values, scales, codes in _blocks(numbers, data):
        dequantize(codes, values)
        np.multiply(values, scales[:, None], out=values)


def _blocks(numbers: memoryview, data: memoryview) -> list[tuple[Array, Array, Array]]:
    """Return numbers, scales and bytes, one row a block; the last may be shorter."""
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


def _to_int8(values: Array, codes: Array) -> None:
    np.rint(values, out=values)
    np.copyto(codes.view(np.int8), values, casting="unsafe")


def _from_int8(codes: Array, values: Array) -> None:
    np.copyto(values, codes.view(np.int8))


def _to_e4m3(values: Array, codes: Array) -> None:
    # By a table of all bfloat16: five times as fast as ml_dtypes, which has the type.
    # Rounding twice is off by 1/32 of a rounding error, and only near a tie.
    bits = values.view(np.uint32)
    bits += 0x8000
    bits >>= 16
    np.take(_e4m3_of_bfloat16(), bits.astype(np.uint16), out=codes, mode="clip")


def _from_e4m3(codes: Array, values: Array) -> None:
    np.take(e4m3_numbers(), codes, out=values, mode="clip")


@cache
def e4m3_numbers() -> Array:
    """Return the float32 numbers of all 256 bytes.

    A byte is the sign, 4 bits of exponent with bias 7, and 3 of mantissa; 0x7F and 0xFF
    are NaN, and there are no infinities.
    """
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(8 + mantissa, exponent - 10)
    numbers = np.where(exponent, normal, np.ldexp(mantissa, -9))
    numbers = np.where(codes & 0x7F == 0x7F, np.nan, numbers)
    return np.where(codes & 0x80, -numbers, numbers).astype(np.float32)


@cache
def _e4m3_of_bfloat16() -> Array:
    """Return the byte of the nearest number, for each bfloat16; ties go to even."""
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


def _block_scaled(top: int, to_codes: Quantize, from_codes: Quantize) -> Coding:
    return Coding(
        _block_scaled_size,
        lambda numbers, data: _encode_blocks(numbers, data, top, to_codes),
        lambda data, numbers: _decode_blocks(data, numbers, from_codes),
    )


CODINGS: Mapping[CodingName, Coding] = {
    "fp16": Coding(lambda size: _SCALE.size + size // 2, _encode_fp16, _decode_fp16),
    "bf16": Coding(lambda size: size // 2, _encode_bf16, _decode_bf16),
    "fp8": _block_scaled(E4M3_TOP, _to_e4m3, _from_e4m3),
    "int8": _block_scaled(INT8_TOP, _to_int8, _from_int8),
}

# Codings of one size have different kinds, so that ranks notice a mismatch.
KINDS: Mapping[CodingName, Kind] = {
    "fp16": Kind.HALF_FLOAT_ALL_REDUCE,
    "bf16": Kind.HALF_FLOAT_ALL_REDUCE,
    "fp8": Kind.FP8_ALL_REDUCE,
    "int8": Kind.INT8_ALL_REDUCE,
}
