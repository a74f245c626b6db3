"""The all-reduce that a compression asks for, and the groups that carry it out."""

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.training import collectives
from shoal.training.collectives import Kind, Operation, Place
from shoal.training.compression.codings import KINDS, CodingName, coding_of
from shoal.training.compression.compressed_collectives import compressed_all_reduce
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.compression.sparse_collectives import sparse_all_reduce
from shoal.training.reductions import ReduceOp, reduction

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

Compression: TypeAlias = CodingName | Literal["auto"] | ErrorFeedback
ChosenCompression: TypeAlias = CodingName | Literal["topk"] | None


class ReducingGroup(Protocol):
    """What training needs of a group: that of ``RankGroup``."""

    @property
    def place(self) -> Place: ...

    def all_reduce(
        self,
        array: "Array",
        op: ReduceOp = "sum",
        result: "Array | None" = None,
        *,
        compression: Compression | None = None,
    ) -> "Array": ...

    def broadcast(self, array: "Array", root: int = 0) -> "Array": ...


def all_reduce_operation(
    place: Place,
    array: "Array",
    target: "Array",
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
    if chosen != "topk":
        coding = coding_of(chosen, array.dtype)
        return KINDS[chosen], compressed_all_reduce(
            place, own, into, combined, coding, feedback
        )
    if feedback is None:
        raise InvalidRequest("topk: needs ErrorFeedback, or it would lose the rest")
    return Kind.SPARSE_ALL_REDUCE, sparse_all_reduce(
        place, own, into, combined, feedback.ratio, feedback
    )


def bytes_of(array: "Array") -> memoryview:
    """Return an array's memory.  Raises InvalidRequest if it is not in C order."""
    import numpy as np

    if not array.flags.c_contiguous:
        raise InvalidRequest("an array that is not in C order: use ascontiguousarray")
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data
