"""Shares of unequal machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.training.loop.samples import RankMeasurement, Shares, check_sizes, divide

SPEEDS = st.lists(
    st.floats(0, 1e6, allow_nan=False, allow_subnormal=False), min_size=1, max_size=9
)


@given(st.integers(0, 5000), SPEEDS)
def test_shares_add_up_and_follow_the_speeds(total: int, speeds: list[float]) -> None:
    counts = divide(total, speeds)

    assert sum(counts) == total
    whole = sum(speeds)
    for count, speed in zip(counts, speeds, strict=True):
        exact = total * speed / whole if whole else total / len(speeds)
        assert abs(count - exact) < 1 + 1e-6


@pytest.mark.parametrize(
    ("total", "speeds", "counts"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (12, [3, 1], [9, 3]),
        (7, [0, 0], [4, 3]),
        (8, [2, 0, 2], [4, 0, 4]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_shares_of_some_speeds(
    total: int, speeds: list[float], counts: list[int]
) -> None:
    assert divide(total, speeds) == counts


def step(*ranks: tuple[int, float, float]) -> list[RankMeasurement]:
    return [RankMeasurement(*each) for each in ranks]


def test_shares_are_adapted_to_the_median_speed() -> None:
    shares = Shares([0, 1])
    assert shares.of(8) == [4, 4]

    for seconds in (0.4, 9.0, 0.4):  # one slow step is no slow machine
        shares.record(step((4, 0.1, 1.0), (4, seconds, 1.0)))
    assert shares.of(8) == [4, 4], "until shares are adapted"
    shares.adapt(12)

    assert shares.of(10) == [8, 2]
    assert [*shares.speeds] == [40.0, 10.0]


def test_a_machine_that_lends_half_of_its_speed_gets_half_of_the_share() -> None:
    shares = Shares([0, 1, 2])

    shares.record(step((4, 0.1, 1.0), (4, 0.1, 0.5), (4, 0.1, 0.0)))
    shares.adapt(12)

    assert shares.of(12) == [8, 4, 0]


def test_a_machine_that_had_no_share_gets_one_when_it_is_lent_again() -> None:
    shares = Shares([0, 1])
    shares.record(step((4, 0.1, 1.0), (4, 0.2, 0.0)))
    shares.adapt(12)
    assert shares.of(9) == [9, 0]

    shares.record(step((9, 0.225, 1.0), (0, 0.0, 1.0)))
    shares.adapt(12)

    assert shares.of(9) == [6, 3]


def test_a_rank_without_a_measurement_counts_as_the_median() -> None:
    shares = Shares([0, 1, 2])

    shares.record(step((4, 0.1, 1.0), (0, 0.0, 1.0), (4, 0.2, 1.0)))
    shares.adapt(12)

    assert shares.of(9) == [4, 3, 2]


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((3, 8, 4), "the data set has 3 samples, and there are 4 ranks"),
        ((100, 2, 4), "a batch has 2 samples, and there are 4 ranks"),
        ((5, 8, 4), "a batch has 8 samples, and the data set 5"),
        ((0, 8, 4), "a data set of 0 samples and batches of 8"),
    ],
)
def test_sizes_that_cannot_be_are_named(
    sizes: tuple[int, int, int], error: str
) -> None:
    with pytest.raises(InvalidRequest, match=error):
        check_sizes(*sizes)


def test_sizes_that_can_be() -> None:
    check_sizes(4, 4, 4)


def test_about_equal_machines_keep_equal_shares() -> None:
    shares = Shares([0, 1])
    shares.record(step((50, 1.0, 1.0), (50, 1.1, 1.0)))

    assert not shares.adapt(100)
    assert shares.of(100) == [50, 50]


def test_speeds_stay_with_the_ranks_that_are_left() -> None:
    shares = Shares([0, 1, 2])
    shares.record(step((4, 0.1, 1.0), (4, 0.4, 1.0), (4, 0.2, 1.0)))
    assert shares.adapt(12)

    shares.regroup([0, 2])  # rank 1 is lost
    assert shares.of(12) == [8, 4]
    shares.regroup([0, 2, 5])  # another one has joined

    assert shares.of(12) == [5, 3, 4]
    again = Shares([0, 1])
    again.restore(shares.state())
    assert again.of(12) == [5, 3, 4]
