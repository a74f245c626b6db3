import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.training.all_reduces import ChosenCompression, Compression
from shoal.training.collectives import Place, ReduceOp
from shoal.training.compression.choice import (
    BY_ERROR,
    INTERVAL,
    SLOWER_MAX,
    AutoCompression,
    LinkFigures,
    choose,
    expected_seconds,
    measure,
)

Array = np.ndarray[Any, np.dtype[Any]]

# As measured on a server: seconds of a rank for one byte of numbers.
COSTS: dict[ChosenCompression, float] = {
    None: 0.0,
    "fp16": 1.2e-9,
    "int8": 0.4e-9,
    "topk": 0.4e-9,
}
SIZE = 25_000_000


def chosen_at(
    rate: float, delay: float = 0.02, ranks: int = 2, ratio: float = 0.01
) -> ChosenCompression:
    figures = LinkFigures(rate, delay, COSTS)
    options = BY_ERROR if ratio else BY_ERROR[:-1]
    return choose(
        {each: expected_seconds(each, figures, SIZE, ranks, ratio) for each in options}
    )


def test_slower_links_have_stronger_compressions() -> None:
    assert chosen_at(6e6) == "topk"
    assert chosen_at(6e6, ratio=0) == "int8"
    assert chosen_at(1.5e9, 1e-5, ratio=0) in (None, "fp16")
    assert chosen_at(5e9, 1e-5) is None


def test_of_nearly_equal_times_the_least_error_counts() -> None:
    assert choose({None: 1.4, "fp16": 1.0, "int8": 0.95}) is None
    assert choose({None: 2.0, "fp16": 1.4, "int8": 1.0}) == "fp16"
    assert choose({None: 9.0, "fp16": 5.0, "int8": 3.0, "topk": 1.0}) == "topk"


@given(st.floats(1e3, 1e11), st.floats(0, 1), st.integers(2, 64), st.floats(0, 1))
def test_the_choice_is_nearly_the_fastest(
    rate: float, delay: float, ranks: int, ratio: float
) -> None:
    figures = LinkFigures(rate, delay, COSTS)
    times = {
        each: expected_seconds(each, figures, SIZE, ranks, ratio) for each in BY_ERROR
    }

    assert times[choose(times)] <= SLOWER_MAX * min(times.values())
    assert all(seconds > 0 for seconds in times.values())


def test_dense_sums_take_as_long_as_their_bytes() -> None:
    figures = LinkFigures(6.25e6, 0.02, COSTS)

    assert expected_seconds(None, figures, SIZE, 2, 0) == 25 / 6.25 + 0.04
    # Messages around a ring of 8 wait for each other; owners are two messages away.
    assert expected_seconds(None, figures, 8, 8, 0) > 14 * 0.02
    assert expected_seconds("int8", figures, 8, 8, 0) < 0.041


class SlowGroup:
    """Two ranks at a slow link, in virtual time.

    Each message waits for the delay, and ``burst`` bytes of it for nothing else.
    """

    place = Place(0, 2)

    def __init__(self, rate: float, delay: float, burst: int = 0) -> None:
        self.now = 0.0
        self._burst = burst
        self.rate = rate
        self._delay = delay

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        result: Array | None = None,
        *,
        compression: Compression | None = None,
    ) -> Array:
        late = max(0, array.nbytes - self._burst) / self.rate
        self.now += 2 * self._delay + late
        return array

    def broadcast(self, array: Array, root: int = 0) -> Array:
        raise AssertionError("measuring needs no broadcast")


@given(st.floats(1e4, 1e10), st.floats(0, 0.5))
def test_the_rate_of_a_link_is_told_from_its_delay(rate: float, delay: float) -> None:
    group = SlowGroup(rate, delay)

    figures = measure(group, lambda: group.now)

    assert figures.rate == pytest.approx(rate, rel=0.01)
    assert figures.delay == pytest.approx(delay + 4 / rate / 2, rel=0.01)


def test_a_burst_that_a_slow_link_lets_through_is_not_its_rate() -> None:
    group = SlowGroup(6.25e6, 0.03, burst=64 << 10)

    figures = measure(group, lambda: group.now)

    assert figures.rate == pytest.approx(6.25e6, rel=0.2)


def test_a_link_is_measured_again_and_a_new_choice_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "shoal.training")
    group = SlowGroup(1e9, 0.02)
    auto = AutoCompression(lambda: group.now)
    gradient = np.zeros(SIZE // 4, np.float32)

    before = [auto.choose(group, gradient) for _ in range(2)]
    group.rate = 6e6
    later = [auto.choose(group, gradient) for _ in range(INTERVAL)]

    assert before == [None, None]
    assert later == [None] * (INTERVAL - 2) + ["int8"] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" ")[0] for line in lines] == [
        "compression=none",
        "compression=int8",
    ]


def test_arrays_that_are_not_float32_and_ranks_alone_have_no_compression() -> None:
    group = SlowGroup(6e6, 0.02)
    auto = AutoCompression(lambda: group.now)

    assert auto.choose(group, np.zeros(SIZE // 8)) is None
    group.place = Place(0, 1)
    assert auto.choose(group, np.zeros(SIZE // 4, np.float32)) is None
    assert group.now == 0, "nothing was measured"
