"""What the backend promises beyond the results of single operations."""

import os
import sys

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
