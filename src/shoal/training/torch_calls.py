"""The forms in which scripts call an operation of a process group.

``torch.distributed`` passes lists of tensors, and options.  A script that calls the
group itself may pass a tensor, and in place of the options a reduction, a root or a
timeout, as to PyTorch's own groups (``c10d/init.cpp`` of PyTorch 2.13).
"""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shoal.training.collectives import ReduceOp
from shoal.training.torch_tensors import op_named

_LIST_NAMES = {
    "tensor": "tensors",
    "input": "input_tensors",
    "output": "output_tensors",
    "input_tensor": "input_tensors",
    "output_tensor": "output_tensors",
}


class CallTerms(NamedTuple):
    """What a call asks for beside its tensors."""

    torch_op: Any = dist.ReduceOp.SUM
    root: int = 0
    timeout: timedelta | None = None

    @property
    def op(self) -> ReduceOp:
        """The reduction.  Raises InvalidRequest."""
        return op_named(self.torch_op)

    @property
    def limit(self) -> float | None:
        """The call's own limit in seconds; None: that of its group."""
        seconds = 0.0 if self.timeout is None else self.timeout.total_seconds()
        return seconds if seconds > 0 else None


def in_all_forms(
    *settings: str,
) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """Let scripts call a method of lists of tensors, and CallTerms, in all forms.

    ``settings`` are what follows the tensors, if not options: ``root``, ``op``.
    """

    def decorate(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        _, *names, _ = inspect.signature(method).parameters

        @wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> dist.Work:
            order = (*names, *settings, "timeout")
            given = dict(zip(order, args, strict=False))
            given |= {_LIST_NAMES.get(name, name): named[name] for name in named}
            tensors = [given.pop(name) for name in names]
            if any(isinstance(each, Tensor) for each in tensors):
                tensors = [[each] for each in tensors]
            return method(self, *tensors, _terms(given, order[len(names) :]))

        return call

    return decorate


def _terms(given: dict[str, Any], order: Sequence[str]) -> CallTerms:
    """Return the terms of a call's arguments; options are where settings begin."""
    options = given.pop("opts", given.get(order[0]))
    if hasattr(options, "asyncOp"):
        return CallTerms(
            getattr(options, "reduceOp", dist.ReduceOp.SUM),
            getattr(options, "rootRank", 0),
            options.timeout,
        )
    given = {name: each for name, each in given.items() if each is not None}
    return CallTerms(
        given.get("op", dist.ReduceOp.SUM), given.get("root", 0), given.get("timeout")
    )
