"""How arrays are combined: by sum, mean, product, minimum, maximum, and bitwise."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.training.collectives import Reduction

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
    DType: TypeAlias = "np.dtype[Any]"

ReduceOp: TypeAlias = Literal[
    "sum", "mean", "product", "min", "max", "and", "or", "xor"
]

_UFUNCS: Mapping[str, str] = {
    "sum": "add",
    "mean": "add",
    "product": "multiply",
    "min": "minimum",
    "max": "maximum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


def reduction(op: ReduceOp, dtype: "DType", size: int) -> Reduction:
    """Return how arrays of a dtype are combined in a group of so many ranks.

    Raises InvalidRequest if the dtype has no such operation, or the operation is
    unknown.
    """
    import numpy as np

    name = _UFUNCS.get(op)
    if name is None:
        raise InvalidRequest(f"{op!r}: expected one of {', '.join(_UFUNCS)}")
    ufunc: Callable[..., Any] = getattr(np, name)
    if op == "mean" and dtype.kind not in "fc":
        raise InvalidRequest(
            f"a mean of {dtype}: it need not be one; use sum, or convert it to float"
        )
    kinds = "biu" if op in ("and", "or", "xor") else "biufc"
    if dtype.kind not in kinds or not dtype.isnative:
        raise InvalidRequest(f"{dtype} cannot be combined: convert it with astype")

    def combine(own: memoryview, received: memoryview, result: memoryview) -> None:
        ufunc(
            np.frombuffer(own, dtype),
            np.frombuffer(received, dtype),
            out=np.frombuffer(result, dtype),
        )

    def divide(result: memoryview) -> None:
        numbers = np.frombuffer(result, dtype)
        np.divide(numbers, size, out=numbers)

    return Reduction(dtype.itemsize, combine, divide if op == "mean" else None)


def is_finite(array: "Array") -> bool:
    """Return whether all numbers are finite.

    Of a sum or mean, all ranks get the same answer without another message: they have
    the same bits, and a number of any rank that is not finite makes the result so.
    """
    import numpy as np

    return bool(np.isfinite(array).all())
