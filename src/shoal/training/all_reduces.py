"""All-reduces in fewer bytes, without I/O, and which one a compression asks for.

Each rank sends each other rank its part of that rank's chunk, encoded; the chunk's
owner combines them without rounding in between, encodes the result, and sends it to
all.  The owner uses what it has sent, decoded, so all ranks have the same bits.

A ring would encode a partial sum in each of its steps.  Here each number is rounded
twice, whatever the size of the group, and a result is there after two messages, which
suits the slow links that this is for.  The bytes are the same; in exchange, each rank
has a connection to each other one.
"""

from collections.abc import Iterator
from typing import Literal, Protocol, TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.training import collectives
from shoal.training.collectives import (
    Array,
    Kind,
    Operation,
    Place,
    ReceiveSegment,
    ReduceOp,
    Reduction,
    SendSegment,
    bytes_of,
    chunk_bounds,
    reduction,
)
from shoal.training.compression.codings import KINDS, CodingName, coding_of
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.compression.sparse_spans import TopCoding

Compression: TypeAlias = CodingName | Literal["auto"] | ErrorFeedback
ChosenCompression: TypeAlias = CodingName | Literal["topk"] | None


class ReducingGroup(Protocol):
    """What training needs of a group: that of ``RankGroup``."""

    @property
    def place(self) -> Place: ...

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        result: Array | None = None,
        *,
        compression: Compression | None = None,
    ) -> Array: ...

    def broadcast(self, array: Array, root: int = 0) -> Array: ...


class PartCoding(Protocol):
    """How the parts of an array travel to the owner of a chunk, and their sums back.

    Sizes are bytes.  A part is ``encoded`` in memory of its own, whose size follows
    from its own size; a sum may have a head, which says how large it is.
    """

    @property
    def part_size(self) -> int:
        """The numbers that travel together."""

    @property
    def is_selective(self) -> bool:
        """Whether a rank adds only some of its numbers, also to its own chunk."""

    @property
    def head_size(self) -> int:
        """The head of a sum; 0: it has none, and travels as a part."""

    def encoded_size(self, size: int, /) -> int: ...
    def encoded(self, numbers: memoryview) -> memoryview: ...
    def decode(self, data: memoryview, numbers: memoryview, /) -> None: ...

    def begin_sum(self, own: memoryview, sums: memoryview) -> None:
        """Put the numbers that the owner of a chunk adds itself into ``sums``."""

    def encode_sum(self, sums: memoryview) -> tuple[memoryview, memoryview]:
        """Return the head of a sum, and the sum."""

    def sum_size(self, head: memoryview, size: int) -> int:
        """Return how large a sum is.  Raises PeerError if it cannot be."""

    def decode_sum(
        self, head: memoryview, data: memoryview, numbers: memoryview
    ) -> None: ...


class Losses(Protocol):
    """What a rank learns about the numbers that its encoding changed.

    ``part`` is where they are in the array, in bytes; ``decoded`` is what the other
    ranks get for them.  The memory is valid during the call.
    """

    def on_sent(
        self, part: slice, numbers: memoryview, decoded: memoryview
    ) -> None: ...
    def on_result(
        self, part: slice, numbers: memoryview, decoded: memoryview
    ) -> None: ...


def all_reduce_operation(
    place: Place,
    array: Array,
    target: Array,
    op: ReduceOp,
    chosen: ChosenCompression,
    feedback: ErrorFeedback | None = None,
) -> tuple[Kind, Operation]:
    """Return the operation that combines arrays in ``target``, which may be ``array``.

    The caller commits ``feedback`` when the operation is complete.

    Raises InvalidRequest for dtypes without this operation or compression, and for
    arrays that are not in C order.
    """
    combined = reduction(op, array.dtype, place.size)
    own, into = bytes_of(array), bytes_of(target)
    if feedback is not None:
        if op not in ("sum", "mean") or array.dtype != "float32":
            raise InvalidRequest(
                f"{op} of {array.dtype}: only sums and means of float32 have error "
                "feedback"
            )
        own = bytes_of(feedback.correct(array, place.size if op == "mean" else 1))
    if chosen is None:
        return Kind.ALL_REDUCE, collectives.all_reduce(place, own, into, combined)
    coding: PartCoding
    if chosen != "topk":
        kind, coding = KINDS[chosen], coding_of(chosen, array.dtype)
    elif feedback is None:
        raise InvalidRequest("topk: needs ErrorFeedback, or it would lose the rest")
    else:
        kind, coding = Kind.SPARSE_ALL_REDUCE, TopCoding(feedback.ratio)
    return kind, encoded_all_reduce(place, own, into, combined, coding, feedback)


def encoded_all_reduce(
    place: Place,
    own: memoryview,
    result: memoryview,
    reduction: Reduction,
    coding: PartCoding,
    losses: Losses | None = None,
) -> Operation:
    """Combine the arrays of all ranks into ``result``, which may be ``own``.

    With another ``result``, this rank's own numbers survive a failure.  A single rank
    rounds nothing, and keeps all.
    """
    rank, size = place
    if size == 1:
        yield from collectives.all_reduce(place, own, result, reduction)
        return
    bounds = chunk_bounds(len(own) // reduction.unit, size)
    part_size = coding.part_size // reduction.unit * reduction.unit

    def parts(of: int) -> Iterator[slice]:
        begin, end = (at * reduction.unit for at in bounds[of])
        for at in range(begin, end, part_size):
            yield slice(at, min(end, at + part_size))

    longest = min(len(own), part_size)
    received, total = (memoryview(bytearray(longest)) for _ in range(2))
    scratch = memoryview(bytearray(coding.encoded_size(longest)))
    other_ranks = [(rank + distance) % size for distance in range(1, size)]
    for to in other_ranks:
        for part in parts(to):
            data = coding.encoded(own[part])
            if losses is not None:
                numbers = received[: part.stop - part.start]
                coding.decode(data, numbers)
                losses.on_sent(part, own[part], numbers)
            yield SendSegment(to, data)
    for part in parts(rank):
        length = part.stop - part.start
        arrived = scratch[: coding.encoded_size(length)]
        numbers, sums = received[:length], total[:length]
        coding.begin_sum(own[part], sums)
        if losses is not None and coding.is_selective:
            losses.on_sent(part, own[part], sums)
        for source in other_ranks:
            yield ReceiveSegment(source, arrived)
            coding.decode(arrived, numbers)
            reduction.combine(sums, numbers, sums)
        if reduction.finish is not None:
            reduction.finish(sums)
        head, data = coding.encode_sum(sums)
        coding.decode_sum(head, data, result[part])
        if losses is not None:
            losses.on_result(part, sums, result[part])
        for to in other_ranks:
            if head:
                yield SendSegment(to, head)
            yield SendSegment(to, data)
    head = memoryview(bytearray(coding.head_size))
    for source in other_ranks:
        for part in parts(source):
            if head:
                yield ReceiveSegment(source, head)
            needed = coding.sum_size(head, part.stop - part.start)
            if needed > len(scratch):
                scratch = memoryview(bytearray(needed))
            yield ReceiveSegment(source, scratch[:needed])
            coding.decode_sum(head, scratch[:needed], result[part])
