"""The collectives, without I/O: which rank sends which part to which rank, and when.

Each collective is a generator of one rank.  It yields ``SendSegment`` and
``ReceiveSegment``; a driver with sockets, or a simulator, carries them out.  All ranks
run the same collectives, in the same order, with the same sizes.

Arrays are bytes here.  They travel in segments, so that a rank adds one while the next
is on its way, and passes it on at once.

The ring is that of ``mixed_group``, so that a sum has the same bits in either:
an array has one chunk a rank, and in step s of the first half rank r sends chunk r - s
to its right, and adds chunk r - s - 1 from its left.  After that, rank r has the sum of
chunk r + 1; in the second half the sums go around.  (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009.)
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

SEGMENT_SIZE = 512 << 10  # bytes: its sum is still in a core's cache when it is sent


class Kind(IntEnum):
    """The kinds of collectives, by their numbers on the wire."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8
    POINT_TO_POINT = 9
    HALF_FLOAT_ALL_REDUCE = 10
    FP8_ALL_REDUCE = 11
    INT8_ALL_REDUCE = 12
    SPARSE_ALL_REDUCE = 13


class Place(NamedTuple):
    """A rank, and the size of its group."""

    rank: int
    size: int

    @property
    def left(self) -> int:
        """The rank from which the ring receives."""
        return (self.rank - 1) % self.size

    @property
    def right(self) -> int:
        """The rank to which the ring sends."""
        return (self.rank + 1) % self.size


class SendSegment(NamedTuple):
    """Send a segment; it must not change before the operation ends."""

    to: int
    data: memoryview


class ReceiveSegment(NamedTuple):
    """Receive the next segment from a rank into memory of exactly its size."""

    source: int
    into: memoryview


Operation: TypeAlias = Generator[SendSegment | ReceiveSegment, None, None]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How numbers of ``unit`` bytes are combined.

    ``combine`` takes this rank's numbers, those received, and where the result goes,
    which may be where this rank's are; ``finish`` changes a complete result in place,
    as a mean does; None: it is complete.
    """

    unit: int
    combine: Callable[[memoryview, memoryview, memoryview], None]
    finish: Callable[[memoryview], None] | None = None


ReduceOp: TypeAlias = Literal[
    "sum", "mean", "product", "min", "max", "and", "or", "xor"
]

_UFUNCS: Mapping[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduction(op: ReduceOp, dtype: np.dtype[Any], size: int) -> Reduction:
    """Return how arrays of a dtype are combined in a group of ``size`` ranks.

    Raises InvalidRequest if the dtype has no such operation, or the operation is
    unknown.
    """
    ufunc = _UFUNCS.get(op)
    if ufunc is None:
        raise InvalidRequest(f"{op!r}: expected one of {', '.join(_UFUNCS)}")
    if op == "mean" and dtype.kind not in "fc":
        raise InvalidRequest(
            f"a mean of {dtype}: it need not be one; use sum, or convert it to float"
        )
    kinds = "biu" if op in ("and", "or", "xor") else "biufc"
    if dtype.kind not in kinds or not dtype.isnative:
        raise InvalidRequest(f"{dtype} cannot be combined: convert it with astype")

    def combine(own: memoryview, received: memoryview, result: memoryview) -> None:
        ufunc(
            np.frombuffer(own, dtype),
            np.frombuffer(received, dtype),
            out=np.frombuffer(result, dtype),
        )

    def divide(result: memoryview) -> None:
        numbers = np.frombuffer(result, dtype)
        np.divide(numbers, size, out=numbers)

    return Reduction(dtype.itemsize, combine, divide if op == "mean" else None)


def bytes_of(array: Array) -> memoryview:
    """Return an array's memory.  Raises InvalidRequest if it is not in C order."""
    if not array.flags.c_contiguous:
        raise InvalidRequest("an array that is not in C order: use ascontiguousarray")
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def chunk_bounds(units: int, size: int) -> Sequence[tuple[int, int]]:
    """Return begin and end of each of ``size`` ranks' chunk of ``units`` numbers.

    All have the same length but the last ones, which may be shorter, or empty.
    """
    length = -(-units // size)
    return [
        (min(units, rank * length), min(units, (rank + 1) * length))
        for rank in range(size)
    ]


def ring_order(place: Place, first: int) -> Sequence[int]:
    """Return the chunks that pass a rank on their way around the ring, in order.

    A rank sends the ``first``, and receives each other one while it sends the one
    before it.
    """
    return [(first - step) % place.size for step in range(place.size)]


def all_reduce(
    place: Place, own: memoryview, result: memoryview, reduction: Reduction
) -> Operation:
    """Combine the arrays of all ranks into ``result``, which may be ``own``.

    With another ``result``, this rank's own numbers survive a failure.
    """
    chunks = _chunks(len(own), place.size, reduction.unit)
    yield from _ring_reduce(place, own, result, chunks, reduction, passes_on=True)
    yield from _ring_pass(place, result, chunks, place.rank + 1, reduction.unit)


def reduce_scatter(
    place: Place,
    own: memoryview,
    result: memoryview,
    reduction: Reduction,
    ends: Sequence[int],
) -> Operation:
    """Combine the arrays of all ranks, of which rank r gets chunk r in ``result``.

    ``ends`` are the ends of the chunks of ``own``, which keeps its numbers.
    """
    chunks = list(zip((0, *ends[:-1]), ends, strict=True))
    sums = memoryview(bytearray(len(own)))
    # It starts one chunk earlier, so that the sum that ends here is this rank's own.
    yield from _ring_reduce(place, own, sums, chunks, reduction, place.rank - 1)
    result[:] = sums[slice(*chunks[place.rank])]


def all_gather(place: Place, result: memoryview, ends: Sequence[int]) -> Operation:
    """Complete ``result``, which has each rank's part, in the order of ranks.

    ``ends`` are the ends of the parts; this rank's own is there already.
    """
    begins = (0, *ends[:-1])
    parts = list(zip(begins, ends, strict=True))
    if place.size > 1:
        yield from _send(place.right, result[slice(*parts[place.rank])])
    yield from _ring_pass(place, result, parts, place.rank)


def broadcast(place: Place, array: memoryview, root: int) -> Operation:
    """Copy the root's array to all ranks, along the ring."""
    first = place.rank == root
    last = place.right == root
    for segment in segments(array):
        if not first:
            yield ReceiveSegment(place.left, segment)
        if not last:
            yield SendSegment(place.right, segment)


def gather(
    place: Place, own: memoryview, parts: Sequence[memoryview], root: int
) -> Operation:
    """Copy each rank's array to the root, into ``parts``; others pass none."""
    if place.rank != root:
        yield from _send(root, own)
        return
    for rank, part in enumerate(parts):
        if rank == root:
            part[:] = own
        else:
            yield from _receive(rank, part)


def scatter(
    place: Place, parts: Sequence[memoryview], result: memoryview, root: int
) -> Operation:
    """Copy part r of the root to rank r, into ``result``; others pass no parts."""
    if place.rank != root:
        yield from _receive(root, result)
        return
    for rank, part in enumerate(parts):
        if rank == root:
            result[:] = part
        else:
            yield from _send(rank, part)


def all_to_all(
    place: Place, parts: Sequence[memoryview], results: Sequence[memoryview]
) -> Operation:
    """Copy part s of rank r into result r of rank s, for all r and s."""
    results[place.rank][:] = parts[place.rank]
    for distance in range(1, place.size):
        to = (place.rank + distance) % place.size
        yield from _send(to, parts[to])
    for distance in range(1, place.size):
        source = (place.rank - distance) % place.size
        yield from _receive(source, results[source])


def barrier(place: Place) -> Operation:
    """Return when all ranks have called it.

    In round k each rank sends to the one 2^k further.  (Hensgen, Finkel and Manber,
    "Two algorithms for barrier synchronization", 1988.)
    """
    token, heard = memoryview(b"\0"), memoryview(bytearray(1))
    distance = 1
    while distance < place.size:
        yield SendSegment((place.rank + distance) % place.size, token)
        yield ReceiveSegment((place.rank - distance) % place.size, heard)
        distance *= 2


def _ring_reduce(
    place: Place,
    own: memoryview,
    result: memoryview,
    chunks: Sequence[tuple[int, int]],
    reduction: Reduction,
    starts_at: int | None = None,
    *,
    passes_on: bool = False,
) -> Operation:
    """Pass partial sums around; afterwards one chunk of ``result`` is complete.

    That is the chunk after the one it ``starts_at``, by default this rank's own.
    ``passes_on``: it is also sent to the right.
    """
    finish = reduction.finish
    if place.size == 1:
        if result is not own:
            result[:] = own
        if finish is not None:
            finish(result)
        return
    first = place.rank if starts_at is None else starts_at
    length = _segment_size(reduction.unit)
    longest = max(end - begin for begin, end in chunks)
    scratch = memoryview(bytearray(min(length, longest)))
    yield from _send(place.right, own[slice(*chunks[first])], reduction.unit)
    _, *followers = ring_order(place, first)
    for each in followers:
        begin, end = chunks[each]
        is_complete = each == followers[-1]
        for at in range(begin, end, length):
            until = min(end, at + length)
            received, target = scratch[: until - at], result[at:until]
            yield ReceiveSegment(place.left, received)
            reduction.combine(own[at:until], received, target)
            if is_complete and finish is not None:
                finish(target)
            if passes_on or not is_complete:
                yield SendSegment(place.right, target)


def _ring_pass(
    place: Place,
    result: memoryview,
    parts: Sequence[tuple[int, int]],
    first: int,
    unit: int = 1,
) -> Operation:
    """Pass whole parts around; the part ``first`` is here, and has been sent."""
    _, *followers = ring_order(place, first)
    for each in followers:
        for segment in segments(result[slice(*parts[each])], unit):
            yield ReceiveSegment(place.left, segment)
            if each != followers[-1]:
                yield SendSegment(place.right, segment)


def _chunks(total: int, size: int, unit: int) -> Sequence[tuple[int, int]]:
    """Return begin and end of each chunk in bytes."""
    return [
        (begin * unit, end * unit) for begin, end in chunk_bounds(total // unit, size)
    ]


def _segment_size(unit: int) -> int:
    """Return the size of segments of numbers of ``unit`` bytes."""
    return SEGMENT_SIZE // unit * unit


def segments(array: memoryview, unit: int = 1) -> Sequence[memoryview]:
    """Return the parts in which an array of numbers of ``unit`` bytes is sent."""
    length = _segment_size(unit)
    return [array[at : at + length] for at in range(0, len(array), length)]


def _send(to: int, array: memoryview, unit: int = 1) -> Operation:
    for segment in segments(array, unit):
        yield SendSegment(to, segment)


def _receive(source: int, array: memoryview) -> Operation:
    for segment in segments(array):
        yield ReceiveSegment(source, segment)
