"""An ordinary script of DistributedDataParallel, in which a rank kills itself: RANK."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
LAST = 7  # step of the killed rank


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(
        nn.Sequential(
            # Its buffers are broadcast from rank 0 before each step.
            *(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
        ),
        bucket_cap_mb=0.01,  # several buckets
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.full((32, 64), 1.0 + rank)).square().mean()
        if step == LAST and rank == int(sys.argv[1]):
            os.kill(os.getpid(), 9)
        loss.backward()
        optimizer.step()
    counts = torch.tensor([1])
    dist.all_reduce(counts)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    numbers = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    hashed = hashlib.sha256(numbers).hexdigest()
    # In one piece, for the ranks share the output.
    line = f"hash {hashed} counted {counts.item()} mean {ones.item() / size}\n"
    os.write(sys.stdout.fileno(), line.encode())
    try:
        dist.all_gather_object([None] * size, rank)
    except Exception as error:
        os.write(sys.stdout.fileno(), f"{error}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
