"""A rank of bench/ddp.py: ENGINE FAULT, which happens to the last; rank 0 measures.

Its first line says that it has begun.
"""

import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

LIMIT = timedelta(seconds=120)
WIDTH, LAYERS, LETTERS = 192, 3, 256
BATCH, LENGTH = 4, 64
TURNS, STEPS = 4, 10
STEPS_AFTER = 25
SIGNALS = {"killed": signal.SIGKILL, "paused": signal.SIGSTOP}


class LanguageModel(nn.Module):
    """A transformer that predicts the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        found: Tensor = self.head(self.layers(self.embed(letters), mask=mask))
        return found


class Training:
    """One copy of the model, trained over one backend, or by torchft."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        model = LanguageModel()
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if group is None:
            from ddp_torchft import managed  # in an environment of its own

            self.model, self.optimizer = managed(model, optimizer)
        else:
            self.model = DistributedDataParallel(model, process_group=group)
            self.optimizer = optimizer

    def step(self) -> tuple[float, float]:
        """Take a step, and return its seconds, and those of this rank's CPU time."""
        began, cpu_began = time.perf_counter(), time.process_time()
        letters = torch.randint(LETTERS, (BATCH, LENGTH + 1))
        self.optimizer.zero_grad()
        scores = self.model(letters[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(scores, letters[:, 1:].flatten()).backward()
        self.optimizer.step()
        return time.perf_counter() - began, time.process_time() - cpu_began


def main() -> None:
    engine, fault = sys.argv[1:]
    print(json.dumps({}), flush=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = None
    if engine == "shoal":
        group = dist.new_group(backend="shoal", timeout=LIMIT)
    copies = {"gloo": Training(dist.group.WORLD), engine: Training(group)}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in copies}
    for turn in range(TURNS + 1):
        for name in copies if turn % 2 else reversed(copies):
            found = [copies[name].step() for _ in range(STEPS)]
            if turn:  # the first warms up
                steps[name] += found
    tested = copies[engine]
    if rank == size - 1:
        tested.step()
        backward = tested.model.module.head.weight.register_hook
        backward(lambda gradient: os.kill(os.getpid(), SIGNALS[fault]))
        tested.step()
    after = [tested.step()[0] for _ in range(STEPS_AFTER)]
    if rank == 0:
        medians = {
            name: [statistics.median(kind) for kind in zip(*each, strict=True)]
            for name, each in steps.items()
        }
        pause = max(after) - statistics.median(after)
        print(json.dumps({"steps": medians, "pause": {"s": pause}}), flush=True)
    os._exit(0)  # gloo's group is broken


if __name__ == "__main__":
    main()
