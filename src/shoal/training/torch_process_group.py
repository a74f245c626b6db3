"""The collectives of a rank, as ``torch.distributed`` calls them.

One thread per group runs the collectives in the order of the calls, so that the
buckets of ``DistributedDataParallel`` are reduced while backward still runs.  Sends and
receives are independent of them.
"""

import atexit
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, chain
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.domain.errors import InvalidRequest
from shoal.training import collectives
from shoal.training.all_reduces import Compression
from shoal.training.collectives import Array, Kind, ReduceOp
from shoal.training.point_to_point import ArrayTransfer
from shoal.training.rank_port import GroupEnded
from shoal.training.torch_calls import CallTerms, in_all_forms
from shoal.training.torch_runners import OperationRunner
from shoal.training.torch_tensors import (
    Memories,
    Memory,
    check_parts,
    tensor_reduction,
)
from shoal.training.torch_work import CallbackThreads, CollectiveWork

NAME = "shoal"
DATA_PARALLEL = "torch.nn.parallel.distributed"


class ShoalProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # as above
    """The collectives of a rank, as ``torch.distributed`` calls them.

    ``rank`` and ``size`` are those of the script, and remain.  ``limit`` is that of one
    operation, in seconds.  Operations raise what
    the runner's do: GroupEnded after the end of the group.
    """

    def __init__(
        self, runner: OperationRunner, rank: int, size: int, limit: float
    ) -> None:
        super().__init__(rank, size)
        self._runner = runner
        self._rank = rank
        self._limit = limit
        self._name = self._description = ""
        self._callbacks = CallbackThreads()
        self._queue: SimpleQueue[
            tuple[str, Callable[[], object], CollectiveWork] | None
        ] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_all, daemon=True)
        self._thread.start()
        self._latest: CollectiveWork | None = None
        self._closed = False
        # One that is in PyTorch's code when the interpreter ends kills the process.
        atexit.register(self._end_thread)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802  # as above, all four
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @in_all_forms("op")
    def allreduce(self, tensors: list[Tensor], terms: CallTerms) -> dist.Work:
        if len(tensors) > 1:
            # Gloo adds these up too, as those of a process with several devices.
            raise InvalidRequest("allreduce of several tensors: allreduce_coalesced")
        return self.allreduce_coalesced(tensors, terms.torch_op, terms.timeout)

    def reduce_arrays(
        self,
        array: Array,
        op: ReduceOp,
        target: Array,
        compression: Compression | None = None,
    ) -> CollectiveWork:
        """Combine the arrays of all ranks in ``target``, which may be ``array``.

        ``compression`` is that of ``RankGroup.all_reduce``.
        """
        return self._submit(
            "all_reduce",
            [],
            lambda: self._runner.group.all_reduce(
                array, op, target, compression=compression
            ),
        )

    @in_all_forms("op")
    def allreduce_coalesced(self, tensors: list[Tensor], terms: CallTerms) -> dist.Work:
        return self._submit(
            "all_reduce",
            tensors,
            lambda: self._reduce_all(tensors, terms.op),
            terms.limit,
        )

    @in_all_forms("root", "op")
    def reduce(self, tensors: list[Tensor], terms: CallTerms) -> dist.Work:
        # Other ranks' tensors are undefined afterwards, so they may have the result.
        return self._submit(
            "reduce", tensors, lambda: self._reduce_all(tensors, terms.op), terms.limit
        )

    @in_all_forms("root")
    def broadcast(self, tensors: list[Tensor], terms: CallTerms) -> dist.Work:
        replicated = _is_called_by_data_parallel()

        def call() -> None:
            for tensor in tensors:
                with Memory(tensor) as memory:
                    self._runner.broadcast(memory, terms.root, replicated=replicated)

        return self._submit("broadcast", tensors, call, terms.limit)

    @in_all_forms()
    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        terms: CallTerms,
    ) -> dist.Work:
        return self._submit(
            "all_gather",
            [*chain(*output_tensors)],
            lambda: self._gather(output_tensors, input_tensors),
            terms.limit,
        )

    def all_gather_single(
        self, output: Tensor, own: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        parts = [
            list(output.view(self.size(), own.numel()))
            for output, own in zip(outputs, inputs, strict=True)
        ]
        return self.allgather(parts, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        # By rank and tensor, where ``allgather`` has them by tensor and rank.
        return self.allgather([*map(list, zip(*outputs, strict=True))], inputs, opts)

    @in_all_forms("root")
    def gather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        terms: CallTerms,
    ) -> dist.Work:
        root = terms.root

        def call() -> None:
            for index, own in enumerate(input_tensors):
                parts = output_tensors[index] if self._rank == root else []
                if self._rank == root:
                    check_parts(parts, own, root, self.size())
                with (
                    Memory(own, is_result=False) as memory,
                    Memories(parts) as memories,
                ):
                    self._runner.run(
                        Kind.GATHER, collectives.gather, memory, memories, root
                    )

        return self._submit("gather", [*chain(*output_tensors)], call, terms.limit)

    @in_all_forms("root")
    def scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        terms: CallTerms,
    ) -> dist.Work:
        root = terms.root

        def call() -> None:
            for index, own in enumerate(output_tensors):
                parts = input_tensors[index] if self._rank == root else []
                if self._rank == root:
                    check_parts(parts, own, root, self.size())
                with (
                    Memory(own) as memory,
                    Memories(parts, is_result=False) as memories,
                ):
                    self._runner.run(
                        Kind.SCATTER, collectives.scatter, memories, memory, root
                    )

        return self._submit("scatter", output_tensors, call, terms.limit)

    @in_all_forms("op")
    def reduce_scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        terms: CallTerms,
    ) -> dist.Work:
        joined = [torch.cat([each.reshape(-1) for each in of]) for of in input_tensors]

        def call() -> None:
            for output, parts, whole in zip(
                output_tensors, input_tensors, joined, strict=True
            ):
                check_parts(parts, output, self._rank, self.size())
                combined = tensor_reduction(terms.op, whole.dtype, self.size())
                ends = [*accumulate(map(_size_of, parts))]
                with Memory(whole) as own, Memory(output) as memory:
                    self._runner.run(
                        Kind.REDUCE_SCATTER,
                        collectives.reduce_scatter,
                        *(own, memory, combined, ends),
                    )

        return self._submit("reduce_scatter", output_tensors, call, terms.limit)

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        parts = [[*each.reshape(-1).tensor_split(self.size())] for each in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    @in_all_forms()
    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        terms: CallTerms,
    ) -> dist.Work:
        return self._exchange(output_tensors, input_tensors, output_tensors, terms)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        size = self.size()
        outputs = output.split(list(output_sizes) or [output.shape[0] // size] * size)
        inputs = whole.split(list(input_sizes) or [whole.shape[0] // size] * size)
        terms = CallTerms(timeout=timeout or getattr(opts, "timeout", opts))
        return self._exchange(outputs, inputs, [output], terms)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        return self._transfer(self._runner.send, tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._transfer(self._runner.receive, tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._transfer(self._runner.receive, tensors, None, tag)

    @in_all_forms()
    def barrier(self, terms: CallTerms) -> dist.Work:
        return self._submit("barrier", [], self._runner.group.barrier, terms.limit)

    # The names of PyTorch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def abort(self) -> None:
        """End the group; one that loses ranks goes on without this one."""
        self._runner.abort()

    def shutdown(self) -> None:
        """Close the connections, after the operations that were called.

        While an error ends the script, the others are not waited for.
        """
        if not self._closed:
            self._closed = True
            atexit.unregister(self._end_thread)
            self._queue.put(None)
            self._thread.join()
            if sys.exc_info()[0] is None:
                self._runner.group.close()
            else:
                self._runner.abort()
            self._callbacks.close()

    def _end_thread(self) -> None:
        """End the thread of a group that the script leaves open."""
        if self._latest is not None and not self._latest.is_completed():
            self._runner.abort()
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._callbacks.close()

    def _exchange(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        results: list[Tensor],
        terms: CallTerms,
    ) -> dist.Work:
        def call() -> None:
            check_parts(inputs, outputs[self._rank], self._rank, self.size())
            check_parts(outputs, inputs[self._rank], self._rank, self.size())
            with (
                Memories(inputs, is_result=False) as parts,
                Memories(outputs) as received,
            ):
                self._runner.run(
                    Kind.ALL_TO_ALL, collectives.all_to_all, parts, received
                )

        return self._submit("all_to_all", results, call, terms.limit)

    def _gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        """Copy each input of all ranks to its outputs, whose sizes may differ."""
        for gathered, own in zip(outputs, inputs, strict=True):
            check_parts(gathered, own, self._rank, self.size())
            ends = [*accumulate(map(_size_of, gathered))]
            whole = memoryview(bytearray(ends[-1]))
            end = ends[self._rank]
            with Memory(own, is_result=False) as memory:
                whole[end - len(memory) : end] = memory
            self._runner.run(Kind.ALL_GATHER, collectives.all_gather, whole, ends)
            for each, end in zip(gathered, ends, strict=True):
                with Memory(each) as memory:
                    memory[:] = whole[end - len(memory) : end]

    def _reduce_all(self, tensors: list[Tensor], op: ReduceOp) -> None:
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                self._add_sparse(tensor, op)
                continue
            with Memory(tensor) as memory:
                self._runner.reduce(memory, op, tensor.dtype)

    def _add_sparse(self, tensor: Tensor, op: ReduceOp) -> None:
        """Add up the numbers of all ranks that are not 0, each at its index."""
        if op != "sum":
            raise InvalidRequest(f"{op} of sparse tensors: they can be added only")
        own = tensor.coalesce()
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.size())]
        self._gather([counts], [torch.tensor([own._nnz()])])
        sizes = [int(each) for each in counts]
        indices = [own.indices().new_empty(own.sparse_dim(), each) for each in sizes]
        shape = own.values().shape[1:]
        values = [own.values().new_empty(each, *shape) for each in sizes]
        self._gather([indices, values], [own.indices(), own.values()])
        found = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat(values),
            tensor.shape,
            check_invariants=True,
        )
        tensor.copy_(found.coalesce())

    def _transfer(
        self,
        begin: Callable[[ArrayTransfer], None],
        tensors: list[Tensor],
        peer: int | None,
        tag: int,
    ) -> CollectiveWork:
        (tensor,) = tensors  # as gloo's
        memory = Memory(tensor, is_result=begin != self._runner.send)

        def end(error: Exception | None) -> None:
            memory.__exit__()
            work.source = transfer.peer
            work.finish(error)

        transfer = ArrayTransfer(peer, tag, memory.__enter__(), end)
        work = CollectiveWork(
            tensors, self._callbacks, self._limit, lambda: self._runner.expire(peer)
        )
        begin(transfer)
        return work

    def _submit(
        self,
        name: str,
        outputs: list[Tensor],
        call: Callable[[], object],
        limit: float | None = None,
    ) -> CollectiveWork:
        """Run an operation after those before; errors have its name.

        ``limit`` is a shorter one than the group's, in seconds.
        """
        self._latest = work = CollectiveWork(
            outputs, self._callbacks, limit, lambda: self._runner.expire(None)
        )
        if self._closed:
            work.finish(GroupEnded(f"{name}: the group was closed"))
        self._queue.put((name, call, work))
        return work

    def _run_all(self) -> None:
        while (item := self._queue.get()) is not None:
            name, call, work = item
            error: Exception | None = None
            try:
                call()
            except InvalidRequest as refused:
                error = InvalidRequest(f"{name}: {refused}")
            except Exception as caught:
                # The thread that waits for the work raises it.
                error = caught
            work.finish(error)


def _size_of(tensor: Tensor) -> int:
    size: int = tensor.nbytes
    return size


def _is_called_by_data_parallel() -> bool:
    """Return whether ``DistributedDataParallel`` broadcasts its buffers.

    These are replicas in all ranks, so that any rank may be their root.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == DATA_PARALLEL:
            return True
        frame = frame.f_back
    return False
