"""The queue, and the order of turns."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.profiles import examples
from pool.builders import job
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import JobTerms, Priority
from shoal.pool.fair_shares import FairShares
from shoal.pool.open_job import OpenJob
from shoal.pool.queue import OVERTAKEN_BY_MAX, JobQueue, Turn

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
NOTHING: Counter[str] = Counter()


def waiting(
    name: str,
    owner: str = "",
    priority: Priority = NORMAL,
    lease: int = 0,
    *,
    whole: bool = False,
    user: str = "",
) -> OpenJob:
    terms = JobTerms(whole=whole, end_user=user)
    each = replace(job(name, owner=owner, priority=priority), terms=terms)
    return OpenJob(each, 0.0, 0.0, 0.0, lease=LeaseNumber(lease))


def queue_of(*jobs: OpenJob, running: Counter[str] = NOTHING) -> JobQueue:
    queue = JobQueue(FairShares(dict(running)))
    for each in jobs:
        queue.add(each)
    return queue


def order(
    queue: JobQueue, serves: Callable[[OpenJob], bool] = lambda job: True
) -> list[str]:
    """Return the names of the jobs in the order of their turns."""
    names: list[str] = []
    for turn in queue.in_order():
        names.append(turn.job.job.id)
        turn.served = serves(turn.job)
    return names


def served_in_order(queue: JobQueue, slots: int) -> Iterator[Turn]:
    """Yield the turns that a plan with some free slots serves."""
    for turn in islice(queue.in_order(), slots):
        turn.served = True
        yield turn


def test_new_queue_is_empty() -> None:
    queue = JobQueue()

    assert not queue
    assert (len(queue), order(queue)) == (0, [])


def test_jobs_of_one_owner_are_first_in_first_out() -> None:
    assert order(queue_of(*map(waiting, "abcd"))) == ["a", "b", "c", "d"]


def test_streams_of_an_owner_precede_what_it_gets_whole() -> None:
    """Open WebUI asks for a title beside each chat, with the same key."""
    queue = queue_of(
        waiting("a's title", "a", whole=True),
        waiting("b's title", "b", whole=True),
        waiting("a's chat", "a"),
    )

    assert order(queue) == ["a's chat", "b's title", "a's title"]


def test_what_is_answered_whole_is_overtaken_by_few() -> None:
    streams = [waiting(f"{number}") for number in range(2 * OVERTAKEN_BY_MAX)]
    queue = queue_of(waiting("whole", whole=True), *streams)

    assert order(queue).index("whole") == OVERTAKEN_BY_MAX


def test_users_of_one_owner_take_turns() -> None:
    flood = [waiting(f"a{number}", "key", user="ada") for number in range(150)]
    queue = queue_of(*flood)
    for each in flood[:3]:
        queue.remove(each)
    queue.remove(flood[-1])  # cancelled

    for name in ("b0", "b1", "c0"):
        queue.add(waiting(name, "key", user=name[0]))

    assert order(queue)[:6] == ["a3", "b0", "c0", "a4", "b1", "a5"]


def test_user_with_other_needs_does_not_wait_for_the_jobs_of_another() -> None:
    flood = [waiting(f"a{number}", "key", user="ada") for number in range(150)]
    terms = JobTerms(end_user="bob", near=True)
    picky = OpenJob(replace(job("b0", owner="key"), terms=terms), 0.0, 0.0, 0.0)
    queue = queue_of(*flood, picky)

    assert order(queue)[:2] == ["a0", "b0"]


def test_requeued_jobs_precede_higher_priorities() -> None:
    queue = queue_of(
        waiting("low", priority=LOW),
        waiting("high", priority=HIGH),
        waiting("normal"),
        waiting("again", priority=LOW, lease=1),
    )

    assert order(queue) == ["again", "high", "normal", "low"]


def test_owners_take_turns() -> None:
    queue = queue_of(
        *(waiting(f"a{n}", "al") for n in range(4)),
        *(waiting(f"b{n}", "bo") for n in range(2)),
        waiting("c0", "cy"),
    )

    assert order(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_owner_with_the_fewest_jobs_running_goes_first() -> None:
    queue = queue_of(
        *(waiting(f"a{n}", "al") for n in range(3)),
        *(waiting(f"b{n}", "bo") for n in range(3)),
        running=Counter(al=2),
    )

    turns = order(queue)

    assert turns == ["b0", "b1", "a0", "b2", "a1", "a2"]


def test_owner_of_an_ineligible_job_keeps_its_turn() -> None:
    queue = queue_of(
        waiting("odd", "al"), waiting("a1", "al"), waiting("b0", "bo"),
    )  # fmt: skip

    turns = order(queue, serves=lambda each: each.job.id != "odd")

    assert turns == ["odd", "a1", "b0"]


def test_turns_continue_across_plans() -> None:
    queue = queue_of(
        *(waiting(f"a{n}", "al") for n in range(3)),
        *(waiting(f"b{n}", "bo") for n in range(3)),
    )
    served = []

    # Each job ends before the next slot is free, so nothing is running.
    while queue:
        first = next(queue.in_order()).job
        queue.remove(first)
        served.append(first.job.id)

    assert served == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(
    ("owner", "priority", "ahead"),
    [
        (
            "new",
            NORMAL,
            1 + 1 + 2,
        ),  # the requeued one, the high one, one of each other owner
        ("al", NORMAL, 1 + 1 + 5 + 2),
        ("bo", NORMAL, 1 + 1 + 2 + 3),
        ("new", HIGH, 1 + 1),
        ("new", LOW, 1 + 1 + 7),
        ("cy", HIGH, 1 + 1),
    ],
)
def test_position_is_known_before_joining(
    owner: str, priority: Priority, ahead: int
) -> None:
    queue = queue_of(
        waiting("returned", "al", lease=1),
        waiting("high", "cy", HIGH),
        *(waiting(f"a{n}", "al") for n in range(5)),
        *(waiting(f"b{n}", "bo") for n in range(2)),
    )

    assert queue.ahead_of(owner, priority) == ahead


JOBS = st.lists(
    st.tuples(
        st.sampled_from(["al", "bo", "cy"]),
        st.sampled_from(Priority),
        st.integers(0, 1),
    ),
    max_size=30,
)
RUNNING = st.dictionaries(st.sampled_from(["al", "bo", "cy"]), st.integers(0, 5))


@given(JOBS, RUNNING)
def test_every_job_has_one_turn_in_the_predicted_order(
    jobs: Sequence[tuple[str, Priority, int]], running: dict[str, int]
) -> None:
    added = [waiting(f"j{n}", *each) for n, each in enumerate(jobs)]
    queue = queue_of(*added, running=Counter(running))
    by_name = {each.job.id: each for each in added}

    turns = [by_name[JobId(name)] for name in order(queue)]

    assert len(queue) == len(turns) == len(added)
    assert {each.job.id for each in turns} == by_name.keys()
    first = [each for each in turns if each.lease]
    assert turns[: len(first)] == first
    priorities = [-each.job.priority.value for each in turns[len(first) :]]
    assert priorities == sorted(priorities)
    for owner in ("al", "bo", "cy"):
        for priority in Priority:
            own = [
                int(each.job.id[1:])
                for each in turns
                if (each.job.owner, each.job.priority, each.lease)
                == (owner, priority, 0)
            ]
            assert own == sorted(own)


@settings(max_examples=examples(0.4))
@given(JOBS, RUNNING, st.integers(1, 30))
def test_slots_are_shared_max_min_fair(
    jobs: Sequence[tuple[str, Priority, int]], running: dict[str, int], slots: int
) -> None:
    added = [waiting(f"j{n}", owner) for n, (owner, _, _) in enumerate(jobs)]
    queue = queue_of(*added, running=Counter(running))
    has = Counter(running)
    for turn in queue.in_order():
        if slots == 0:
            break
        slots -= 1
        has[turn.job.job.owner] += 1
        turn.served = True
    wanted = Counter(running) + Counter(each.job.owner for each in added)

    # Max-min fairness: an owner with less than it wants has as much as any other owner
    # with jobs, or one less.
    for poor in wanted:
        for rich in wanted:
            if has[poor] < wanted[poor] and has[rich] > running.get(rich, 0):
                assert has[rich] <= has[poor] + 1


@settings(max_examples=examples(0.4))
@given(st.data(), JOBS)
def test_removed_jobs_leave_the_others(
    data: st.DataObject, jobs: Sequence[tuple[str, Priority, int]]
) -> None:
    added = [waiting(f"j{n}", *each) for n, each in enumerate(jobs)]
    queue = queue_of(*added)
    gone = [each for each in added if data.draw(st.booleans())]

    for each in gone:
        queue.remove(each)

    left = {each.job.id for each in added} - {each.job.id for each in gone}
    assert sorted(order(queue)) == sorted(left)
    assert len(queue) == len(left)
    assert bool(queue) == bool(left)
    for each in added:
        if each not in gone:
            queue.remove(each)
    assert not queue
    assert order(queue) == []


def test_owner_with_a_thousand_jobs_delays_another_by_one() -> None:
    queue = queue_of(
        *(waiting(f"a{n}", "al") for n in range(1000)), waiting("b0", "bo")
    )

    first = [turn.job.job.id for turn in served_in_order(queue, 2)]

    assert first == ["a0", "b0"]
    assert queue.ahead_of("bo", NORMAL) == 1 + 2
