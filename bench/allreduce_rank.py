"""A rank of bench/allreduce.py: PORT RANK RANKS ROUNDS; rank 0 prints what it measured.

Its first line says that it has begun.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from allreduce import BACKENDS, SIZES

LIMIT = timedelta(seconds=120)


def main() -> None:
    port, rank, ranks, rounds = map(int, sys.argv[1:])
    print(json.dumps({}), flush=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=LIMIT,
    )
    groups = {name: dist.new_group(backend=name, timeout=LIMIT) for name in BACKENDS}
    for turn in range(rounds + 1):
        for size in SIZES:
            for name in BACKENDS if turn % 2 else reversed(BACKENDS):
                seconds, cpu = measure(groups[name], size, rank, ranks)
                if turn and rank == 0:  # the first warms up
                    row = {"backend": name, "size": size}
                    row |= {"seconds": seconds, "cpu": cpu}
                    print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measure(
    group: dist.ProcessGroup, size: int, rank: int, ranks: int
) -> tuple[float, float]:
    """Return the seconds of one all-reduce, and those of CPU in all ranks."""
    vector = torch.full((size * 250_000,), rank + 1.0)
    dist.barrier(group=group)
    began, used = time.perf_counter(), time.process_time()
    dist.all_reduce(vector, group=group)
    seconds = time.perf_counter() - began
    cpu = torch.tensor([time.process_time() - used])
    assert vector[0] == vector[-1] == ranks * (ranks + 1) / 2
    dist.all_reduce(cpu)
    return seconds, float(cpu)


if __name__ == "__main__":
    main()
