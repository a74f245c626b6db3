from hypothesis import given
from hypothesis import strategies as st

from shoal.protocols.tealenet.membership.deadline_queue import DeadlineQueue


def test_keys_are_due_in_the_order_of_their_deadlines() -> None:
    deadlines: DeadlineQueue[str] = DeadlineQueue()
    deadlines.set("late", 3.0)
    deadlines.set("early", 1.0)
    deadlines.set("never", None)

    assert deadlines.next_due == 1.0
    assert deadlines.pop_due(0.5) == []
    assert deadlines.pop_due(3.0) == ["early", "late"]
    assert deadlines.next_due is None


def test_an_earlier_deadline_replaces_the_later_one() -> None:
    deadlines: DeadlineQueue[str] = DeadlineQueue()
    deadlines.set("key", 3.0)
    deadlines.set("key", 1.0)

    assert deadlines.pop_due(1.0) == ["key"]
    assert deadlines.pop_due(3.0) == []


def test_a_later_deadline_does_not_delay_the_key() -> None:
    deadlines: DeadlineQueue[str] = DeadlineQueue()
    deadlines.set("key", 1.0)
    deadlines.set("key", 3.0)

    assert deadlines.pop_due(1.0) == ["key"]


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.floats(0, 9))))
def test_keys_are_due_at_their_earliest_deadline(
    given: list[tuple[int, float | None]],
) -> None:
    deadlines: DeadlineQueue[int] = DeadlineQueue()
    earliest: dict[int, float] = {}
    for key, when in given:
        deadlines.set(key, when)
        if when is not None:
            earliest[key] = min(when, earliest.get(key, when))

    for now in range(10):
        expected = {key for key, when in earliest.items() if when <= now}
        due = deadlines.pop_due(now)
        assert set(due) == expected
        assert len(due) == len(expected)
        earliest = {k: when for k, when in earliest.items() if k not in expected}
