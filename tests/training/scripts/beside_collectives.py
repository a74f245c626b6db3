"""What the backend promises beyond the results of single operations."""

import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from shoal.domain.errors import InvalidRequest


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange_beside_collectives(rank, size)
    then_reduce_again(rank)
    whole = [torch.full((size,), float(rank + each)) for each in range(2)]
    parts = [torch.empty(1) for _ in whole]
    dist.group.WORLD.reduce_scatter_single_coalesced(parts, whole).wait()
    assert [each.item() for each in parts] == [3.0, 6.0]
    with pytest.raises(InvalidRequest, match="a mean of int32"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist.ReduceOp.AVG)
    refuse_tensors_that_do_not_fit(rank, size)
    take_any_input(rank, size)
    dist.barrier()
    # In one piece, for the ranks share the output.
    os.write(sys.stdout.fileno(), f"rank {rank} has done all\n".encode())
    dist.destroy_process_group()


def exchange_beside_collectives(rank: int, size: int) -> None:
    """Receive before anything is sent, in another order, from any rank."""
    left, right = (rank - 1) % size, (rank + 1) % size
    heard = [torch.zeros(length) for length in (3, 2_000_000, 3)]
    waits = [dist.irecv(each, left, tag=tag) for tag, each in enumerate(heard)]
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == size
    for tag in (2, 1, 0):
        waits.append(dist.isend(torch.full_like(heard[tag], tag), right, tag=tag))
    for wait in waits:
        wait.wait()
    assert [each[-1].item() for each in heard] == [0, 1, 2]
    slices = torch.zeros(4, 2)
    both = [
        dist.P2POp(dist.irecv, slices[:, 1], left),
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), right),
    ]
    for wait in dist.batch_isend_irecv(both):
        wait.wait()
    assert slices.tolist() == [[0.0, left]] * 4
    if rank == 0:
        sources = [dist.recv(torch.empty(1)) for _ in range(1, size)]
        assert sorted(sources) == [*range(1, size)]
    else:
        dist.send(torch.ones(1), 0)


def refuse_tensors_that_do_not_fit(rank: int, size: int) -> None:
    """No rank sends anything then, so the group goes on."""
    own = torch.ones(size)
    refused: list[tuple[Any, ...]] = [
        ("all_gather: tensors of", dist.all_gather_into_tensor, own.int(), own[:1]),
        ("all_gather: 1 tensors", dist.all_gather, [own], own),
        ("all_gather: 1 and 3", dist.all_gather, [*own.split(1)], own),
        ("reduce_scatter: 1 and 2", dist.reduce_scatter_tensor, own[:2], own),
        ("reduce_scatter: tensors", dist.reduce_scatter_tensor, own[:1].double(), own),
        ("all_to_all: 2 tensors", dist.all_to_all, [*own.split(1)], [own[:1]] * 2),
        ("all_to_all: 2 and 1", dist.all_to_all, [*own.split(1)], [own[:2]] * size),
        ("all_reduce: torch.float8", dist.all_reduce, own.to(torch.float8_e5m2)),
        ("all_reduce: a result made by expand", dist.all_reduce, own[:1].expand(2)),
    ]
    for why, operation, *tensors in refused:
        with pytest.raises(InvalidRequest, match=why):
            operation(*tensors)
    work = dist.irecv(torch.ones(1), (rank + 1) % size, tag=9)
    with pytest.raises(RuntimeError, match="has not ended"):
        work.wait(timedelta(milliseconds=1))
    dist.barrier()
    dist.isend(own[:1], (rank - 1) % size, tag=9).wait()
    work.wait()


def take_any_input(rank: int, size: int) -> None:
    own = torch.tensor([float(rank)]).expand(2)
    found = [torch.empty(2) for _ in range(size)]
    dist.all_gather(found, own)
    assert [each[1].item() for each in found] == [*range(size)]
    uneven = torch.empty(rank + 1)
    parts = [torch.full((each + 1,), float(each)) for each in range(size)]
    dist.reduce_scatter(uneven, parts)
    assert uneven.tolist() == [float(rank * size)] * (rank + 1)
    whole = torch.empty(size)
    work = dist.all_to_all_single(whole, torch.ones(size), async_op=True)
    (result,) = work.get_future().wait()
    assert result.tolist() == [1.0] * size


def then_reduce_again(rank: int) -> None:
    """Wait for a collective in the callback of another, as the hook PowerSGD does."""

    def again(ended: Future[list[torch.Tensor]]) -> float:
        tensor = ended.value()[0]
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).get_future().wait()
        return float(tensor.item())

    works = [
        dist.all_reduce(torch.tensor([each + rank]), async_op=True)
        for each in range(dist.get_world_size())
    ]
    for each, work in enumerate(works[:1]):
        total = sum(each + other for other in range(dist.get_world_size()))
        assert work.get_future().then(again).wait() == total
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
