import weakref

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocols.seam.deadlines import (
    UNUSED_MAX,
    DeadlineQueue,
)

KEYS = st.integers(0, 5)
TIMES = st.none() | st.floats(0, 9)
Step = tuple[int, float | None] | int
"""A key with a deadline to set, or a key to discard."""


class Session:
    """A key that can be referenced weakly."""


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


def test_a_discarded_key_is_not_due() -> None:
    deadlines: DeadlineQueue[str] = DeadlineQueue()
    deadlines.set("ended", 1.0)
    deadlines.set("open", 3.0)
    deadlines.discard("ended")
    deadlines.discard("unknown")

    assert deadlines.next_due == 3.0
    assert deadlines.pop_due(3.0) == ["open"]


def test_a_discarded_key_is_not_held() -> None:
    deadlines: DeadlineQueue[Session] = DeadlineQueue()
    first, session = Session(), Session()
    deadlines.set(first, 1.0)
    deadlines.set(session, 60.0)
    deadlines.set(session, 15.0)
    ended = weakref.ref(session)

    deadlines.discard(session)
    del session

    assert ended() is None
    assert deadlines.next_due == 1.0


@given(st.lists(st.tuples(KEYS, TIMES) | KEYS, max_size=300))
def test_keys_are_due_at_their_earliest_deadline(given: list[Step]) -> None:
    deadlines: DeadlineQueue[int] = DeadlineQueue()
    earliest: dict[int, float] = {}
    for step in given:
        if isinstance(step, int):
            deadlines.discard(step)
            earliest.pop(step, None)
        else:
            key, when = step
            deadlines.set(key, when)
            if when is not None:
                earliest[key] = min(when, earliest.get(key, when))
        assert deadlines.next_due == min(earliest.values(), default=None)

    for now in range(10):
        expected = {key for key, when in earliest.items() if when <= now}
        due = deadlines.pop_due(now)
        assert set(due) == expected
        assert len(due) == len(expected)
        earliest = {k: when for k, when in earliest.items() if k not in expected}


def test_keys_that_come_and_go_do_not_lose_the_others() -> None:
    deadlines: DeadlineQueue[int] = DeadlineQueue()
    for number in range(1000):
        deadlines.set(number, 1000.0 - number)
    for number in range(5, 1000):
        deadlines.discard(number)

    assert deadlines.pop_due(1000.0) == [4, 3, 2, 1, 0]
    assert deadlines.next_due is None


class Due(float):
    """A deadline that can be referenced weakly."""


def test_deadlines_that_were_replaced_are_not_all_held() -> None:
    deadlines: DeadlineQueue[str] = DeadlineQueue()
    given = []
    for seconds in range(1000, 0, -1):
        due = Due(seconds)
        given.append(weakref.ref(due))
        deadlines.set("key", due)

    assert sum(each() is not None for each in given) <= 2 * UNUSED_MAX
    assert deadlines.pop_due(1.0) == ["key"]
