"""Train small models in all of PyTorch's parallel ways: BACKEND FOLDER.

All ranks print the same figures with each backend.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def steps(trained: nn.Module, count: int = STEPS, seed: int = 0) -> list[float]:
    """Take some steps, and return their losses."""
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = trained(torch.rand(6, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp(rank: int, folder: str) -> Any:
    cpu = torch.device("cpu")
    return steps(FullyShardedDataParallel(model(), device_id=cpu), seed=rank)


def fsdp2(rank: int, folder: str) -> Any:
    trained = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (trained[0], trained[2], trained):
        fully_shard(layer, mesh=mesh)
    losses = steps(trained, seed=rank)
    saved = get_model_state_dict(trained)
    checkpoint.save(saved, checkpoint_id=folder)
    expected = [each.full_tensor().sum().item() for each in saved.values()]
    steps(trained, seed=rank)
    checkpoint.load(get_model_state_dict(trained), checkpoint_id=folder)
    loaded = get_model_state_dict(trained).values()
    assert [each.full_tensor().sum().item() for each in loaded] == expected
    return losses


def tensor_parallel(rank: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return steps(parallelize_module(model(), mesh, plan))


def ddp(rank: int, folder: str) -> Any:
    torch.manual_seed(rank)
    # The first step has the numbers and the buffers of rank 0.
    plain = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Linear(256, 4))
    trained = DistributedDataParallel(plain, bucket_cap_mb=0.01)  # several buckets
    losses = steps(trained, seed=rank)
    return [
        *losses,
        *(each.double().sum().item() for each in plain.state_dict().values()),
    ]


def hook(state: Callable[[], Any], function: Any) -> Callable[[int, str], Any]:
    def train(rank: int, folder: str) -> Any:
        trained = DistributedDataParallel(model())
        trained.register_comm_hook(state(), function)
        return steps(trained, seed=rank)

    return train


def join(rank: int, folder: str) -> Any:
    """Rank 0 has fewer batches."""
    trained = DistributedDataParallel(model())
    with Join([trained]):
        steps(trained, STEPS + rank, seed=rank)
    return [each.sum().item() for each in trained.parameters()]


def sparse_gradients(rank: int, folder: str) -> Any:
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 3, sparse=True)
    trained = DistributedDataParallel(embedding)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for step in range(STEPS):
        trained(torch.tensor([rank, step])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight.flatten().tolist()


def pipeline(schedule: Any) -> Callable[[int, str], Any]:
    def train(rank: int, folder: str) -> Any:
        torch.manual_seed(rank)
        part = nn.Linear(4, 4)
        stage = PipelineStage(part, rank, dist.get_world_size(), torch.device("cpu"))
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        steps_of = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        for _ in range(STEPS):
            if rank == 0:
                steps_of.step(torch.ones(8, 4))
            elif rank == dist.get_world_size() - 1:
                steps_of.step(target=torch.zeros(8, 4), losses=losses)
            else:
                steps_of.step()
            optimizer.step()
            optimizer.zero_grad()
        return [part.weight.sum().item()]

    return train


WAYS: Mapping[str, Callable[[int, str], Any]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp2": fsdp2,
    "tensor parallel": tensor_parallel,
    "powersgd": hook(
        lambda: powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
    "fp16": hook(lambda: None, default_hooks.fp16_compress_hook),
    "join": join,
    "sparse gradients": sparse_gradients,
    "gpipe": pipeline(ScheduleGPipe),
    "1f1b": pipeline(Schedule1F1B),
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backend, folder = sys.argv[1:]
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for way, train in WAYS.items():
        figures = " ".join(f"{each:.3f}" for each in train(rank, f"{folder}/{way}"))
        # In one piece, for the ranks share the output.
        os.write(sys.stdout.fileno(), f"rank {rank} {way}: {figures}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
