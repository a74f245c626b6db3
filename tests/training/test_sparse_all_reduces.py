from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import PeerError
from shoal.training.all_reduces import encoded_all_reduce
from shoal.training.collectives import Place, ReceiveSegment, ReduceOp, reduction
from shoal.training.compression import sparse_spans
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.compression.sparse_spans import TopCoding
from training.in_memory import Array, run
from training.test_collectives import chooser, lengths, numbers, orders, raw, sizes

FLOAT32 = np.dtype(np.float32)
ratios = st.sampled_from([0.01, 0.2, 0.6, 1.0])
ops: st.SearchStrategy[ReduceOp] = st.sampled_from(["sum", "mean"])


@pytest.fixture(autouse=True, scope="module")
def small_spans() -> Any:
    """Make arrays of a few numbers have several spans."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sparse_spans, "SPAN", 8)
    yield
    patch.undo()


def reduce_all(
    arrays: list[Array],
    feedbacks: list[ErrorFeedback],
    op: ReduceOp,
    order: list[int],
) -> tuple[list[Array], dict[tuple[int, int], list[bytes]]]:
    size = len(arrays)
    results = [np.empty_like(array) for array in arrays]
    operations = []
    for rank, (array, feedback) in enumerate(zip(arrays, feedbacks, strict=True)):
        corrected = feedback.correct(array, size if op == "mean" else 1)
        operations.append(
            encoded_all_reduce(
                Place(rank, size),
                raw(corrected),
                raw(results[rank]),
                reduction(op, FLOAT32, size),
                TopCoding(feedback.ratio),
                feedback,
            )
        )
    sent = run(operations, chooser(order))
    for feedback in feedbacks:
        feedback.commit()
    return results, sent


@given(sizes, lengths, orders, ops, ratios)
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(
    size: int, length: int, order: list[int], op: ReduceOp, ratio: float
) -> None:
    feedbacks = [ErrorFeedback("topk", ratio) for _ in range(size)]
    given_, got = np.zeros((2, length))

    for step in range(3):
        arrays = [numbers(10 * step + rank, length) - 7 for rank in range(size)]
        results, _ = reduce_all(arrays, feedbacks, op, order)

        assert len({result.tobytes() for result in results}) == 1
        given_ += np.sum(arrays, axis=0)
        got += results[0].astype(float) * (size if op == "mean" else 1)

    residuals = [each.residual for each in feedbacks if each.residual is not None]
    assert len(residuals) == size
    assert np.allclose(given_, got + np.sum(residuals, axis=0), atol=1e-3)


@given(st.integers(2, 6), st.integers(1, 50), orders)
def test_numbers_that_stand_out_are_added_exactly(
    size: int, length: int, order: list[int]
) -> None:
    arrays = [np.zeros(length, np.float32) for _ in range(size)]
    for rank, array in enumerate(arrays):
        array[rank % length :: 8] = rank + 1

    results, sent = reduce_all(
        arrays, [ErrorFeedback("topk", 0.2) for _ in range(size)], "sum", order
    )

    assert np.array_equal(results[0], np.sum(arrays, axis=0))
    # Each span: a scale, and four bytes a number; or two bytes for each of its places.
    largest = 4 + 2 * min(8, length)
    assert all(len(each) <= largest for some in sent.values() for each in some)


def test_a_sum_of_many_numbers_travels_dense() -> None:
    arrays = [np.zeros(16, np.float32) for _ in range(4)]
    for rank, array in enumerate(arrays):
        array[rank::4] = 1

    _, sent = reduce_all(arrays, [ErrorFeedback("topk", 0.3)] * 4, "sum", [0])

    # The chunk of each owner has four numbers, of which each rank sends one.
    sizes_ = {len(each) for some in sent.values() for each in some}
    assert 4 + 2 * 4 in sizes_


def test_a_count_that_no_span_can_have_is_refused() -> None:
    array = np.ones(16, np.float32)
    feedback = ErrorFeedback("topk", 0.5)
    corrected = feedback.correct(array, 1)
    operation = encoded_all_reduce(
        Place(0, 2),
        raw(corrected),
        raw(array),
        reduction("sum", FLOAT32, 2),
        TopCoding(0.5),
        feedback,
    )
    received = 0
    action: Any = next(operation)

    def run_on() -> None:
        nonlocal action, received
        while True:
            if isinstance(action, ReceiveSegment):
                received += 1
                action.into[:] = (
                    b"\xff\xff\xff\x7f" if received == 2 else bytes(len(action.into))
                )
            action = next(operation)

    with pytest.raises(PeerError, match="2147483647 numbers in a span of 8"):
        run_on()
