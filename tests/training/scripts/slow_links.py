"""A model trained with compressed gradients, and by DiLoCo; on a few ranks."""

import hashlib
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.domain.errors import InvalidRequest
from shoal.training.torch_diloco import DiLoCo
from shoal.training.torch_hooks import CompressionState, compressed_mean_hook

STEPS = 40


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4)
    )


def batches(rank: int) -> Any:
    random = torch.Generator().manual_seed(1000 + rank)
    for _ in range(STEPS):
        batch = torch.randn(32, 32, generator=random)
        yield batch, batch[:, :4].abs()


def assert_equal(model: nn.Module) -> None:
    numbers = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    hashes: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hashlib.sha256(numbers).hexdigest())
    assert len(set(hashes)) == 1


def train_compressed(state: CompressionState | None, **options: Any) -> float:
    """Train with DistributedDataParallel; return the last loss of all ranks."""
    model = DistributedDataParallel(model_of(dist.get_rank()), **options)
    if state is not None:
        model.register_comm_hook(state, compressed_mean_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch, wanted in batches(dist.get_rank()):
        optimizer.zero_grad()
        loss = (model(batch) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_equal(model)
    return mean_loss(losses)


def train_alone(group: dist.ProcessGroup | None, compression: Any) -> float:
    model = model_of(dist.get_rank())
    diloco = DiLoCo(model, group, every=8, compression=compression)
    assert_equal(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.005)
    losses = []
    for batch, wanted in batches(dist.get_rank()):
        optimizer.zero_grad()
        loss = (model(batch) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if diloco.step():
            assert_equal(model)
    assert diloco.outer.steps == STEPS // 8
    other = model_of(7)
    resumed = DiLoCo(other, group, every=8)
    resumed.load_state_dict(diloco.state_dict())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    return mean_loss(losses)


def mean_loss(losses: list[float]) -> float:
    mean = torch.tensor(losses[-8:]).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return float(mean.item())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    small = {"bucket_cap_mb": 0.01}  # several buckets
    dense = train_compressed(None, **small)
    assert dense < 0.5, dense
    for compression in ("fp16", "int8", "fp8", "auto"):
        loss = train_compressed(CompressionState(compression), **small)
        assert loss == pytest.approx(dense, rel=0.1), (compression, loss, dense)
    assert train_compressed(CompressionState("topk", ratio=0.1)) < 0.5
    with pytest.raises(InvalidRequest, match="expected one of fp16"):
        CompressionState("fp4")  # type: ignore[arg-type]  # what it refuses

    alone = train_alone(None, None)
    assert alone < 0.4, alone
    assert train_alone(None, "int8") == pytest.approx(alone, rel=0.1)
    gloo = dist.new_group(backend="gloo")
    assert train_alone(gloo, None) == pytest.approx(alone, rel=0.1)
    with pytest.raises(InvalidRequest, match="need the backend"):
        CompressionState("int8", gloo)
    # In one piece, for the ranks share the output.
    os.write(sys.stdout.fileno(), f"rank {dist.get_rank()} has done all\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
