"""The codings of numbers that collectives have, by name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.training.collectives import Kind
from shoal.training.compression.block_scaled import BLOCK_SCALED, BlockScaled
from shoal.training.compression.compressed_collectives import Coding
from shoal.training.compression.half_floats import HALF_FLOATS, HalfFloat

if TYPE_CHECKING:
    import numpy as np

    DType: TypeAlias = "np.dtype[Any]"

CodingName: TypeAlias = HalfFloat | BlockScaled

CODINGS: Mapping[CodingName, Coding] = dict(
    [*HALF_FLOATS.items(), *BLOCK_SCALED.items()]
)

# Those of equal size have kinds of their own: ranks with different ones then notice.
KINDS: Mapping[CodingName, Kind] = {
    "fp16": Kind.HALF_FLOAT_ALL_REDUCE,
    "bf16": Kind.HALF_FLOAT_ALL_REDUCE,
    "fp8": Kind.FP8_ALL_REDUCE,
    "int8": Kind.INT8_ALL_REDUCE,
}


def coding_of(name: CodingName, dtype: "DType") -> Coding:
    """Return how float32 numbers travel under this name.

    Raises InvalidRequest for other names and dtypes.
    """
    coding = CODINGS.get(name)
    if coding is None:
        raise InvalidRequest(f"{name!r}: expected one of {', '.join(CODINGS)}")
    if dtype != "float32":
        raise InvalidRequest(f"{name} of {dtype}: only float32 can be compressed")
    return coding
