"""DiLoCo for a PyTorch model, with any inner optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import Compression, ReducingGroup
from shoal.training.collectives import Array, Place, ReduceOp
from shoal.training.diloco import OUTER_MOMENTUM, OUTER_RATE, OuterOptimizer
from shoal.training.torch_process_group import ShoalProcessGroup
from shoal.training.torch_tensors import TORCH_OPS


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


class DiLoCo:
    """Trains a model alone, and takes an outer step with all ranks every few steps.

    ``group`` is a ``RankGroup``, a group of ``torch.distributed``, or None for its
    default group.  All ranks begin with the root's parameters, buffers and outer state:
    they construct it together, and those that have one call ``share`` when others join.

    Buffers are not trained: those of floats become their mean at each outer step, and
    others their maximum.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ReducingGroup | dist.ProcessGroup | None = None,
        *,
        every: int,
        rate: float = OUTER_RATE,
        momentum: float = OUTER_MOMENTUM,
        compression: Compression | None = None,
        root: int = 0,
    ) -> None:
        if every < 1:
            raise InvalidRequest(
                f"an outer step every {every} steps: expected 1 or more"
            )
        self._group = reducing_group(group)
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._buffers = list(model.buffers())
        self._every = every
        self._steps = 0  # since the latest outer step
        self._began: list[Array] = []  # the buffers then
        self.outer = OuterOptimizer(
            _flat(self._parameters),
            rate=rate,
            momentum=momentum,
            compression=compression,
        )
        self.share(root)

    def step(self) -> bool:
        """Count a step of the inner optimizer; return whether an outer one followed.

        Raises GroupEnded if a rank was lost in the outer step: the model, its buffers
        and the outer state are then as before, and ``set_group`` and the next call try
        it again.
        """
        self._steps += 1
        if self._steps < self._every:
            return False
        buffers = [self._combined(each) for each in self._buffers]
        # In dtypes other than float32, the ranks began with the rounded parameters.
        began = self._rounded(self.outer.parameters)
        finite = self.outer.step(self._group, began - _flat(self._parameters))
        self._begin(buffers if finite else self._began)
        return True

    def set_group(self, group: ReducingGroup | dist.ProcessGroup | None = None) -> None:
        """Go on with another group of ranks that have the same outer state."""
        self._group = reducing_group(group)

    def share(self, root: int = 0) -> None:
        """Give the root's state to all ranks, which all call it.

        Steps since the latest outer one are dropped, in all ranks.
        """
        self.outer.share(self._group, root)
        self._begin(
            [self._group.broadcast(_array(each), root) for each in self._buffers]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state as tensors, to be saved just after an outer step."""
        return {
            name: value if isinstance(value, int) else torch.from_numpy(value.copy())
            for name, value in self.outer.state().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved outer state; the model gets its parameters."""
        self.outer.restore(
            {
                name: value if isinstance(value, int) else value.numpy()
                for name, value in state.items()
            }
        )
        self._begin([_array(each) for each in self._buffers])

    def _begin(self, buffers: list[Array]) -> None:
        """Give the model the outer parameters, and these buffers."""
        parts = self._split(self.outer.parameters)
        with torch.no_grad():
            for tensor, part in zip(self._parameters, parts, strict=True):
                tensor.copy_(part)
            for tensor, array in zip(self._buffers, buffers, strict=True):
                tensor.copy_(torch.from_numpy(array).view(tensor.shape))
        self._began = buffers
        self._steps = 0

    def _combined(self, buffer: Tensor) -> Array:
        array = _array(buffer)
        return self._group.all_reduce(
            array, "mean" if buffer.is_floating_point() else "max"
        )

    def _rounded(self, flat: Array) -> Array:
        parts = self._split(flat)
        return _flat(
            [
                part.to(tensor.dtype)
                for part, tensor in zip(parts, self._parameters, strict=True)
            ]
        )

    def _split(self, flat: Array) -> list[Tensor]:
        parts = torch.from_numpy(flat).split([p.numel() for p in self._parameters])
        return [
            part.view(tensor.shape)
            for part, tensor in zip(parts, self._parameters, strict=True)
        ]


def _flat(tensors: list[Tensor]) -> Array:
    """Return the numbers of all tensors, in a float32 vector of its own."""
    parts = [each.detach().reshape(-1).to("cpu", torch.float32) for each in tensors]
    flat: Array = torch.cat(parts).numpy()
    return flat


def _array(tensor: Tensor) -> Array:
    """Return a copy of a tensor as a vector; NumPy has no bfloat16."""
    own = tensor.detach().reshape(-1).to("cpu", copy=True)
    array: Array = (own.float() if own.dtype == torch.bfloat16 else own).numpy()
    return array
