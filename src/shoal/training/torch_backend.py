"""The backend ``shoal`` of ``torch.distributed``: collectives of tensors on the CPU.

A script selects it with ``init_process_group("shoal")``; nothing has to be imported
before, because PyTorch loads it by the entry point ``torch.backends``.  It needs
PyTorch 2.5 or newer; methods that were renamed have both names.

Under ``shoal train`` the ranks meet at the coordinator, and their group goes on without
ranks that are lost.  Otherwise they meet at PyTorch's store.
"""

import os
from datetime import timedelta

import torch.distributed as dist

from shoal.training.launch.script import RUN_URL
from shoal.training.meeting import join_run, meet
from shoal.training.torch_process_group import NAME, ShoalProcessGroup
from shoal.training.torch_runners import ElasticRunner, FixedRunner

_joined: list[str] = []  # the run of this process, which it can join once


def register() -> None:
    """Make the backend known to PyTorch; called when PyTorch is imported."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> ShoalProcessGroup:
    """Return the process group of a rank; all ranks meet.

    Under ``shoal train`` the first group is that of all ranks, which may lose some;
    others end with their first failure.
    """
    seconds = timeout.total_seconds()
    if RUN_URL in os.environ and not _joined:
        _joined.append(os.environ[RUN_URL])
        group = join_run(seconds, meeting=seconds)
        return ShoalProcessGroup(ElasticRunner(group, size), rank, size, seconds)
    runner = FixedRunner(meet(store, rank, size, timeout))
    return ShoalProcessGroup(runner, rank, size, seconds)
