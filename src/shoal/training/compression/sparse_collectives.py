"""An all-reduce of the largest numbers of each rank's array, without I/O.

Each rank sends each other rank the largest numbers of its part of that rank's chunk.
The chunk's owner adds them to its own largest, and sends all that are not zero to all,
dense where that is smaller.  As in ``compressed_collectives``, it uses what it has
sent, so all ranks have the same bits.

How many numbers a sum has depends on where those of the ranks are: a head with their
count goes before each span of it.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.domain.errors import PeerError
from shoal.training import collectives
from shoal.training.collectives import (
    Operation,
    Place,
    ReceiveSegment,
    Reduction,
    SendSegment,
    chunk_bounds,
)
from shoal.training.compression import sparse_spans
from shoal.training.compression.compressed_collectives import Losses

if TYPE_CHECKING:
    from shoal.training.compression.sparse_spans import Array

_COUNT = struct.Struct("<I")


def sparse_all_reduce(
    place: Place,
    own: memoryview,
    result: memoryview,
    reduction: Reduction,
    ratio: float,
    losses: Losses,
) -> Operation:
    """Add the largest numbers of all ranks into ``result``, which is not ``own``.

    ``ratio`` of each rank's numbers are taken; ``losses`` is told about the others.
    Arrays are float32, and ``reduction`` a sum or mean.  A single rank keeps all.
    """
    import numpy as np

    rank, size = place
    if size == 1:
        yield from collectives.all_reduce(place, own, result, reduction)
        return
    bounds = chunk_bounds(len(own) // reduction.unit, size)

    def spans(of: int) -> Iterator[slice]:
        begin, end = (at * reduction.unit for at in bounds[of])
        length = sparse_spans.SPAN * reduction.unit
        for at in range(begin, end, length):
            yield slice(at, min(end, at + length))

    def numbers_of(memory: memoryview) -> "Array":
        return np.frombuffer(memory, np.float32)

    others = [(rank + distance) % size for distance in range(1, size)]
    for to in others:
        for part in spans(to):
            numbers = numbers_of(own[part])
            count = sparse_spans.kept(numbers.size, ratio)
            data = sparse_spans.encode_span(
                numbers, sparse_spans.largest(numbers, count)
            )
            sent = np.empty_like(numbers)
            sparse_spans.decode_span(data, count, sent)
            losses.on_sent(part, own[part], _bytes_of(sent))
            yield SendSegment(to, data)
    for part in spans(rank):
        numbers = numbers_of(own[part])
        count = sparse_spans.kept(numbers.size, ratio)
        sums, received = np.zeros((2, numbers.size), np.float32)
        places = sparse_spans.largest(numbers, count)
        sums[places] = numbers[places]
        losses.on_sent(part, own[part], _bytes_of(sums))
        scratch = memoryview(bytearray(sparse_spans.encoded_size(numbers.size, count)))
        for source in others:
            yield ReceiveSegment(source, scratch)
            sparse_spans.decode_span(scratch, count, received)
            np.add(sums, received, out=sums)
        if reduction.finish is not None:
            reduction.finish(_bytes_of(sums))
        places = np.flatnonzero(sums)
        head = memoryview(_COUNT.pack(places.size))
        data = sparse_spans.encode_span(sums, places)
        sparse_spans.decode_span(data, places.size, numbers_of(result[part]))
        losses.on_result(part, _bytes_of(sums), result[part])
        for to in others:
            yield SendSegment(to, head)
            yield SendSegment(to, data)
    head = memoryview(bytearray(_COUNT.size))
    for source in others:
        for part in spans(source):
            numbers = numbers_of(result[part])
            yield ReceiveSegment(source, head)
            (count,) = _COUNT.unpack(head)
            if count > numbers.size:
                raise PeerError(f"{count} numbers in a span of {numbers.size}")
            data = memoryview(bytearray(sparse_spans.encoded_size(numbers.size, count)))
            yield ReceiveSegment(source, data)
            sparse_spans.decode_span(data, count, numbers)


def _bytes_of(numbers: "Array") -> memoryview:
    import numpy as np

    return numbers.view(np.uint8).data
