"""Each operation of torch.distributed on the backends shoal and gloo, side by side.

Rank 0 prints, as JSON, what became of each case: by operation, what was tried, and
``same``, ``only shoal``, ``only gloo``, ``neither``, or ``different``, and the errors.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = timedelta(seconds=300)  # for either, on a busy machine
SIZES: Sequence[tuple[int, ...]] = [(0,), (), (1,), (6,), (6, 4), (600_001,)]
LAYOUTS = ("contiguous", "transposed", "strided")
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


class Place(NamedTuple):
    """One backend's group, and this process's place in it."""

    group: Any
    rank: int
    size: int
    tensor: Callable[[int], Tensor]
    """Makes a tensor of the case, whose numbers depend on a number."""
    run_async: bool
    reduction: Any

    def empty(self, count: int | None = None) -> Any:
        """Return tensors of the case's layout, all 0."""
        if count is None:
            return self.tensor(0).zero_()
        return [self.tensor(0).zero_() for _ in range(count)]

    def all(self, base: int = 0) -> list[Tensor]:
        return [self.tensor(base + each) for each in range(self.size)]

    def call(self, operation: Callable[..., Any], *args: Any, **named: Any) -> None:
        work = operation(*args, group=self.group, async_op=self.run_async, **named)
        if self.run_async:
            work.wait()

    def peer(self, distance: int) -> int:
        return global_rank(self.group, (self.rank + distance) % self.size)

    @property
    def root(self) -> int:
        return global_rank(self.group, self.size - 1)

    @property
    def is_root(self) -> bool:
        return self.rank == self.size - 1


def global_rank(group: Any, rank: int) -> int:
    return int(dist.get_global_rank(group, rank))


def all_reduce(at: Place) -> Any:
    found = at.tensor(at.rank)
    at.call(dist.all_reduce, found, at.reduction)
    return found


def reduce(at: Place) -> Any:
    found = at.tensor(at.rank)
    at.call(dist.reduce, found, at.root, at.reduction)
    return found if at.is_root else None


def broadcast(at: Place) -> Any:
    found = at.tensor(at.rank)
    at.call(dist.broadcast, found, at.root)
    return found


def all_gather(at: Place) -> Any:
    found = at.empty(at.size)
    at.call(dist.all_gather, found, at.tensor(at.rank))
    return found


def all_gather_into_tensor(at: Place) -> Any:
    own = at.tensor(at.rank)
    found = own.new_zeros((at.size * own.shape[0], *own.shape[1:]))
    at.call(dist.all_gather_into_tensor, found, own)
    return found


def gather(at: Place) -> Any:
    found = at.empty(at.size) if at.is_root else None
    at.call(dist.gather, at.tensor(at.rank), found, at.root)
    return found


def scatter(at: Place) -> Any:
    found = at.empty()
    at.call(dist.scatter, found, at.all() if at.is_root else None, at.root)
    return found


def reduce_scatter(at: Place) -> Any:
    found = at.empty()
    at.call(dist.reduce_scatter, found, at.all(at.rank), at.reduction)
    return found


def reduce_scatter_tensor(at: Place) -> Any:
    found = at.empty()
    at.call(dist.reduce_scatter_tensor, found, torch.cat(at.all(at.rank)), at.reduction)
    return found


def all_to_all(at: Place) -> Any:
    found = at.empty(at.size)
    at.call(dist.all_to_all, found, at.all(3 * at.rank))
    return found


def all_to_all_single(at: Place) -> Any:
    whole = torch.cat(at.all(3 * at.rank))
    found = torch.zeros_like(whole)
    at.call(dist.all_to_all_single, found, whole)
    return found


def all_to_all_single_with_sizes(at: Place) -> Any:
    """Rank r sends s + 1 rows to rank s."""
    own = at.tensor(at.rank)
    rows = [own] * sum(range(1, at.size + 1))
    found = torch.zeros_like(torch.stack([own] * (at.size * (at.rank + 1))))
    at.call(
        dist.all_to_all_single,
        found,
        torch.stack(rows),
        [at.rank + 1] * at.size,
        [*range(1, at.size + 1)],
    )
    return found


def send_and_recv(at: Place) -> Any:
    found = at.empty()
    if at.rank % 2:
        dist.recv(found, at.peer(-1), group=at.group)
    elif at.rank + 1 < at.size:
        dist.send(at.tensor(at.rank), at.peer(1), group=at.group)
    return found


def recv_from_any(at: Place) -> Any:
    found = at.empty()
    if at.rank == 1:
        return found, dist.recv(found, group=at.group)
    if at.rank == 0:
        dist.send(at.tensor(at.rank), at.peer(1), group=at.group)
    return found


def isend_and_irecv_with_tags(at: Place) -> Any:
    found = at.empty(2)
    waits = [
        dist.irecv(each, at.peer(-1), group=at.group, tag=tag)
        for tag, each in enumerate(found)
    ]
    for tag in (1, 0):
        own = at.tensor(at.rank + tag)
        waits.append(dist.isend(own, at.peer(1), group=at.group, tag=tag))
    for wait in waits:
        wait.wait()
    return found


def batch_isend_irecv(at: Place) -> Any:
    found = at.empty()
    operations = [
        dist.P2POp(dist.irecv, found, at.peer(-1), at.group),
        dist.P2POp(dist.isend, at.tensor(at.rank), at.peer(1), at.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found


def barrier(at: Place) -> Any:
    at.call(dist.barrier)


def monitored_barrier(at: Place) -> Any:
    dist.monitored_barrier(at.group, LIMIT)


def all_gather_object(at: Place) -> Any:
    found: list[Any] = [None] * at.size
    dist.all_gather_object(found, {"rank": at.rank, "text": "é" * at.rank}, at.group)
    return found


def gather_object(at: Place) -> Any:
    found: list[Any] | None = [None] * at.size if at.is_root else None
    dist.gather_object({"rank": at.rank}, found, at.root, at.group)
    return found


def scatter_object_list(at: Place) -> Any:
    found: list[Any] = [None]
    values = [{"for": each} for each in range(at.size)] if at.is_root else None
    dist.scatter_object_list(found, values, at.root, at.group)
    return found


def broadcast_object_list(at: Place) -> Any:
    found = [{"of": at.rank}, "é" * at.rank]
    dist.broadcast_object_list(found, at.root, at.group)
    return found


def send_and_recv_object_list(at: Place) -> Any:
    found: list[Any] = [None]
    if at.rank == 1:
        dist.recv_object_list(found, at.peer(-1), group=at.group)
    elif at.rank == 0:
        dist.send_object_list([{"of": at.rank}], at.peer(1), group=at.group)
    return found


def all_reduce_sparse(at: Place) -> Any:
    found = at.tensor(at.rank).to_sparse()
    at.call(dist.all_reduce, found, at.reduction)
    return found.to_dense()


def all_reduce_coalesced(at: Place) -> Any:
    found = [at.tensor(at.rank), at.tensor(at.rank + 1)]
    at.call(dist.all_reduce_coalesced, found, at.reduction)
    return found


def all_gather_coalesced(at: Place) -> Any:
    found = [at.empty(2) for _ in range(at.size)]
    own = [at.tensor(at.rank), at.tensor(at.rank + 1)]
    at.call(dist.all_gather_coalesced, found, own)
    return found


OF_NUMBERS = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
OF_ROWS = (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single)
OF_TENSORS = (
    *(all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather),
    *(scatter, reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single),
    *(all_to_all_single_with_sizes, send_and_recv, recv_from_any),
    *(isend_and_irecv_with_tags, batch_isend_irecv, all_reduce_coalesced),
    *(all_gather_coalesced, all_reduce_sparse),
)
OF_OBJECTS = (
    *(all_gather_object, gather_object, scatter_object_list, broadcast_object_list),
    send_and_recv_object_list,
)


class Case(NamedTuple):
    """An operation, and what it is tried with; ``what`` says it in the table."""

    operation: Callable[[Place], Any]
    what: str = ""
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (6, 4)
    layout: str = "contiguous"
    reduction: str = "SUM"
    of_pair: bool = False
    run_async: bool = False


def cases() -> Iterator[Case]:
    # Before all that gloo refuses: its barrier fails with the error of an operation
    # that one of its threads still holds, and the other ranks wait for that rank.
    yield from cases_of_groups(barrier, monitored_barrier)
    for each in OF_TENSORS:
        for dtype in DTYPES:
            yield Case(each, str(dtype).removeprefix("torch."), dtype)
        for layout in LAYOUTS[1:]:
            yield Case(each, layout, layout=layout)
        for shape in SIZES:
            # Gloo cannot receive nothing from any rank, and ends the process later.
            if (shape or each not in OF_ROWS) and (
                shape != (0,) or each is not recv_from_any
            ):
                yield Case(each, f"shape {[*shape]}", shape=shape)
        yield Case(each, "a group of two", of_pair=True)
        yield Case(each, "async_op", run_async=True)
    for each in OF_NUMBERS:
        for reduction in REDUCTIONS[1:]:
            dtype = torch.int32 if reduction.startswith("B") else torch.float32
            yield Case(each, reduction, dtype, reduction=reduction)
        yield Case(each, "BAND of floats", reduction="BAND")
        yield Case(each, "AVG of integers", torch.int32, reduction="AVG")
    yield from cases_of_groups(*OF_OBJECTS)


def cases_of_groups(*operations: Callable[[Place], Any]) -> Iterator[Case]:
    for each in operations:
        yield Case(each, "a group of three")
        yield Case(each, "a group of two", of_pair=True)


def tensor_of(case: Case, *, contiguous: bool) -> Callable[[int], Tensor]:
    def make(number: int) -> Tensor:
        count = 1
        for each in case.shape:
            count *= each
        numbers = torch.arange(count) % 3 + number + 1
        tensor = numbers.reshape(case.shape).to(case.dtype)
        if case.layout == "transposed":
            tensor = tensor.t()
        elif case.layout == "strided":
            tensor = tensor[:, ::2]
        return tensor.contiguous() if contiguous else tensor

    return make


def outcome(case: Case, name: str, group: Any) -> tuple[Any, str]:
    """Return the result of a case and its error.

    Gloo gets contiguous tensors: it takes others for such, or refuses them.
    """
    place = Place(
        group,
        dist.get_rank(group),
        dist.get_world_size(group),
        tensor_of(case, contiguous=name == "gloo"),
        case.run_async,
        getattr(dist.ReduceOp, case.reduction),
    )
    try:
        return case.operation(place), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def is_equal(found: Any, expected: Any) -> bool:
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(is_equal, found, expected))
    if isinstance(found, Tensor):
        return bool(found.dtype == expected.dtype and torch.equal(found, expected))
    return bool(found == expected)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    report: list[dict[str, str]] = []
    groups = [
        {name: dist.new_group(ranks, LIMIT, backend=name) for name in ("shoal", "gloo")}
        for ranks in (range(size), (0, size - 1))
    ]
    for case in cases():
        if case.of_pair and rank not in (0, size - 1):
            continue
        (ours, our_error), (theirs, their_error) = (
            outcome(case, *each) for each in groups[case.of_pair].items()
        )
        if our_error or their_error:
            verdict = {
                (True, True): "neither",
                (True, False): "only gloo",
                (False, True): "only shoal",
            }[bool(our_error), bool(their_error)]
        else:
            verdict = "same" if is_equal(ours, theirs) else "different"
        line = {"operation": case.operation.__name__, "case": case.what}
        line |= {"verdict": verdict, "shoal": our_error, "gloo": their_error}
        report.append(line)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, report)
    if rank == 0:
        sys.stdout.write(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
