"""Tensors on the CPU as memory, and how they are combined."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.domain.errors import InvalidRequest
from shoal.training.collectives import ReduceOp, Reduction, reduction

TORCH_OPS: Mapping[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}

_TORCH_FUNCTIONS: Mapping[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""For dtypes that NumPy lacks."""


class Memory:
    """A tensor's memory as bytes, within a block.

    One that is not contiguous is copied, and copied back at the end of the block.
    Raises InvalidRequest if it is sparse, or not on the CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise InvalidRequest(
                f"a tensor on {tensor.device} of layout {tensor.layout}: the backend "
                "shoal has dense tensors on the CPU, and all_reduce of sparse ones"
            )
        self._tensor = tensor.detach()
        # The memory of a conjugate or negative view has other numbers.
        self._contiguous = self._tensor.resolve_conj().resolve_neg().contiguous()

    def __enter__(self) -> memoryview:
        """Return the bytes; they keep the tensor.

        An array of NumPy would forbid PyTorch for ever to resize it, as FSDP does.
        """
        memory = (ctypes.c_char * self._contiguous.nbytes).from_address(
            self._contiguous.data_ptr()
        )
        memory.tensor = self._contiguous
        return memoryview(memory).cast("B")

    def __exit__(self, *_: object) -> None:
        if self._contiguous.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._contiguous)


class Memories:
    """The memory of several tensors, within a block."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._all = [Memory(tensor) for tensor in tensors]

    def __enter__(self) -> list[memoryview]:
        return [each.__enter__() for each in self._all]

    def __exit__(self, *_: object) -> None:
        for each in self._all:
            each.__exit__()


def op_of(opts: Any) -> ReduceOp:
    """Return the operation of PyTorch's options.  Raises InvalidRequest."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    # It is compared: its text names nothing, and it has no hash of its own.
    for name, op in TORCH_OPS.items():
        if wanted == op:
            return name
    raise InvalidRequest("the backend shoal has no such reduction: use SUM or AVG")


def tensor_reduction(
    op: ReduceOp, dtype: torch.dtype, size: int, of: int | None = None
) -> Reduction:
    """Return how tensors of a dtype are combined, by NumPy where it has the dtype.

    ``of``: a script divides sums by this size, whatever the present one: sums of floats
    are multiplied by their ratio, and counts remain counts.

    Raises InvalidRequest if the dtype has no such operation.
    """
    try:
        numbers = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # such as bfloat16
        combined = _torch_reduction(op, dtype, size)
    else:
        combined = reduction(op, numbers, size)
    if op != "sum" or of in (None, size) or not dtype.is_floating_point:
        return combined
    ratio = of / size

    def rescale(result: memoryview) -> None:
        torch.frombuffer(result, dtype=dtype).mul_(ratio)

    return replace(combined, finish=rescale)


def _torch_reduction(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    function = _TORCH_FUNCTIONS.get(op)
    if function is None or not dtype.is_floating_point:
        raise InvalidRequest(f"{dtype} cannot be combined by {op}")

    def combine(own: memoryview, received: memoryview, result: memoryview) -> None:
        function(
            torch.frombuffer(own, dtype=dtype),
            torch.frombuffer(received, dtype=dtype),
            out=torch.frombuffer(result, dtype=dtype),
        )

    def divide(result: memoryview) -> None:
        torch.frombuffer(result, dtype=dtype).div_(size)

    return Reduction(dtype.itemsize, combine, divide if op == "mean" else None)
