"""The order of samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.training.loop.samples import SampleOrder, divide


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1),
    st.lists(st.booleans(), min_size=1),
)
def test_each_sample_comes_once_an_epoch_whatever_happens(
    length: int, batch: int, groups: list[list[int]], counted: list[bool]
) -> None:
    # The speeds and the number of ranks change in each step; some do not count.
    order = SampleOrder(length, batch, seed=3)
    taken: list[int] = []
    at = 0
    while order.epoch == 0:
        speeds = groups[at % len(groups)]
        counts = divide(order.next_size, speeds)
        parts = [order.part(counts, rank) for rank in range(len(speeds))]
        counts_now = counted[at % len(counted)] or at % 7 == 0
        at += 1
        if not counts_now:
            continue
        again = SampleOrder(length, batch)
        again.restore(order.state())
        assert parts == [again.part(counts, rank) for rank in range(len(speeds))]
        taken += [each for part in parts for each in part]
        order.advance()

    assert sorted(taken) == [*range(length)]
    assert order.at_beginning


def test_the_order_is_shuffled_anew_by_the_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        order = SampleOrder(8, 8, seed)
        found = []
        for _ in range(2):
            found.append(order.part([8], 0))
            order.advance()
        return found

    # The same everywhere: ranks on other systems take part, and runs are resumed.
    assert epochs(1)[0] == [1, 6, 0, 3, 7, 4, 2, 5]
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1)[0] != epochs(2)[0]


def test_last_batch_has_what_is_left() -> None:
    order = SampleOrder(10, 4)

    sizes = []
    for _ in range(order.steps_of_epoch):
        sizes.append(order.next_size)
        order.advance()

    assert sizes == [4, 4, 2]
    assert order.epoch == 1


def test_another_data_set_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="of a data set of 10 samples, and this"):
        SampleOrder(12, 4).restore(SampleOrder(10, 4).state())
