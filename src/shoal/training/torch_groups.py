"""Groups of ``torch.distributed`` as groups of arrays, as training uses them."""

import torch
import torch.distributed as dist

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import Compression, ReducingGroup
from shoal.training.collectives import Place
from shoal.training.pytorch.process_group import Array, ShoalProcessGroup
from shoal.training.pytorch.tensors import TORCH_OPS
from shoal.training.reductions import ReduceOp


def reducing_group(group: ReducingGroup | dist.ProcessGroup | None) -> ReducingGroup:
    """Return a group of arrays; None: the default group of ``torch.distributed``."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return TorchGroup(group)
    return group


class TorchGroup:
    """A process group of any backend that has tensors on the CPU.

    Compression needs the backend shoal.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.place = Place(group.rank(), group.size())

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        result: Array | None = None,
        *,
        compression: Compression | None = None,
    ) -> Array:
        """Combine the arrays of all ranks, as ``RankGroup.all_reduce`` does."""
        target = array if result is None else result
        if isinstance(self._group, ShoalProcessGroup):
            self._group.reduce_arrays(array, op, target, compression).wait()
            return target
        if compression is not None:
            raise InvalidRequest("compression: needs the backend shoal")
        if target is not array:
            target[...] = array
        tensor = torch.from_numpy(target)
        # Gloo has no mean.
        torch_op = TORCH_OPS["sum" if op == "mean" else op]
        dist.all_reduce(tensor, torch_op, group=self._group)
        if op == "mean":
            tensor /= self.place.size
        return target

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Copy the root's array into that of each rank, and return it."""
        tensor = torch.from_numpy(array)
        source = dist.get_global_rank(self._group, root)
        dist.broadcast(tensor, source, group=self._group)
        return array
