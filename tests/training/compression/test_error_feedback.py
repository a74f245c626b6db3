from typing import Literal

import numpy as np
import pytest

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import all_reduce_operation
from shoal.training.collectives import Place
from shoal.training.compression.codings import CODINGS, CodingName
from shoal.training.compression.error_feedback import ErrorFeedback
from training.in_memory import run
from training.test_collectives import raw

COMPRESSIONS: tuple[CodingName | Literal["topk"], ...] = (*CODINGS, "topk")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_nothing_of_a_gradient_is_lost_in_the_long_run(
    compression: CodingName | Literal["topk"],
) -> None:
    random = np.random.default_rng(1)
    feedbacks = [ErrorFeedback(compression) for _ in range(3)]
    given, got = np.zeros((2, 1000))

    for _ in range(30):
        gradients = [random.normal(size=1000).astype(np.float32) for _ in feedbacks]
        results = [np.empty_like(each) for each in gradients]
        run(
            [
                all_reduce_operation(
                    Place(rank, 3),
                    gradients[rank],
                    results[rank],
                    "mean",
                    compression,
                    feedback,
                )[1]
                for rank, feedback in enumerate(feedbacks)
            ]
        )
        for feedback in feedbacks:
            feedback.commit()
        assert len({result.tobytes() for result in results}) == 1
        given += np.sum(gradients, axis=0)
        got += 3.0 * results[0]

    residual = sum(each.residual for each in feedbacks if each.residual is not None)
    assert np.allclose(given, got + residual, atol=1e-3)
    if compression != "topk":
        assert np.abs(given - got).max() < 1, "of sums of 90 numbers"


def test_an_operation_that_failed_changes_no_residual() -> None:
    feedback, place = ErrorFeedback("topk", 0.1), Place(0, 2)
    gradient, result = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    feedback.correct(gradient, 1)
    feedback.on_sent(slice(0, 4), raw(gradient[5:6]), raw(gradient[:1]))
    feedback.commit()
    assert feedback.residual is not None
    before = feedback.residual.copy()
    assert before[0] == 5

    _, operation = all_reduce_operation(
        place, gradient, result, "sum", "topk", feedback
    )
    next(operation)
    operation.close()

    assert np.array_equal(feedback.residual, before)


def test_a_number_that_is_not_finite_reaches_all_ranks_once() -> None:
    feedbacks = [ErrorFeedback("topk") for _ in range(2)]
    gradients = [np.ones(300, np.float32) for _ in range(2)]
    gradients[1][:] = np.nan

    with np.errstate(invalid="ignore"):
        for feedback, expected in ((feedbacks, True), (feedbacks, False)):
            results = [np.empty_like(each) for each in gradients]
            run(
                [
                    all_reduce_operation(
                        Place(r, 2), gradients[r], results[r], "sum", "topk", each
                    )[1]
                    for r, each in enumerate(feedback)
                ]
            )
            for each in feedback:
                each.commit()
            assert np.isnan(results[0]).any() == expected
            assert results[0].tobytes() == results[1].tobytes()
            gradients[1] = np.ones(300, np.float32)


def test_arguments_that_do_not_fit_are_refused() -> None:
    place, array = Place(0, 2), np.ones(10, np.float32)
    with pytest.raises(InvalidRequest, match="expected one of fp16, bf16, fp8, int8"):
        ErrorFeedback("fp4")  # type: ignore[arg-type]  # what it refuses
    with pytest.raises(InvalidRequest, match="more than 0, and 1 at most"):
        ErrorFeedback("topk", 0)
    with pytest.raises(InvalidRequest, match="only sums and means of float32"):
        all_reduce_operation(place, array, array, "max", "topk", ErrorFeedback())
    with pytest.raises(InvalidRequest, match="or it would lose the rest"):
        all_reduce_operation(place, array, array, "sum", "topk")
    feedback = ErrorFeedback()
    feedback.correct(array, 1)
    feedback.commit()
    with pytest.raises(InvalidRequest, match="10, those of the last step"):
        feedback.correct(np.ones(11, np.float32), 1)
