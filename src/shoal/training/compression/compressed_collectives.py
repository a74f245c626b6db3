"""An all-reduce that sends numbers in fewer bytes, without I/O.

Each rank sends each other rank its part of that rank's chunk, encoded; the chunk's
owner combines them without rounding in between, encodes the result, and sends it to
all.  The owner uses what it has sent, decoded, so all ranks have the same bits.

A ring would encode a partial sum in each of its steps.  Here each number is rounded
twice, whatever the size of the group, and a result is there after two messages, which
suits the slow links that this is for.  The bytes are the same; in exchange, each rank
has a connection to each other one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from shoal.training import collectives
from shoal.training.collectives import (
    Operation,
    Place,
    ReceiveSegment,
    Reduction,
    SendSegment,
    chunk_bounds,
)


@dataclass(frozen=True, slots=True)
class Coding:
    """How the numbers of a segment travel.

    ``encoded_size`` takes bytes of numbers and returns bytes on the way; ``encode``
    takes the numbers and where to put the bytes, ``decode`` the reverse.
    """

    encoded_size: Callable[[int], int]
    encode: Callable[[memoryview, memoryview], None]
    decode: Callable[[memoryview, memoryview], None]


class Losses(Protocol):
    """What a rank is told about the numbers that its encoding changed.

    ``part`` is where they are in the array, in bytes; ``decoded`` is what the other
    ranks get for them.  The memory is valid during the call.
    """

    def on_sent(
        self, part: slice, numbers: memoryview, decoded: memoryview
    ) -> None: ...
    def on_result(
        self, part: slice, numbers: memoryview, decoded: memoryview
    ) -> None: ...


def compressed_all_reduce(
    place: Place,
    own: memoryview,
    result: memoryview,
    reduction: Reduction,
    coding: Coding,
    losses: Losses | None = None,
) -> Operation:
    """Combine the arrays of all ranks into ``result``, which may be ``own``.

    With another ``result``, this rank's own numbers survive a failure.  A single rank
    rounds nothing.
    """
    rank, size = place
    if size == 1:
        yield from collectives.all_reduce(place, own, result, reduction)
        return
    bounds = chunk_bounds(len(own) // reduction.unit, size)

    def segments(of: int) -> Iterator[slice]:
        begin, end = (at * reduction.unit for at in bounds[of])
        length = collectives.SEGMENT_SIZE // reduction.unit * reduction.unit
        for at in range(begin, end, length):
            yield slice(at, min(end, at + length))

    def encoded(numbers: memoryview) -> memoryview:
        # Memory of its own: it must not change until it has been sent.
        data = memoryview(bytearray(coding.encoded_size(len(numbers))))
        coding.encode(numbers, data)
        return data

    longest = min(len(own), collectives.SEGMENT_SIZE)
    scratch = memoryview(bytearray(coding.encoded_size(longest)))
    received, total = (memoryview(bytearray(longest)) for _ in range(2))
    others = [(rank + distance) % size for distance in range(1, size)]
    for to in others:
        for part in segments(to):
            data = encoded(own[part])
            if losses is not None:
                numbers = received[: part.stop - part.start]
                coding.decode(data, numbers)
                losses.on_sent(part, own[part], numbers)
            yield SendSegment(to, data)
    for part in segments(rank):
        length = part.stop - part.start
        arrived = scratch[: coding.encoded_size(length)]
        numbers, sums = received[:length], total[:length]
        sums[:] = own[part]
        for source in others:
            yield ReceiveSegment(source, arrived)
            coding.decode(arrived, numbers)
            reduction.combine(sums, numbers, sums)
        if reduction.finish is not None:
            reduction.finish(sums)
        data = encoded(sums)
        coding.decode(data, result[part])
        if losses is not None:
            losses.on_result(part, sums, result[part])
        for to in others:
            yield SendSegment(to, data)
    for source in others:
        for part in segments(source):
            arrived = scratch[: coding.encoded_size(part.stop - part.start)]
            yield ReceiveSegment(source, arrived)
            coding.decode(arrived, result[part])
