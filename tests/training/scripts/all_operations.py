"""Every operation of torch.distributed that the backend has, on a few ranks."""

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
    total = size * (size + 1) / 2

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        tensor = torch.ones(5, dtype=dtype) * (rank + 1)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [total] * 5, (dtype, tensor)
    slices = torch.full((4, 4), float(rank))
    dist.all_reduce(slices[:, 1], op=dist.ReduceOp.MAX)
    assert slices[:, 1].tolist() == [size - 1.0] * 4
    assert slices[:, 0].tolist() == [float(rank)] * 4
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.item() == (size - 1) / 2
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    later = dist.all_reduce(torch.ones(3), async_op=True)
    later.wait()
    assert later.is_completed()

    begun = torch.full((2, 2), rank)
    dist.broadcast(begun, src=1)
    assert begun.tolist() == [[1, 1], [1, 1]]
    rows = [torch.empty(2) for _ in range(size)]
    dist.all_gather(rows, torch.full((2,), float(rank)))
    assert [each[0].item() for each in rows] == list(range(size))
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered)
    if gathered is not None:
        assert [each.item() for each in gathered] == list(range(size))
    part = torch.empty(1)
    parts = [torch.tensor([10.0 + each]) for each in range(size)] if rank == 0 else None
    dist.scatter(part, parts)
    assert part.item() == 10 + rank
    outcome = torch.empty(2)
    dist.reduce_scatter(outcome, [torch.full((2,), float(r)) for r in range(size)])
    assert outcome.tolist() == [float(size * rank)] * 2
    received = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(received, [torch.tensor([10.0 * rank + r]) for r in range(size)])
    assert [each.item() for each in received] == [10.0 * r + rank for r in range(size)]

    if rank == 0:
        dist.send(torch.tensor([5.0]), 1)
    elif rank == 1:
        heard = torch.zeros(1)
        dist.recv(heard, 0)
        assert heard.item() == 5
    exchange_beside_collectives(rank, size)
    then_reduce_again(rank)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "é" * rank})
    assert objects == [{"rank": r, "text": "é" * r} for r in range(size)]
    texts: list[object] = ["from the root" if rank == 0 else None]
    dist.broadcast_object_list(texts)
    assert texts == ["from the root"]
    pair = dist.new_group([0, 1])
    if rank < 2:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=pair)
        assert ones.item() == 2
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.barrier()
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
