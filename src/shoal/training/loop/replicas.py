"""The replicas of a model: the same buffers and the same parameters on all ranks."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.training.checkpoints.state_tree import memory_of
from shoal.training.group_values import Collectives, name_odd_ranks
from shoal.training.rank_port import GroupEnded


class ReplicasDiffer(GroupEnded):
    """The ranks do not have the same parameters any more; the run ends."""


def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """Return the SHA-256 of the numbers of some tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(memory_of(each).numpy())
    return digest.digest()


def compare_replicas(
    group: Collectives, digest: bytes, members: Sequence[int], step: int
) -> None:
    """Check that all ranks have the same digest: the same numbers in some tensors.

    Raises ReplicasDiffer on all ranks, which names those that differ from most.
    """
    import numpy as np

    own = np.frombuffer(digest, np.uint8)
    found = [row.tobytes() for row in group.all_gather(own)]
    if len(found) != len(members):
        return  # a rank was lost, and the next step shows who is left
    if reason := name_odd_ranks(dict(zip(members, found, strict=True))):
        raise ReplicasDiffer(f"the replicas differ after step {step}: {reason}")


def agree_on_buffers(group: Collectives, buffers: Iterable[Tensor]) -> None:
    """Give all ranks the same buffers: means of floats, and the largest of others.

    Buffers, such as the statistics of BatchNorm, come from each rank's own samples.
    """
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for each in buffers:
        if each.numel():
            kinds[each.is_floating_point()].append(each)
    for is_float, some in kinds.items():
        if not some:
            continue
        dtype = torch.float64 if is_float else torch.int64
        row = torch.cat([each.detach().cpu().reshape(-1).to(dtype) for each in some])
        group.all_reduce(row.numpy(), "mean" if is_float else "max")
        for each, part in zip(
            some, row.split([each.numel() for each in some]), strict=True
        ):
            each.copy_(part.view(each.shape))
