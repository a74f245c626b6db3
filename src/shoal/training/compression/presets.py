"""Gradients in fewer bytes: their largest numbers, in float16 or int8.

What a compression leaves out is not lost: a ``GradientCompressor`` adds it to the next
gradient (*error feedback*; Stich, Cordonnier and Jaggi, "Sparsified SGD with memory",
2018).  Arrays are float32.  The presets and the arithmetic are those of other programs,
bit for bit; source: recorded compressions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training.collectives import Array

NUMBERS_MIN = 1024  # smaller arrays are not worth compressing
HALF_MAX = 65504.0  # the largest float16
HALF_MARGIN = 1.1  # keeps the largest number that far below HALF_MAX
QUANTIZED_HALF_MAX = 60000.0
INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class Compression:
    """Keep this ratio of the numbers, the largest; ``halves``: as float16."""

    ratio: float = 1.0
    halves: bool = False


PRESETS: Mapping[str, Compression] = {
    "none": Compression(),
    "light": Compression(halves=True),
    "moderate": Compression(0.1, halves=True),
    "aggressive": Compression(0.01, halves=True),
}


class Quantized(NamedTuple):
    """Numbers of a small dtype; ``scale`` says what they stand for."""

    numbers: Array
    scale: float


@dataclass(frozen=True, slots=True)
class CompressedGradient:
    """A gradient of ``shape``: its numbers at ``indices`` (int32), zero elsewhere.

    ``indices`` refer to the flat array, largest number first; None: all numbers.
    ``values`` are multiplied by ``scale``.
    """

    values: Array
    scale: float
    indices: Array | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and their indices."""
        indices = 0 if self.indices is None else self.indices.nbytes
        return self.values.nbytes + indices

    def dense(self) -> Array:
        """Return the gradient that it stands for, in float32."""
        values = decode_half(Quantized(self.values, self.scale))
        if self.indices is None:
            return values.reshape(self.shape)
        flat = np.zeros(self.shape, np.float32).reshape(-1)
        flat[self.indices] = values
        return flat.reshape(self.shape)


class GradientCompressor:
    """Compresses the gradients of one array, step by step.

    It adds what one step left out to the next.  Arrays of fewer than ``numbers_min``
    numbers are left as they are.
    """

    def __init__(self, compression: Compression, numbers_min: int = NUMBERS_MIN):
        if not 0 < compression.ratio <= 1:
            raise InvalidRequest(
                f"a compression to {compression.ratio:g} of the numbers: expected more "
                "than 0, and 1 at most"
            )
        self._compression = compression
        self._numbers_min = numbers_min
        self.residual: Array | None = None
        """What has been left out so far; the caller may save and restore it."""

    def compress(self, gradient: Array) -> CompressedGradient | None:
        """Return a compressed gradient; None: send it as it is.

        Raises InvalidRequest if the shape is not that of the last step, and for numbers
        that are not finite: they would remain in all later steps.
        """
        ratio, halves = self._compression.ratio, self._compression.halves
        if gradient.size < self._numbers_min or (ratio == 1 and not halves):
            return None
        total = gradient.astype(np.float32)
        if self.residual is not None:
            if self.residual.shape != gradient.shape:
                raise InvalidRequest(
                    f"a gradient of shape {gradient.shape}, expected "
                    f"{self.residual.shape}, that of the last step"
                )
            total += self.residual
        if not np.isfinite(total).all():
            raise InvalidRequest("a gradient with a number that is not finite")
        values = total.reshape(-1)
        indices = None
        if ratio < 1:
            indices = largest(values, ratio)
            values = values[indices]
        encoded = encode_half(values) if halves else Quantized(values, 1.0)
        compressed = CompressedGradient(*encoded, indices, gradient.shape)
        self.residual = total - compressed.dense()
        return compressed


def largest(numbers: Array, ratio: float) -> Array:
    """Return the int32 indices of the numbers of the largest magnitude, in that order.

    They are this ratio of a flat array, rounded down, but at least one.  Which of equal
    numbers are taken, and in which order, is NumPy's choice.
    """
    count = max(1, int(numbers.size * ratio))
    sizes = np.abs(numbers)
    found = np.argpartition(sizes, -count)[-count:]
    return found[np.argsort(sizes[found])[::-1]].astype(np.int32)


def encode_half(numbers: Array) -> Quantized:
    """Return numbers as float16, divided by a scale so that all fit.

    The relative error is at most 2^-11, for numbers of more than 2^-30 of the largest.
    """
    top = np.abs(numbers).max(initial=np.float32(0))
    # A scale of subnormal numbers may be 0.
    scale = float(top / np.float32(HALF_MAX) * np.float32(HALF_MARGIN)) or 1.0
    return Quantized((numbers / np.float32(scale)).astype(np.float16), scale)


def decode_half(encoded: Quantized) -> Array:
    """Return the float32 numbers that ``encode_half`` has encoded."""
    return encoded.numbers.astype(np.float32) * np.float32(encoded.scale)


def quantize_half(numbers: Array) -> Quantized:
    """Return numbers as float16, multiplied by a scale only if they do not fit."""
    top = float(np.abs(numbers).max(initial=0))
    scale = QUANTIZED_HALF_MAX / top if top > QUANTIZED_HALF_MAX else 1.0
    return Quantized((numbers * scale).astype(np.float16), scale)


def quantize_int8(numbers: Array) -> Quantized:
    """Return numbers as int8, multiplied by a scale so that the largest is 127.

    The error is at most 1/254 of the largest number.
    """
    top = float(np.abs(numbers).max(initial=0))
    scale = INT8_MAX / top if top else 1.0
    rounded = np.rint(numbers * scale).clip(-INT8_MAX, INT8_MAX)
    return Quantized(rounded.astype(np.int8), scale)


def dequantize(quantized: Quantized) -> Array:
    """Return the float32 numbers that were quantized."""
    return quantized.numbers.astype(np.float32) / np.float32(quantized.scale)
