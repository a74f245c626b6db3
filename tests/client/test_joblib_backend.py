"""joblib's jobs, and scikit-learn's, as calls."""

import threading
from collections.abc import Iterator

import joblib
import numpy as np
import pytest

import shoal
from client.coordinator import KEY
from client.coordinator_thread import CoordinatorThread


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    shoal.register_joblib()
    yield
    del joblib.parallel.BACKENDS["shoal"]


def double(x: int) -> int:
    return 2 * x


def total(array: np.ndarray, more: int) -> float:
    return float(array.sum()) + more


class OwnError(Exception):
    """A user-defined exception."""


def fail() -> None:
    raise OwnError("zap")


class CodeError(Exception):
    """Its constructor takes other arguments than it keeps."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place}")


def fail_with_code() -> None:
    raise CodeError(3, "home")


def is_same(first: object, second: object) -> bool:
    return first is second


def in_threads(array: np.ndarray) -> tuple[bool, str]:
    return array.flags.writeable, threading.current_thread().name


def test_jobs_run_on_the_pool(beside: CoordinatorThread) -> None:
    with joblib.parallel_config(
        backend="shoal", url=beside.coordinator.url, api_key=KEY
    ):
        doubled = joblib.Parallel()(joblib.delayed(double)(x) for x in range(50))

    assert doubled == [*range(0, 100, 2)]
    assert beside.coordinator.calls


def test_existing_pool_can_be_used(beside: CoordinatorThread) -> None:
    with (
        beside.pool(durable=False) as pool,
        joblib.parallel_config(backend="shoal", pool=pool),
    ):
        doubled = joblib.Parallel(n_jobs=3, return_as="generator")(
            joblib.delayed(double)(x) for x in range(20)
        )
        assert list(doubled) == [*range(0, 40, 2)]

    assert {item[5]["kept"] for item in beside.coordinator.calls} == {False}


def test_large_array_is_sent_once_for_all_jobs(beside: CoordinatorThread) -> None:
    array = np.ones(200_000)

    with beside.pool() as pool, joblib.parallel_config(backend="shoal", pool=pool):
        totals = joblib.Parallel()(joblib.delayed(total)(array, x) for x in range(8))

    assert totals == [200_000.0 + x for x in range(8)]
    assert len(beside.coordinator.put) == 1


def test_error_of_a_job_is_reraised(beside: CoordinatorThread) -> None:
    with (
        beside.pool() as pool,
        joblib.parallel_config(backend="shoal", pool=pool),
        pytest.raises(OwnError, match="zap") as caught,
    ):
        joblib.Parallel()(joblib.delayed(fail)() for _ in range(3))

    assert "in fail" in str(caught.value.__cause__)


def test_error_whose_constructor_differs_is_reraised(
    beside: CoordinatorThread,
) -> None:
    with (
        beside.pool() as pool,
        joblib.parallel_config(backend="shoal", pool=pool),
        pytest.raises(CodeError, match="3 at home"),
    ):
        joblib.Parallel()(joblib.delayed(fail_with_code)() for _ in range(2))


def test_equal_arrays_remain_two(beside: CoordinatorThread) -> None:
    first, second = np.zeros(50_000), np.zeros(50_000)  # a function may write to one

    with beside.pool() as pool, joblib.parallel_config(backend="shoal", pool=pool):
        same = joblib.Parallel()(
            joblib.delayed(is_same)(first, each) for each in (first, second)
        )

    assert same == [True, False]


def test_error_without_workers_says_what_to_start(
    beside: CoordinatorThread,
) -> None:
    beside.coordinator.trusts_code = False

    with (
        beside.pool() as pool,
        joblib.parallel_config(backend="shoal", pool=pool),
        pytest.raises(shoal.CodeRefused, match="--trust-code"),
    ):
        joblib.Parallel()(joblib.delayed(double)(x) for x in range(2))


@pytest.mark.long
def test_grid_search_matches_a_local_one(beside: CoordinatorThread) -> None:
    # Here, for each process of the suite would spend a second on it.
    from sklearn.datasets import make_classification
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    features, classes = make_classification(2000, 40, random_state=1)
    search = GridSearchCV(
        LogisticRegression(max_iter=200), {"C": [0.01, 0.1, 1.0]}, cv=3
    )
    alone = search.fit(features, classes).cv_results_["mean_test_score"]

    with beside.pool() as pool, joblib.parallel_config(backend="shoal", pool=pool):
        search.set_params(n_jobs=-1).fit(features, classes)

    assert search.cv_results_["mean_test_score"] == pytest.approx(alone)
    assert len(beside.coordinator.calls) >= 2
    assert len({*beside.coordinator.put}) == len(beside.coordinator.put)
