"""Collectives with ranks of other programs, without I/O: whole arrays, in order.

Nothing on the wire names a rank, an operation or a step: a rank that misses one array
takes the next for it.  So the schedule is exactly that of the other programs, and each
received array must have the shape and dtype that is due.

Each collective is a generator of one rank.  It yields ``Exchange`` and gets the
received array; its return value is the result.  Source: recorded exchanges of the other
programs.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from shoal.domain.errors import InvalidRequest, PeerError
from shoal.training.collectives import Place

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

MixedOp: TypeAlias = Literal["sum", "mean"]


class Exchange(NamedTuple):
    """Send arrays to some ranks, and at the same time receive one from a rank."""

    sends: "Sequence[tuple[int, Array]]" = ()
    source: int | None = None


MixedOperation: TypeAlias = 'Generator[Exchange, "Array", Array]'


def all_reduce(place: Place, array: "Array", op: MixedOp) -> MixedOperation:
    """Return the sum or mean of the arrays of all ranks.

    Two ranks exchange their arrays; the mean of integers is float64.  More ranks form a
    ring; there, the mean of integers is truncated.
    """
    if op not in ("sum", "mean"):
        raise InvalidRequest(f"{op!r}: expected sum or mean")
    if place.size == 1:
        return array
    if place.size == 2:
        return (yield from _exchange_whole(place, array, op))
    return (yield from _ring(place, array, op))


def broadcast(place: Place, array: "Array", root: int) -> MixedOperation:
    """Return the root's array; those of other ranks say what shape is due."""
    if place.rank != root:
        received = yield Exchange((), root)
        return _checked(received, array, root)
    yield Exchange([(rank, array) for rank in range(place.size) if rank != root])
    return array


def gather(place: Place, array: "Array", root: int) -> MixedOperation:
    """Return all arrays, stacked, to the root, and to others their own."""
    import numpy as np

    if place.rank != root:
        yield Exchange([(root, array)])
        return array
    parts = []
    for rank in range(place.size):
        if rank == root:
            parts.append(array)
        else:
            received = yield Exchange((), rank)
            parts.append(_checked(received, array, rank))
    return np.stack(parts)


def scatter(place: Place, array: "Array", root: int) -> MixedOperation:
    """Return this rank's part of the root's array, divided along the first axis.

    The first parts have one element more if the length is no multiple of the size.
    Arrays of other ranks say what shape and dtype is due.
    """
    import numpy as np

    if not array.ndim:
        raise InvalidRequest("scatter: an array without an axis cannot be divided")
    parts = np.array_split(array, place.size)
    if place.rank != root:
        received = yield Exchange((), root)
        return _checked(received, parts[place.rank], root)
    yield Exchange([(rank, parts[rank]) for rank in range(place.size) if rank != root])
    return parts[root]


def _exchange_whole(place: Place, array: "Array", op: MixedOp) -> MixedOperation:
    other = 1 - place.rank
    received = yield Exchange([(other, array)], other)
    total = array + _checked(received, array, other)
    return total / 2.0 if op == "mean" else total


def _ring(place: Place, array: "Array", op: MixedOp) -> MixedOperation:
    import numpy as np

    rank, size = place
    length = -(-array.size // size)
    padded = np.zeros(length * size, array.dtype)
    padded[: array.size] = array.reshape(-1)
    chunks = list(padded.reshape(size, length))
    for step in range(size - 1):
        at = (rank - step - 1) % size
        sends = [(place.right, chunks[(rank - step) % size])]
        received = yield Exchange(sends, place.left)
        chunks[at] = chunks[at] + _checked(received, chunks[at], place.left)
    if op == "mean":
        chunks = [chunk / size for chunk in chunks]
    for step in range(size - 1):
        at = (rank - step) % size
        sends = [(place.right, chunks[(rank - step + 1) % size])]
        received = yield Exchange(sends, place.left)
        chunks[at] = _checked(received, chunks[at], place.left)
    whole = np.concatenate(chunks)[: array.size]
    return whole.reshape(array.shape).astype(array.dtype, copy=False)


def _checked(received: "Array", due: "Array", source: int) -> "Array":
    """Return a received array.  Raises PeerError if it is not the one that is due."""
    # What has been added has a machine's own order of bytes, as NumPy gives it.
    same = received.dtype.newbyteorder("=") == due.dtype.newbyteorder("=")
    if received.shape != due.shape or not same:
        raise PeerError(
            f"rank {source} sent {received.dtype} of shape {received.shape}, expected "
            f"{due.dtype} of shape {due.shape}: its program is at another operation"
        )
    return received
