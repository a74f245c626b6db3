"""The backend ``shoal`` of ``torch.distributed``: collectives of tensors on the CPU.

A script selects it with ``init_process_group("shoal")``; nothing has to be imported
before, because PyTorch loads it by the entry point ``torch.backends``.  It needs
PyTorch 2.5 or newer; methods that were renamed have both names.

One thread per group runs the operations in the order of the calls, so that the buckets
of ``DistributedDataParallel`` are reduced while backward still runs.
"""

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.domain.errors import InvalidRequest
from shoal.protocols import discover
from shoal.training import collectives
from shoal.training.all_reduces import Compression
from shoal.training.collectives import Kind, Operation, Place, Reduction
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupMembership, RankAddress, RankPort
from shoal.training.reductions import ReduceOp, reduction
from shoal.transports.rank_socket import RankListener
from shoal.transports.tls import self_signed_tls

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

NAME = "shoal"
SECRET_SIZE = 32  # random bytes
DEFAULT_STORE = ("127.0.0.1", "29500")

TORCH_OPS: Mapping[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}

_TORCH_FUNCTIONS: Mapping[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""For dtypes that NumPy lacks."""


def register() -> None:
    """Make the backend known to PyTorch; called when PyTorch is imported."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> "ShoalProcessGroup":
    """Return the process group of a rank; all ranks meet at the store."""
    return ShoalProcessGroup(meet(store, rank, size, timeout), rank, size)


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RankGroup:
    """Exchange addresses over PyTorch's store, and return this rank's group.

    Rank 0 draws the group's name and secret: whoever can use the store is in the group.
    Connections are encrypted unless the ranks meet on loopback.
    """
    seconds = timeout.total_seconds()
    host = _own_address()
    if rank == 0:
        drawn = {
            "group": secrets.token_hex(8),
            "secret": secrets.token_hex(SECRET_SIZE),
            "encrypts": not ip_address(host).is_loopback,
        }
        store.set("shoal/group", json.dumps(drawn))
    terms = json.loads(store.get("shoal/group"))
    wire = next(each.ranks for each in discover().values() if each.ranks)
    tls = self_signed_tls("rank") if terms["encrypts"] else None
    port = RankPort(wire(), RankListener(host, 0, tls), encrypts=terms["encrypts"])
    membership = GroupMembership(terms["group"], 0, rank, size, terms["secret"])
    links = port.open_group(membership, seconds)
    store.set(f"shoal/{rank}", json.dumps([[host], port.port, port.id]))
    keys = {other: f"shoal/{other}" for other in range(size)}
    store.wait(list(keys.values()), timeout)
    links.set_addresses(
        {other: RankAddress(*json.loads(store.get(key))) for other, key in keys.items()}
    )
    return RankGroup(links, seconds, on_close=port.close)


def _own_address() -> str:
    """Return the address of this machine on the way to the store."""
    host = os.environ.get("MASTER_ADDR", DEFAULT_STORE[0])
    port = os.environ.get("MASTER_PORT", DEFAULT_STORE[1])
    family, _, _, _, address = socket.getaddrinfo(host, int(port))[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


class CollectiveWork(dist.Work):  # type: ignore[misc]  # its types are not read
    """An operation of a group; its future has the tensors."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._ended: Future[None] = Future()
        # Only an error raised in ``then`` is one for PyTorch's C++ code, too; it takes
        # that of ``set_exception`` for the result.
        self._future: Future[list[Tensor]] = self._ended.then(self._result_or_error)
        self._done = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        """End it, from the group's thread."""
        self._error = error
        self._done.set()
        self._ended.set_result(None)

    def _result_or_error(self, ended: "Future[None]") -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        if not self._done.wait(seconds or None):  # 0: PyTorch's word for no limit
            raise TimeoutError(f"the operation has not ended within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs


class ShoalProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # as above
    """The collectives of a rank, as ``torch.distributed`` calls them.

    After a rank is lost, late or out of step, every operation raises ``GroupEnded``.
    """

    def __init__(self, group: RankGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group
        self._place = Place(rank, size)
        self._queue: SimpleQueue[tuple[Callable[[], object], CollectiveWork] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run_all, daemon=True)
        self._thread.start()
        self._closed = False

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._submit(tensors, lambda: self._reduce_all(tensors, _op(opts)))

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
            [],
            lambda: self._group.all_reduce(array, op, target, compression=compression),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        # Other ranks' tensors are undefined afterwards, so they may have the result.
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank

        def call() -> None:
            for tensor in tensors:
                with Memory(tensor) as memory:
                    self._run(
                        Kind.BROADCAST,
                        collectives.broadcast(self._place, memory, root),
                    )

        return self._submit(tensors, call)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def call() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                ends, total = [], 0
                for each in gathered:
                    total += _size_of(each)
                    ends.append(total)
                whole = memoryview(bytearray(total))
                end = ends[self._place.rank]
                with Memory(own) as memory:
                    whole[end - len(memory) : end] = memory
                operation = collectives.all_gather(self._place, whole, ends)
                self._run(Kind.ALL_GATHER, operation)
                for each, end in zip(gathered, ends, strict=True):
                    with Memory(each) as memory:
                        memory[:] = whole[end - len(memory) : end]

        return self._submit([each for some in outputs for each in some], call)

    def all_gather_single(
        self, output: Tensor, own: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.allgather([list(output.view(self.size(), *own.shape))], [own])

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        root = 0 if opts is None else opts.rootRank

        def call() -> None:
            for index, own in enumerate(inputs):
                parts = outputs[index] if self._place.rank == root else []
                with Memory(own) as memory, Memories(parts) as memories:
                    self._run(
                        Kind.GATHER,
                        collectives.gather(self._place, memory, memories, root),
                    )

        return self._submit([each for some in outputs for each in some], call)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        root = 0 if opts is None else opts.rootRank

        def call() -> None:
            for index, own in enumerate(outputs):
                parts = inputs[index] if self._place.rank == root else []
                with Memory(own) as memory, Memories(parts) as memories:
                    self._run(
                        Kind.SCATTER,
                        collectives.scatter(self._place, memories, memory, root),
                    )

        return self._submit(outputs, call)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]

        def call() -> None:
            for output, whole in zip(outputs, joined, strict=True):
                combined = tensor_reduction(_op(opts), whole.dtype, self._place.size)
                with Memory(whole) as own, Memory(output) as memory:
                    self._run(
                        Kind.REDUCE_SCATTER,
                        collectives.reduce_scatter(self._place, own, memory, combined),
                    )

        return self._submit(outputs, call)

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter([output], [[whole]], opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def call() -> None:
            with Memories(inputs) as parts, Memories(outputs) as results:
                operation = collectives.all_to_all(self._place, parts, results)
                self._run(Kind.ALL_TO_ALL, operation)

        return self._submit(outputs, call)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        size = self.size()
        outputs = output.split(list(output_sizes) or output.shape[0] // size)
        inputs = whole.split(list(input_sizes) or whole.shape[0] // size)
        return self.alltoall(list(outputs), list(inputs))

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        def call() -> None:
            for tensor in tensors:
                with Memory(tensor) as memory:
                    self._run(Kind.POINT_TO_POINT, collectives.send(to, memory))

        return self._submit(tensors, call)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        def call() -> None:
            for tensor in tensors:
                with Memory(tensor) as memory:
                    operation = collectives.receive(source, memory)
                    self._run(Kind.POINT_TO_POINT, operation)

        return self._submit(tensors, call)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit(
            [], lambda: self._run(Kind.BARRIER, collectives.barrier(self._place))
        )

    # The names of PyTorch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def abort(self) -> None:
        """End the group in all ranks."""
        self._group.abort("this rank has aborted the group")

    def shutdown(self) -> None:
        """Close the connections, after the operations that were called."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._group.close()

    def _reduce_all(self, tensors: list[Tensor], op: ReduceOp) -> None:
        for tensor in tensors:
            combined = tensor_reduction(op, tensor.dtype, self._place.size)
            with Memory(tensor) as memory:
                self._run(
                    Kind.ALL_REDUCE,
                    collectives.all_reduce(self._place, memory, memory, combined),
                )

    def _run(self, kind: Kind, operation: Operation) -> None:
        self._group.run(kind, operation)

    def _submit(
        self, outputs: list[Tensor], call: Callable[[], object]
    ) -> CollectiveWork:
        work = CollectiveWork(outputs)
        self._queue.put((call, work))
        return work

    def _run_all(self) -> None:
        while (item := self._queue.get()) is not None:
            call, work = item
            error: Exception | None = None
            try:
                call()
            except Exception as caught:
                error = caught
            work.finish(error)


class Memory:
    """A tensor's memory as bytes, within a block.

    One that is not contiguous is copied, and copied back at the end of the block.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._contiguous = self._tensor.contiguous()

    def __enter__(self) -> memoryview:
        if not self._contiguous.numel():
            return memoryview(bytearray())
        flat = self._contiguous.reshape(-1).view(torch.uint8)
        memory: memoryview = flat.numpy().data
        return memory

    def __exit__(self, *_: object) -> None:
        if self._contiguous.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._contiguous)


class Memories:
    """The memory of several tensors, within a block."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._all = [Memory(tensor) for tensor in tensors]

    def __enter__(self) -> list[memoryview]:
        return [each.__enter__() for each in self._all]

    def __exit__(self, *_: object) -> None:
        for each in self._all:
            each.__exit__()


def _size_of(tensor: Tensor) -> int:
    size: int = tensor.nbytes
    return size


def _op(opts: Any) -> ReduceOp:
    """Return the operation of PyTorch's options.  Raises InvalidRequest."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    # It is compared: its text names nothing, and it has no hash of its own.
    for name, op in TORCH_OPS.items():
        if wanted == op:
            return name
    raise InvalidRequest("the backend shoal has no such reduction: use SUM or AVG")


def tensor_reduction(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    """Return how tensors of a dtype are combined, by NumPy where it has the dtype.

    Raises InvalidRequest if the dtype has no such operation.
    """
    try:
        numbers = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # such as bfloat16
        return _torch_reduction(op, dtype, size)
    return reduction(op, numbers, size)


def _torch_reduction(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    function = _TORCH_FUNCTIONS.get(op)
    if function is None or not dtype.is_floating_point:
        raise InvalidRequest(f"{dtype} cannot be combined by {op}")

    def combine(own: memoryview, received: memoryview, result: memoryview) -> None:
        function(
            torch.frombuffer(own, dtype=dtype),
            torch.frombuffer(received, dtype=dtype),
            out=torch.frombuffer(result, dtype=dtype),
        )

    def divide(result: memoryview) -> None:
        torch.frombuffer(result, dtype=dtype).div_(size)

    return Reduction(dtype.itemsize, combine, divide if op == "mean" else None)
