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
"""For bfloat16, which NumPy lacks, as it does smaller floats that are for storage."""


class Memory:
    """A tensor's memory as bytes, within a block.

    One that is not contiguous is copied, and if it is a result, copied back at the end
    of the block.

    Raises InvalidRequest if it is sparse, not on the CPU, or a result that has one
    place for several numbers.
    """

    def __init__(self, tensor: Tensor, *, is_result: bool = True) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise InvalidRequest(
                f"a tensor on {tensor.device} of layout {tensor.layout}: the backend "
                "shoal has dense tensors on the CPU, and all_reduce of sparse ones"
            )
        if is_result and any(
            size > 1 and stride == 0
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise InvalidRequest("a result made by expand: use its contiguous()")
        self._tensor = tensor.detach()
        self._is_result = is_result
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
        if self._is_result and self._contiguous.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._contiguous)


class Memories:
    """The memory of several tensors, within a block."""

    def __init__(self, tensors: Sequence[Tensor], *, is_result: bool = True) -> None:
        self._all = [Memory(tensor, is_result=is_result) for tensor in tensors]

    def __enter__(self) -> list[memoryview]:
        return [each.__enter__() for each in self._all]

    def __exit__(self, *_: object) -> None:
        for each in self._all:
            each.__exit__()


def check_parts(parts: Sequence[Tensor], own: Tensor, rank: int, size: int) -> None:
    """Check the tensors of ranks, of which one has the numbers of this rank's own.

    Raises InvalidRequest if there is not one a rank, or they differ in dtype or size.
    """
    if len(parts) != size:
        raise InvalidRequest(f"{len(parts)} tensors, expected one for each rank")
    for each in parts:
        if each.dtype != own.dtype:
            raise InvalidRequest(f"tensors of {each.dtype} and of {own.dtype}")
    if parts[rank].numel() != own.numel():
        raise InvalidRequest(
            f"{parts[rank].numel()} and {own.numel()} numbers: tensors for the same "
            "rank differ in size"
        )


def op_named(wanted: Any) -> ReduceOp:
    """Return the name of PyTorch's operation.  Raises InvalidRequest."""
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
    except TypeError:
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
    if function is None or dtype is not torch.bfloat16:
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
