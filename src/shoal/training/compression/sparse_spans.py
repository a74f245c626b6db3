"""The largest numbers of an array, and where they are, in few bytes.

An array is divided into spans, whose places fit into 16 bits.  Of each span the same
share is kept, so that its size is known beforehand, and the work stays in a core's
cache; layers of small numbers are not starved by those of large ones.  Numbers are
float16 with a scale.  A span travels dense where that is smaller.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.domain.errors import PeerError
from shoal.training.compression.half_floats import HALF_FLOATS

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

SPAN = 1 << 16  # numbers
_HALF = HALF_FLOATS["fp16"]
_NUMBER, _PLACE = 4, 2  # bytes


def kept(length: int, ratio: float) -> int:
    """Return how many numbers of a span are kept: this ratio, but at least one."""
    return max(1, int(length * ratio))


def is_dense(length: int, count: int) -> bool:
    """Return whether all numbers of a span take no more bytes than so many."""
    return encoded_size(length, count) == _HALF.encoded_size(_NUMBER * length)


def encoded_size(length: int, count: int) -> int:
    """Return the bytes of ``count`` numbers of a span of this length."""
    dense = _HALF.encoded_size(_NUMBER * length)
    return min(dense, _PLACE * count + _HALF.encoded_size(_NUMBER * count))


def largest(numbers: "Array", count: int) -> "Array":
    """Return the places of so many numbers of the largest magnitude, in order.

    Of equal numbers those that come first are taken.  NaN counts as the largest.
    """
    import numpy as np

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


def encode_span(numbers: "Array", places: "Array") -> memoryview:
    """Encode the numbers at these places, or all of them."""
    import numpy as np

    data = memoryview(bytearray(encoded_size(numbers.size, places.size)))
    if is_dense(numbers.size, places.size):
        _HALF.encode(_bytes_of(numbers), data)
        return data
    head = _PLACE * places.size
    np.copyto(np.frombuffer(data[:head], np.uint16), places, casting="unsafe")
    _HALF.encode(_bytes_of(numbers[places]), data[head:])
    return data


def decode_span(data: memoryview, count: int, numbers: "Array") -> None:
    """Fill a span with ``count`` encoded numbers, and zeros elsewhere.

    Raises PeerError for places that it does not have.
    """
    import numpy as np

    if is_dense(numbers.size, count):
        _HALF.decode(data, _bytes_of(numbers))
        return
    head = _PLACE * count
    places = np.frombuffer(data[:head], np.uint16)
    if places.max(initial=0) >= numbers.size:
        raise PeerError(
            f"a number at {places.max()} of a span of {numbers.size}: the ranks do not "
            "agree on the size of the array"
        )
    values = np.empty(count, np.float32)
    _HALF.decode(data[head:], _bytes_of(values))
    numbers[:] = 0
    numbers[places] = values


def _bytes_of(numbers: "Array") -> memoryview:
    import numpy as np

    return numbers.view(np.uint8).data
