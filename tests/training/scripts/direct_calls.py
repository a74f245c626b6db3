"""Calls of a process group itself, in all of PyTorch's forms, on gloo and on shoal."""

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.domain.errors import InvalidRequest
from shoal.training.rank_port import GroupEnded

LIMIT = timedelta(seconds=300)  # on a busy machine
SIZE = 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    shoal, gloo = (
        dist.new_group(range(SIZE), LIMIT, backend=name) for name in ("shoal", "gloo")
    )
    for name, call in calls(rank).items():
        assert repr(call(shoal)) == repr(call(gloo)), name
    # Gloo would add them up: a result that differs is worse than none.
    with pytest.raises(InvalidRequest, match="several tensors"):
        shoal.allreduce([own(rank), own(rank)])
    if rank == 0:
        with pytest.raises(GroupEnded, match="is late"):
            shoal.barrier(timeout=timedelta(milliseconds=1)).wait()
    dist.barrier()
    os.write(sys.stdout.fileno(), f"rank {rank} has done all\n".encode())
    dist.destroy_process_group()


def own(number: int) -> Tensor:
    return torch.full((2, 3), number + 1.0)


def calls(rank: int) -> Mapping[str, Callable[[Any], Any]]:
    def parts(base: int = 0) -> list[Tensor]:
        return [own(base + each) for each in range(SIZE)]

    def of_root(tensors: list[Tensor]) -> list[Tensor]:
        return tensors if rank == 1 else []

    def result_of(
        method: str, result: Any, *args: Any, at: int | None = None, **named: Any
    ) -> Callable[[Any], Any]:
        def call(group: Any) -> Any:
            taken = torch.clone(result) if isinstance(result, Tensor) else result
            if isinstance(result, list):
                taken = [torch.clone(each) for each in result]
            getattr(group, method)(taken, *args, **named).wait()
            return taken if at in (None, rank) else None

        return call

    mine, whole = own(rank), torch.arange(4.0 * SIZE) * (rank + 1)
    highest = dist.AllreduceOptions()
    highest.reduceOp = ReduceOp.MAX
    return {
        "a tensor": result_of("allreduce", mine),
        "and an operation": result_of("allreduce", mine, ReduceOp.MAX),
        "by name": result_of("allreduce", mine, op=ReduceOp.PRODUCT, timeout=LIMIT),
        "a list": result_of("allreduce", [mine], ReduceOp.MIN, LIMIT),
        "a list and options": result_of("allreduce", [mine], opts=highest),
        "coalesced": result_of("allreduce_coalesced", [mine, mine]),
        "broadcast": result_of("broadcast", mine, 1),
        "broadcast by name": result_of("broadcast", mine, root=1, timeout=LIMIT),
        "reduce": result_of("reduce", mine, 1, ReduceOp.MAX, at=1),
        "reduce by name": result_of("reduce", mine, root=1, at=1),
        "gather": result_of("gather", of_root(parts(9)), mine, 1),
        "scatter": result_of("scatter", mine, of_root(parts(5)), root=1),
        "all gather": result_of("allgather", parts(9), input_tensor=mine),
        "all gather, one tensor": result_of("_allgather_base", whole, whole[:4]),
        "reduce scatter": result_of("reduce_scatter", mine, parts(rank), ReduceOp.MAX),
        "reduce scatter, one tensor": result_of(
            "_reduce_scatter_base", whole[:4], whole
        ),
        "all to all": result_of("alltoall", parts(), parts(3 * rank)),
        "all to all, one tensor": result_of(
            "alltoall_base", whole, whole, [], [], LIMIT
        ),
        "barrier": lambda group: group.barrier(timeout=LIMIT).wait(),
    }


if __name__ == "__main__":
    main()
