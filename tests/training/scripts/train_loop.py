"""Runs of ``shoal.train`` with three processes each, forked from one that has PyTorch.

train_loop.py FOLDER PORT prints the exit codes and what ranks print, run by run.
"""

import hashlib
import importlib
import multiprocessing
import os
import signal
import sys

import torch

import shoal
from shoal.protocols import discover
from shoal.training.checkpoints.state_tree import memory_of
from shoal.training.loop.plan import TrainingReport

RANKS = 3


def rank_main(rank: int, port: int, folder: str, steps: int, killed_at: int) -> None:
    """Train as one rank, which is killed at a step if it is rank 1."""

    def on_step(report: TrainingReport) -> None:
        if report.step == killed_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    torch.manual_seed(rank)
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 1),
    )
    result = shoal.train(
        model,
        torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        loss=lambda model, batch: torch.nn.functional.mse_loss(
            model(batch[0]), batch[1]
        ),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        batch=20,
        epochs=100,
        steps=steps,
        checkpoints=folder,
        checkpoint_every=5,
        equal_shares=True,
        on_step=on_step,
    )
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(memory_of(tensor).numpy())
    line = f"rank {rank} step {result.step} digest {digest.hexdigest()}\n"
    os.write(1, line.encode())


def run(folder: str, port: int, steps: int, killed_at: int = 0) -> None:
    """Run all ranks to their end, and print their exit codes."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_main, args=(rank, port, folder, steps, killed_at))
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    codes = [each.exitcode for each in ranks]
    os.write(1, f"{os.path.basename(folder)} {codes}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)  # and no thread of this process before it forks
    # What all ranks import is imported once.
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    importlib.import_module("shoal.training.loop.train")
    discover()
    folder, port = sys.argv[1], int(sys.argv[2])
    run(f"{folder}/undisturbed", port, 17)
    run(f"{folder}/killed", port, 17, killed_at=13)
    run(f"{folder}/killed", port, 17)
