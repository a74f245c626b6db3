"""Who sends what when a generation begins."""

from collections.abc import Sequence

import pytest

from shoal.training.generations.messages import (
    Formation,
    FormedRank,
    RankMissing,
    Settlement,
    settle,
)


def formation(operations: Sequence[int], newest: int | None = None) -> Formation:
    ranks = [
        FormedRank(rank, (), 1, "", operation, 0)
        for rank, operation in enumerate(operations)
    ]
    last = max(operations) if newest is None else newest
    return Formation(1, 0, "", ranks, last)


@pytest.mark.parametrize(
    ("operations", "mine", "shared", "arrived", "found"),
    [
        ((4, 4), 4, True, False, Settlement(False, None)),
        ((3, 4, 4), 3, True, False, Settlement(True, 1)),
        ((3, 4, 4), 4, True, False, Settlement(False, 1)),
        ((3, 4, 4), 3, False, True, Settlement(True, None)),
        ((3, 4, 4), 4, False, False, Settlement(False, None)),
    ],
    ids=["none misses", "misses", "has it", "arrived", "others arrived"],
)
def test_what_follows_from_the_last_operations(
    operations: Sequence[int],
    mine: int,
    shared: bool,
    arrived: bool,
    found: Settlement,
) -> None:
    formed = formation(operations)

    assert settle(formed, mine, shared=shared, arrived=arrived) == found


def test_a_result_that_only_a_rank_that_left_has_is_missing() -> None:
    formed = formation((3, 3), newest=4)

    with pytest.raises(RankMissing, match="operation 4 left"):
        settle(formed, 3, shared=True, arrived=False)
    assert settle(formed, 3, shared=False, arrived=True).misses


def test_a_result_of_a_rank_that_has_not_arrived_is_missing() -> None:
    with pytest.raises(RankMissing, match="nothing of operation 4"):
        settle(formation((3, 4)), 3, shared=False, arrived=False)
