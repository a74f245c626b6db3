from hypothesis import given
from hypothesis import strategies as st

from shoal.training.all_reduces import ChosenCompression
from shoal.training.compression.choice import (
    BY_ERROR,
    SLOWER_MAX,
    LinkFigures,
    choose,
    expected_seconds,
)

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
