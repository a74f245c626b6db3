"""Runs the operations of PyTorch's process group on a group of ranks.

PyTorch's scripts have one rank and one size for ever.  A group that stays as it is
carries out their operations as they are; one that loses ranks does so where what a
script gets is still what it expects.
"""

import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeAlias

import torch

from shoal.training import collectives
from shoal.training.collectives import Bytes, Kind, Operation, Place, ReduceOp
from shoal.training.elastic_group import ElasticGroup
from shoal.training.generations.messages import RankMissing
from shoal.training.group import RankGroup
from shoal.training.point_to_point import ArrayTransfer
from shoal.training.torch_tensors import tensor_reduction

P = ParamSpec("P")
Collective: TypeAlias = Callable[Concatenate[Place, P], Operation]
"""Returns an operation for a rank in a group of some size; it may be called again."""

log = logging.getLogger("shoal.training")


class FixedRunner:
    """A group that ends with its first failure."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def reduce(self, memory: memoryview, op: ReduceOp, dtype: torch.dtype) -> None:
        """Combine the numbers of all ranks, in place."""
        combined = tensor_reduction(op, dtype, self.group.place.size)
        self.run(Kind.ALL_REDUCE, collectives.all_reduce, memory, memory, combined)

    def broadcast(self, memory: memoryview, root: int, *, replicated: bool) -> None:
        """Copy the root's memory; ``replicated``: any rank may take its place."""
        self.run(Kind.BROADCAST, collectives.broadcast, memory, root)

    def run(
        self, kind: Kind, make: Collective[P], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Carry out an operation that needs all ranks."""
        self.group.run(kind, make(self.group.place, *args, **kwargs))

    def send(self, transfer: ArrayTransfer) -> None:
        """Begin to send memory to a rank, from any thread."""
        self.group.point_to_point.send(transfer)

    def receive(self, transfer: ArrayTransfer) -> None:
        """Begin to receive memory from a rank, from any thread."""
        self.group.point_to_point.receive(transfer)

    def expire(self, rank: int | None) -> None:
        """A transfer has waited for a rank beyond the limit."""
        self.group.expire(rank)

    def abort(self) -> None:
        """End the group, or this rank's part in it."""
        self.group.abort("this rank has aborted the group")


class ElasticRunner:
    """A group that goes on without ranks that are lost.

    Operations that give each rank a part, or one part of each rank, raise RankMissing
    then.  Sums of floats are multiplied by the ratio of the sizes then and now, because
    scripts divide them by the size that they know.
    """

    def __init__(self, group: ElasticGroup, size: int) -> None:
        self.group = group
        self._sequence = group.sequence
        self._size = size
        self._said = group.generation

    def reduce(self, memory: memoryview, op: ReduceOp, dtype: torch.dtype) -> None:
        def call(group: RankGroup, result: Bytes) -> None:
            combined = tensor_reduction(op, dtype, group.place.size, self._size)
            operation = collectives.all_reduce(
                group.place, memory, result.data, combined
            )
            group.run(Kind.ALL_REDUCE, operation)

        result = self._sequence.run_shared(Kind.ALL_REDUCE, len(memory), call)
        memory[:] = result.data
        self._say()

    def broadcast(self, memory: memoryview, root: int, *, replicated: bool) -> None:
        def call(group: RankGroup) -> None:
            present = self._sequence.rank_of(root)
            if present is None and not replicated:
                raise RankMissing(
                    f"rank {root}, the root of a broadcast, is lost: the others do not "
                    "have what it would have sent"
                )
            # Its successor must not send the root's unfinished array.
            received = memoryview(bytearray(memory)) if replicated else memory
            operation = collectives.broadcast(group.place, received, present or 0)
            group.run(Kind.BROADCAST, operation)
            if replicated:
                memory[:] = received

        self._sequence.run(Kind.BROADCAST, call)

    def run(
        self, kind: Kind, make: Collective[P], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        def call(group: RankGroup) -> None:
            self._check(kind.name.lower(), group)
            group.run(kind, make(group.place, *args, **kwargs))

        self._sequence.run(kind, call)

    def send(self, transfer: ArrayTransfer) -> None:
        group = self._group_of_all("send", transfer)
        group.point_to_point.send(transfer)

    def receive(self, transfer: ArrayTransfer) -> None:
        group = self._group_of_all("receive", transfer)
        group.point_to_point.receive(transfer)

    def expire(self, rank: int | None) -> None:
        self._sequence.present.expire(rank)

    def abort(self) -> None:
        self.group.abort()

    def _group_of_all(self, name: str, transfer: ArrayTransfer) -> RankGroup:
        """Return the present group, for a transfer that ends the run if it fails.

        The other rank may have completed it, so that it cannot be repeated.
        """
        group, on_end = self._sequence.present, transfer.on_end
        self._check(name, group)

        def end(error: Exception | None) -> None:
            if error is not None:
                self._sequence.stop(f"{error}: a {name} cannot be repeated")
            on_end(error)

        transfer.on_end = end
        return group

    def _check(self, name: str, group: RankGroup) -> None:
        """Raise RankMissing if ranks are lost."""
        if group.place.size < self._size:
            lost = sorted({*range(self._size)} - {*self.group.gang_ranks})
            raise RankMissing(
                f"{name} needs all ranks, and ranks {lost} are lost: all_reduce, and "
                "broadcast from a rank that is left, do not"
            )

    def _say(self) -> None:
        """Log once in each generation how sums are rescaled."""
        generation, left = self.group.generation, self.group.place.size
        if generation != self._said and left != self._size:
            log.warning(
                "generation=%d sums of floats are multiplied by %d/%d: the script "
                "divides them by %d, and %d ranks are left",
                *(generation, self._size, left, self._size, left),
            )
        self._said = generation


OperationRunner: TypeAlias = FixedRunner | ElasticRunner
"""Carries out operations, one at a time, with the ranks of the script."""
