"""The largest numbers of an array, and where they are, in few bytes.

An array is divided into spans, whose places fit into 16 bits.  Of each span the same
share is kept, so that its size is known beforehand, and the work stays in a core's
cache; layers of small numbers are not starved by those of large ones.  Numbers are
float16 with a scale.  A span travels dense where that is smaller.

How many numbers a sum has depends on where those of the ranks are: a head with their
count goes before each span of it.
"""

import struct
from dataclasses import dataclass

import numpy as np

from shoal.domain.errors import PeerError
from shoal.training.collectives import Array, bytes_of
from shoal.training.compression.codings import CODINGS

SPAN = 1 << 16  # numbers
_HALF = CODINGS["fp16"]
_NUMBER, _PLACE = 4, 2  # bytes
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TopCoding:
    """An ``all_reduces.PartCoding``: each rank sends ``ratio`` of its numbers.

    Arrays are float32.  The owner of a chunk adds the numbers of all to its own
    largest, and sends those sums that are not zero.
    """

    ratio: float

    is_selective = True
    head_size = _COUNT.size

    @property
    def part_size(self) -> int:
        return _NUMBER * SPAN

    def encoded_size(self, size: int) -> int:
        length = size // _NUMBER
        return encoded_size(length, kept(length, self.ratio))

    def encoded(self, numbers: memoryview) -> memoryview:
        values = np.frombuffer(numbers, np.float32)
        return encode_span(values, largest(values, kept(values.size, self.ratio)))

    def decode(self, data: memoryview, numbers: memoryview) -> None:
        values = np.frombuffer(numbers, np.float32)
        decode_span(data, kept(values.size, self.ratio), values)

    def begin_sum(self, own: memoryview, sums: memoryview) -> None:
        values, kept_values = (np.frombuffer(each, np.float32) for each in (own, sums))
        places = largest(values, kept(values.size, self.ratio))
        kept_values[:] = 0
        kept_values[places] = values[places]

    def encode_sum(self, sums: memoryview) -> tuple[memoryview, memoryview]:
        values = np.frombuffer(sums, np.float32)
        places = np.flatnonzero(values)
        return memoryview(_COUNT.pack(places.size)), encode_span(values, places)

    def sum_size(self, head: memoryview, size: int) -> int:
        (count,) = _COUNT.unpack(head)
        if count > size // _NUMBER:
            raise PeerError(f"{count} numbers in a span of {size // _NUMBER}")
        return encoded_size(size // _NUMBER, count)

    def decode_sum(
        self, head: memoryview, data: memoryview, numbers: memoryview
    ) -> None:
        (count,) = _COUNT.unpack(head)
        decode_span(data, count, np.frombuffer(numbers, np.float32))


def kept(length: int, ratio: float) -> int:
    """Return how many numbers of a span are kept: this ratio, but at least one."""
    return max(1, int(length * ratio))


def is_dense(length: int, count: int) -> bool:
    """Return whether a whole span takes no more bytes than its ``count`` largest."""
    return encoded_size(length, count) == _HALF.encoded_size(_NUMBER * length)


def encoded_size(length: int, count: int) -> int:
    """Return the bytes of ``count`` numbers of a span of this length."""
    dense = _HALF.encoded_size(_NUMBER * length)
    return min(dense, _PLACE * count + _HALF.encoded_size(_NUMBER * count))


def largest(numbers: Array, count: int) -> Array:
    """Return the places of the ``count`` numbers of the largest magnitude, in order.

    Of equal numbers those that come first are taken.  NaN counts as the largest.
    """
    # The bits of floats that are not negative are in the order of the floats.
    sizes = numbers.view(np.int32) & 0x7FFFFFFF
    least = np.partition(sizes, sizes.size - count)[sizes.size - count]
    places = np.flatnonzero(sizes >= least)
    if places.size > count:
        is_larger = sizes[places] > least
        equal = np.flatnonzero(~is_larger)
        is_larger[equal[: count - np.count_nonzero(is_larger)]] = True
        places = places[is_larger]
    return places


def encode_span(numbers: Array, places: Array) -> memoryview:
    """Encode the numbers at these places, or all of them."""
    data = memoryview(bytearray(encoded_size(numbers.size, places.size)))
    if is_dense(numbers.size, places.size):
        _HALF.encode(bytes_of(numbers), data)
        return data
    head = _PLACE * places.size
    np.copyto(np.frombuffer(data[:head], np.uint16), places, casting="unsafe")
    _HALF.encode(bytes_of(numbers[places]), data[head:])
    return data


def decode_span(data: memoryview, count: int, numbers: Array) -> None:
    """Fill a span with ``count`` encoded numbers, and zeros elsewhere.

    Raises PeerError for places that it does not have.
    """
    if is_dense(numbers.size, count):
        _HALF.decode(data, bytes_of(numbers))
        return
    head = _PLACE * count
    places = np.frombuffer(data[:head], np.uint16)
    if places.max(initial=0) >= numbers.size:
        raise PeerError(
            f"a number at {places.max()} of a span of {numbers.size}: the ranks do not "
            "agree on the size of the array"
        )
    values = np.empty(count, np.float32)
    _HALF.decode(data[head:], bytes_of(values))
    numbers[:] = 0
    numbers[places] = values
