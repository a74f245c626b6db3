"""An ordinary script of DistributedDataParallel; its backend is an argument."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)
        ),
        bucket_cap_mb=0.01,  # several buckets
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        if rank == size - 1 and sys.argv[2:] == ["killed", str(step)]:
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
    numbers = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    hashes: list[object] = [None] * size
    dist.all_gather_object(hashes, hashlib.sha256(numbers).hexdigest())
    # In one piece, for the ranks share the output.
    line = f"rank {rank} loss {loss.item():.6f} hashes {len(set(hashes))}\n"
    os.write(sys.stdout.fileno(), line.encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
