"""A group that goes on without ranks that are lost, and can take new ones in.

It has the collectives of ``RankGroup``.  When a rank is lost or paused, the others form
the next generation, complete the operation that was under way, and go on; the caller
notices by ``place`` and ``story``.  ``generations.sequence`` says how results stay the
same in all ranks.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import Compression
from shoal.training.collectives import Array, Bytes, Kind, Place, ReduceOp
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.generations import sequence
from shoal.training.generations.messages import RankMissing, RankState
from shoal.training.group import TIMEOUT, RankGroup
from shoal.training.group_values import name_odd_ranks
from shoal.training.rank_port import GroupEnded, RankPort

T = TypeVar("T")

HASH_SIZE = 32  # bytes; longer hashes are cut


class ElasticGroup:
    """The collectives of one rank of a run, whose group changes.

    Each blocks until all have completed it, or all that are left.  They raise
    GroupEnded once this rank takes no part any more: the run has ended, or goes on
    without this rank, because it was paused or unreachable.

    Ranks are numbered in the present generation, as in ``place``; ``gang_ranks`` are
    the numbers that they had at first.  An operation with a root raises RankMissing if
    that rank is lost.
    """

    def __init__(
        self,
        connect: Callable[[sequence.Greeting], sequence.RendezvousLink],
        port: RankPort,
        run_id: str,
        state: RankState,
        timeout: float = TIMEOUT,
        reachable: Callable[[Sequence[str]], Sequence[str]] = tuple,
        meeting: float = sequence.FORMATION_TIMEOUT,
    ) -> None:
        self.sequence = sequence.OperationSequence(
            connect, port, run_id, state, timeout, reachable, meeting
        )
        self._first = self.sequence.formation

    @property
    def place(self) -> Place:
        """This rank, and the size of the present generation."""
        formation = self.sequence.formation
        return Place(formation.rank, len(formation.ranks))

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self.sequence.formation.generation

    @property
    def gang_ranks(self) -> Sequence[int]:
        """The first numbers of the present ranks."""
        return [each.gang_rank for each in self.sequence.formation.ranks]

    @property
    def story(self) -> Sequence[str]:
        """What happened before the present generation began."""
        return self.sequence.formation.story

    @property
    def is_new(self) -> bool:
        """Whether this rank joined ranks that had begun already."""
        return self._first.admitted

    @property
    def newest(self) -> int:
        """The first rank that has the state of training, for ranks that are new."""
        formation = self.sequence.formation
        operations = [each.operation for each in formation.ranks]
        return operations.index(max(operations))

    @property
    def waiting(self) -> int:
        """How many new ranks wait to be admitted."""
        return self.sequence.waiting

    def set_step(self, step: int) -> None:
        """Set the step of training to which the next operations belong."""
        self.sequence.set_step(step)

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        result: Array | None = None,
        *,
        compression: Compression | None = None,
    ) -> Array:
        """Combine the arrays of all ranks, into ``result`` or in place.

        All ranks get the same bits, also when a rank is lost meanwhile: so all come to
        the same verdict about numbers that are not finite: one of any rank makes the
        result so.  A sum is
        that of the ranks that are left, and so is a mean.

        Raises InvalidRequest as ``RankGroup`` does.
        """
        target = array if result is None else result

        def call(group: RankGroup, memory: Bytes) -> None:
            group.all_reduce(
                array, op, _shaped(memory, target), compression=compression
            )

        memory = self.sequence.run_shared(Kind.ALL_REDUCE, target.nbytes, call)
        target[...] = _shaped(memory, target)
        if isinstance(compression, ErrorFeedback):
            # Also of a result that another rank has: it has used what this one sent.
            compression.commit()
        return target

    def reduce_scatter(self, array: Array, op: ReduceOp = "sum") -> Array:
        """Combine the arrays of all ranks, and return part r of the result to rank r.

        Raises InvalidRequest as ``RankGroup`` does, also when ranks that are left do
        not divide the length.
        """
        return self._returned(
            Kind.REDUCE_SCATTER, lambda group: group.reduce_scatter(array, op)
        )

    def all_gather(self, array: Array) -> Array:
        """Return the arrays of all ranks that are left, stacked in their order."""
        return self._returned(Kind.ALL_GATHER, lambda group: group.all_gather(array))

    def broadcast(
        self, array: Array, root: int = 0, *, replicated: bool = False
    ) -> Array:
        """Copy the root's array into that of each rank, and return it.

        ``replicated``: each rank has a valid array already; if the root is lost, the
        first rank that is left takes its place.
        """
        gang_root = self._gang_rank(root)

        def call(group: RankGroup) -> None:
            present = self.sequence.rank_of(gang_root)
            if present is None and not replicated:
                raise RankMissing(f"rank {gang_root}, the root of a broadcast, is lost")
            # Its successor must not send the root's unfinished array.
            received = array.copy() if replicated else array
            group.broadcast(received, present or 0)
            if replicated:
                array[...] = received

        self.sequence.run(Kind.BROADCAST, call)
        return array

    def gather(self, array: Array, root: int = 0) -> Array | None:
        """Return the arrays of all ranks to the root, stacked; None to others."""
        gang_root = self._gang_rank(root)
        return self._returned(
            Kind.GATHER, lambda group: group.gather(array, self._present(gang_root))
        )

    def scatter(
        self, result: Array, arrays: Sequence[Array] = (), root: int = 0
    ) -> Array:
        """Copy array r of the root into rank r's ``result``, and return it.

        The arrays are those of the ranks at the call: those of lost ranks are not sent.
        """
        gang_root, gang_ranks = self._gang_rank(root), self.gang_ranks
        if self.place.rank == root and len(arrays) != len(gang_ranks):
            raise InvalidRequest(f"scatter: expected {len(gang_ranks)} arrays")
        by_gang_rank = dict(zip(gang_ranks, arrays, strict=False))

        def call(group: RankGroup) -> Array:
            left = [by_gang_rank[each] for each in self.gang_ranks if by_gang_rank]
            return group.scatter(result, left, self._present(gang_root))

        return self._returned(Kind.SCATTER, call)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.sequence.run(Kind.BARRIER, lambda group: None)

    def compare(self, digest: bytes) -> None:
        """Check that all ranks have the same hash, such as that of their parameters.

        Raises GroupEnded in all ranks, and ends the run, if not; the error names the
        ranks whose hash differs from that of most.
        """
        own = np.frombuffer(digest[:HASH_SIZE], np.uint8)
        found = [row.tobytes() for row in self.all_gather(own)]
        odd = name_odd_ranks(dict(zip(self.gang_ranks, found, strict=True)))
        if not odd:
            return
        reason = f"the replicas differ: {odd}"
        self.sequence.stop(reason)
        raise GroupEnded(reason)

    def admit(self) -> bool:
        """Let ranks in that wait; return whether there are new ones.

        All ranks call it after the same operation.  If it returns True, ``place`` has
        changed, and all ranks, also the new ones, then broadcast the state of training
        from ``newest``.
        """
        waiting = np.array([self.waiting])
        if not int(self._reduced(waiting)[0]):
            return False
        before = len(self.gang_ranks)
        self.sequence.renew()
        return len(self.gang_ranks) > before

    def stop(self, reason: str) -> None:
        """End the run in all ranks."""
        self.sequence.stop(reason)

    def close(self) -> None:
        """Wait for all ranks to call it; then disconnect.

        Raises GroupEnded if the run goes on without this rank.
        """
        self.sequence.leave()

    def abort(self) -> None:
        """Disconnect at once; the other ranks go on without this one."""
        self.sequence.close()

    def _reduced(self, waiting: Array) -> Array:
        """Return the maximum of all ranks, which all have when one has it."""
        return self._returned(
            Kind.ALL_REDUCE, lambda group: group.all_reduce(waiting.copy(), "max")
        )

    def _returned(self, kind: Kind, call: Callable[[RankGroup], T]) -> T:
        """Complete an operation, and return the result of its last attempt."""
        results: list[T] = []

        def keep(group: RankGroup) -> None:
            results[:] = [call(group)]

        self.sequence.run(kind, keep)
        return results[0]

    def _gang_rank(self, rank: int) -> int:
        gang_ranks = self.gang_ranks
        if not 0 <= rank < len(gang_ranks):
            raise InvalidRequest(f"rank {rank} of a group of {len(gang_ranks)}")
        return gang_ranks[rank]

    def _present(self, gang_rank: int) -> int:
        rank = self.sequence.rank_of(gang_rank)
        if rank is None:
            raise RankMissing(f"rank {gang_rank}, the root of an operation, is lost")
        return rank


def _shaped(memory: Bytes, like: Array) -> Array:
    """Return bytes as an array of another one's shape and dtype."""
    return memory.view(like.dtype).reshape(like.shape)
