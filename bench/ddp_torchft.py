"""A copy of a model that torchft's manager trains, for bench/ddp_rank.py.

Each rank is a replica group of its own.  Rank 0, which is never lost, runs the
lighthouse.
"""

import os
from datetime import timedelta

import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchft.coordination import LighthouseServer

LEAST = 2  # replicas that go on
JOIN_TIMEOUT = 1000  # milliseconds that a quorum waits for replicas that were there
TIMEOUT = timedelta(seconds=10)  # of an operation
LOOPBACK = "127.0.0.1"

_running: list[object] = []
"""What ends with its last reference, and must not before the process."""


def managed(
    model: nn.Module, optimizer: Optimizer
) -> tuple[DistributedDataParallel, Optimizer]:
    """Return a model and its optimizer whose steps a quorum decides on."""
    silence()
    rank = dist.get_rank()
    address: list[str | None] = [None]
    if rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{LOOPBACK}:0", min_replicas=LEAST, join_timeout_ms=JOIN_TIMEOUT
        )
        _running.append(lighthouse)
        address = [lighthouse.address()]
    dist.broadcast_object_list(address)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=LEAST,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"replica_{rank}",
        hostname=LOOPBACK,
        init_sync=False,  # all begin with the same numbers
    )
    _running.extend((store, manager))
    return Managed(manager, model), torchft.Optimizer(manager, optimizer)


class Managed(torchft.DistributedDataParallel):
    """A replica that waits for each bucket before it returns it.

    torchft 0.2.0 returns a future that is not there when the all-reduce has failed, and
    ends with an AssertionError.
    """

    @staticmethod
    def _comm_hook(manager: torchft.Manager, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        manager.allreduce(gradients).wait()
        done: Future[Tensor] = Future()
        done.set_result(gradients)
        return done


def silence() -> None:
    """Drop what torchft and its server write to standard error, at each step."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    os.close(quiet)
