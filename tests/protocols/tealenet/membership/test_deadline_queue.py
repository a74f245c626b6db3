from hypothesis import given
from hypothesis import strategies as st

from shoal.protocols.tealenet.membership.deadline_queue import DeadlineQueue


def test_keys_come_up_in_the_order_of_their_times() -> None:
    times: DeadlineQueue[str] = DeadlineQueue()
    times.set("late", 3.0)
    times.set("early", 1.0)
    times.set("never", None)

    assert times.next_due == 1.0
    assert times.pop_due(0.5) == []
    assert times.pop_due(3.0) == ["early", "late"]
    assert times.next_due is None


def test_a_time_that_moves_nearer_counts_and_the_key_comes_up_once() -> None:
    times: DeadlineQueue[str] = DeadlineQueue()
    times.set("key", 3.0)
    times.set("key", 1.0)

    assert times.pop_due(1.0) == ["key"]
    assert times.pop_due(3.0) == []


def test_a_time_that_moves_on_leaves_the_key_where_it_is() -> None:
    times: DeadlineQueue[str] = DeadlineQueue()
    times.set("key", 1.0)
    times.set("key", 3.0)

    assert times.pop_due(1.0) == ["key"]


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.floats(0, 9))))
def test_no_key_comes_up_later_than_it_was_set(
    given: list[tuple[int, float | None]],
) -> None:
    times: DeadlineQueue[int] = DeadlineQueue()
    earliest: dict[int, float] = {}
    for key, when in given:
        times.set(key, when)
        if when is not None:
            earliest[key] = min(when, earliest.get(key, when))

    for now in range(10):
        expected = {key for key, when in earliest.items() if when <= now}
        due = times.pop_due(now)
        assert set(due) == expected
        assert len(due) == len(expected)
        earliest = {k: when for k, when in earliest.items() if k not in expected}
