"""Which tasks are overdue."""

from shoal.protocols.seam.task_deadlines import STALE_MAX, TaskDeadlines


def test_tasks_are_due_by_their_own_timeouts() -> None:
    deadlines = TaskDeadlines(grace=1.0)
    assert deadlines.due is None

    deadlines.add("slow", 10.0, 0.0)
    deadlines.add("quick", 2.0, 1.0)
    deadlines.add("later", 2.0, 3.0)

    assert deadlines.due == 4.0
    assert list(deadlines.take_overdue(3.9)) == []
    assert list(deadlines.take_overdue(4.0)) == [("quick", 2.0)]
    assert deadlines.due == 6.0
    assert list(deadlines.take_overdue(11.0)) == [("later", 2.0), ("slow", 10.0)]
    assert deadlines.due is None


def test_removed_tasks_are_never_due() -> None:
    deadlines = TaskDeadlines()
    deadlines.add("a", 1.0, 0.0)
    deadlines.add("b", 1.0, 0.0)

    deadlines.remove("a")
    deadlines.remove("a")

    assert list(deadlines.take_overdue(9.0)) == [("b", 1.0)]


def test_removed_tasks_take_no_memory() -> None:
    deadlines = TaskDeadlines()
    deadlines.add("first", 86_400.0, 0.0)

    for number in range(10_000):  # each has another timeout
        deadlines.add(str(number), 86_400.0 - number / 1000, 0.0)
        deadlines.remove(str(number))

    assert len(deadlines._heap) <= STALE_MAX + 2
    assert deadlines.due == 86_400.0
