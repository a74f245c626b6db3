"""Which of the free workers is best for a job."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pool.builders import (
    NO_OWNERS,
    assign,
    job,
    joined,
    leased,
    load_changed,
    pool_after,
)
from shoal.domain.facts import (
    JobCompleted,
    JobRequeued,
    JobSubmitted,
    WorkerDraining,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat
from shoal.pool.eligibility import ineligibility
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.open_job import OpenJob
from shoal.pool.plan import plan
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

LONG = "word " * 2000  # about 2,500 tokens, and 1,250 at the least


def submit(pool: PoolState, *names: str, session: str = "", prompt: str = "hi") -> None:
    for name in names:
        each = job(name, session=session, prompt=prompt)
        pool.apply(JobSubmitted(each), 0.0)


def end(pool: PoolState, name: str) -> None:
    lease = pool.jobs[JobId(name)].lease
    pool.apply(JobCompleted(JobId(name), lease, Outcome("")), 0.0)


def with_pace(pool: PoolState, name: str, pace: float) -> None:
    """Let a worker have been measured to write so many tokens a second."""
    worker = pool.workers[WorkerId(name)]
    worker.pace = pace
    pool.roster.index(worker)


# Speed.


def test_quick_worker_is_busier_before_a_slow_one_is_better() -> None:
    pool = pool_after(joined("slow", slots=4), joined("quick", slots=4))
    with_pace(pool, "slow", 16.0)
    with_pace(pool, "quick", 64.0)
    submit(pool, *"abcdef")

    # With three jobs, one more takes the quick one as long as the slow one its first.
    workers = [worker for _, worker in assign(pool)]
    assert workers == ["quick", "quick", "quick", "slow", "quick", "slow"]


def test_workers_of_about_the_same_speed_take_turns() -> None:
    pool = pool_after(*(joined(name) for name in "abc"))
    for name, pace in (("a", 50.0), ("b", 64.0), ("c", 80.0)):
        with_pace(pool, name, pace)
    served = []

    for number in range(6):
        submit(pool, f"j{number}")
        ((_, worker),) = assign(pool)
        end(pool, f"j{number}")
        served.append(worker)

    assert served == [*"abcabc"]


@pytest.mark.parametrize(
    ("usual", "expected"), [(None, "known"), (64.0, "new"), (4.0, "known")]
)
def test_worker_that_was_never_measured_counts_as_usual(
    usual: float | None, expected: str
) -> None:
    pool = pool_after(joined("known"), joined("new"))
    with_pace(pool, "known", 16.0)
    pool.speeds.typical_pace = usual
    submit(pool, "j")

    assert assign(pool) == [("j", expected)]


def test_first_worker_that_is_measured_does_not_draw_all_work() -> None:
    pool = pool_after(*(joined(name) for name in "abc"))
    served = []

    for number in range(6):
        submit(pool, f"j{number}")
        ((_, worker),) = assign(pool, now=10.0 * number)
        lease = pool.jobs[JobId(f"j{number}")].lease
        text = Outcome("word " * 1000)
        pool.apply(JobCompleted(JobId(f"j{number}"), lease, text), 10.0 * number + 1.0)
        served.append(worker)

    assert served == [*"abcabc"]


def test_reason_names_the_load_and_the_measured_speed() -> None:
    pool = pool_after(joined(slots=4))
    submit(pool, "a")
    assign(pool)
    with_pace(pool, "w", 31.6)
    submit(pool, "b")

    (lease,) = plan(pool)

    assert lease.reason == (
        "expected to be quickest: 25% of its slots in use, about 32 tokens/s"
    )


def test_worker_that_comes_to_a_cost_by_a_promise_comes_after_those_who_had_it() -> (
    None
):
    pool = pool_after(joined("two", slots=2), joined("one", slots=1))
    submit(pool, "a", "b", "c")

    assert assign(pool) == [("a", "two"), ("b", "one"), ("c", "two")]


# Sessions.


def after_a_talk(*others: str, slots: int = 4) -> PoolState:
    """Return a pool in which a worker "had" the session "talk"."""
    pool = pool_after(joined("had", slots=slots))
    submit(pool, "before", session="talk")
    assign(pool)
    end(pool, "before")
    for name in others:
        pool.apply(joined(name, slots=slots), 0.0)
    return pool


def test_conversation_goes_on_where_it_was() -> None:
    pool = after_a_talk("other")
    submit(pool, "a", "b", "c")
    for name, worker in (("a", "had"), ("b", "had"), ("c", "other")):
        pool.apply(leased(name, worker), 0.0)
    submit(pool, "next", session="talk")

    (lease,) = plan(pool)

    assert lease.worker_id == "had"
    assert lease.reason == "had the conversation before: 50% of its slots in use"


def test_conversation_goes_elsewhere_if_its_worker_is_much_too_busy() -> None:
    pool = after_a_talk("idle")
    submit(pool, "a")
    pool.apply(leased("a", "had"), 0.0)
    submit(pool, "next", session="talk")

    assert assign(pool) == [("next", "idle")]


def test_questions_that_begin_alike_are_answered_side_by_side() -> None:
    pool = after_a_talk("idle")
    submit(pool, "one", session="talk")
    submit(pool, "two", session="talk")

    assert assign(pool) == [("one", "had"), ("two", "idle")]


@pytest.mark.parametrize(
    "fact",
    [WorkerDraining(WorkerId("had"), ""), WorkerLeft(WorkerId("had"), "")],
    ids=["draining", "lost"],
)
def test_conversation_goes_elsewhere_if_its_worker_takes_nothing(
    fact: WorkerDraining | WorkerLeft,
) -> None:
    pool = after_a_talk("idle")
    pool.apply(fact, 0.0)
    submit(pool, "next", session="talk")

    assert assign(pool) == [("next", "idle")]


def test_one_plan_does_not_overfill_the_worker_of_a_conversation() -> None:
    pool = after_a_talk("idle", slots=1)
    submit(pool, "a", "b", "c", session="talk")

    assert assign(pool) == [("a", "had"), ("b", "idle")]


def test_conversation_of_another_worker_with_another_model_is_no_reason() -> None:
    pool = after_a_talk()
    pool.apply(joined("v", "n"), 0.0)
    pool.apply(JobSubmitted(job("next", "n", session="talk")), 0.0)

    assert assign(pool) == [("next", "v")]


# What a worker can do.


def test_long_question_goes_to_a_busier_worker_that_has_room_for_it() -> None:
    pool = pool_after(joined("unknown"), joined("roomy", slots=2, context=8192))
    submit(pool, "x")
    pool.apply(leased("x", "roomy"), 0.0)
    submit(pool, "long", prompt=LONG)

    (lease,) = plan(pool)

    assert lease.worker_id == "roomy"
    assert lease.reason == "has room for it: 50% of its slots in use"


def test_long_question_goes_to_one_of_which_nothing_is_known_if_no_other_is_free() -> (
    None
):
    pool = pool_after(joined("small", context=1000), joined("unknown"))
    submit(pool, "long", prompt=LONG)

    assert assign(pool) == [("long", "unknown")]


def test_question_that_may_just_fit_is_tried() -> None:
    pool = pool_after(joined("tight", context=1500))
    submit(pool, "long", prompt=LONG)

    assert assign(pool) == [("long", "tight")]


def test_worker_of_certain_keys_works_for_these_alone() -> None:
    pool = pool_after(joined("theirs", slots=2, only_for=frozenset({"al"})))
    pool.apply(JobSubmitted(job("b", owner="bo")), 0.0)
    pool.apply(JobSubmitted(job("a", owner="al")), 0.0)

    assert assign(pool) == [("a", "theirs")]
    pool.apply(joined("anybodys", only_for=NO_OWNERS), 0.0)
    assert assign(pool) == [("b", "anybodys")]


def test_job_does_not_come_back_to_a_worker_that_is_at_it_already() -> None:
    # As after a race that it has lost on a wire that cannot cancel.
    pool = pool_after(joined(slots=2, cancels=False))
    submit(pool, "j")
    pool.workers[WorkerId("w")].leases[JobId("j")] = LeaseNumber(1)

    assert assign(pool) == []


# Crowds.


class Looked(dict[WorkerId, Worker]):
    """Counts how many of its workers were looked at."""

    looked = 0

    def values(self) -> Iterator[Worker]:  # type: ignore[override]  # lazy on purpose
        for worker in super().values():
            self.looked += 1
            yield worker


def test_of_thousands_of_idle_workers_no_more_are_looked_at_than_jobs_need() -> None:
    pool = pool_after(*(joined(f"w{number}") for number in range(5000)))
    ((level, workers),) = pool.roster.available["m"].items()
    counted = pool.roster.available["m"][level] = Looked(workers)
    submit(pool, *"abc")

    given = plan(pool)

    assert [lease.worker_id for lease in given] == ["w0", "w1", "w2"]
    assert counted.looked == 3


def test_of_a_thousand_jobs_alike_that_nobody_takes_one_is_tried() -> None:
    theirs = frozenset({"somebody"})
    pool = pool_after(*(joined(f"w{n}", only_for=theirs) for n in range(100)))
    submit(pool, *(f"j{number}" for number in range(1000)))
    pool.apply(JobSubmitted(job("theirs", owner="somebody")), 0.0)
    free = FreeWorkers(pool, "m", PromisedSlots())
    looked = 0

    def counted(each: OpenJob, worker: Worker) -> str | None:
        nonlocal looked
        looked += 1
        return ineligibility(each, worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.pool.free_workers.ineligibility", counted)
        found = [free.assign(each) is not None for each in pool.jobs.values()]

    assert found == [False] * 1000 + [True]
    assert looked == 100 + 1


def test_job_that_is_too_long_for_all_does_not_stand_for_shorter_ones() -> None:
    pool = pool_after(joined(context=1000))
    submit(pool, "long", prompt=LONG)
    submit(pool, "short")

    assert assign(pool) == [("short", "w")]


def test_chat_without_a_question_does_not_stand_for_those_with_one() -> None:
    orders = Chat("m", ({"role": "system", "content": "be kind"},))
    pool = pool_after(
        joined(needs_question=True),
        JobSubmitted(replace(job("orders"), work=orders)),
        JobSubmitted(job("question")),
    )

    assert assign(pool) == [("question", "w")]
    explained = ineligibility(pool.jobs[JobId("orders")], pool.workers[WorkerId("w")])
    assert explained == "needs a message besides the system's"


def test_job_that_was_refused_does_not_stand_for_others_like_it() -> None:
    pool = pool_after(joined())
    submit(pool, "refused", "other")
    pool.apply(leased("refused"), 0.0)
    pool.apply(JobRequeued(JobId("refused"), LeaseNumber(1), "no", WorkerId("w")), 0.0)

    assert assign(pool) == [("other", "w")]


def test_workers_that_one_job_passed_by_are_there_for_the_next() -> None:
    pool = pool_after(*(joined(f"w{n}", context=1000) for n in range(3)))
    pool.apply(joined("roomy", context=8192), 0.0)
    submit(pool, "long", prompt=LONG)
    submit(pool, "a", "b", "c", "d")

    given = assign(pool)

    assert given == [("long", "roomy"), ("a", "w0"), ("b", "w1"), ("c", "w2")]


# Condition.


def test_jobs_that_others_have_there_make_a_worker_dearer_and_take_no_slot() -> None:
    pool = pool_after(joined("busy"), joined("idle"), load_changed("busy", queued=1))
    submit(pool, "a", "b", "c")

    assert assign(pool) == [("a", "idle"), ("b", "busy")]


def test_worker_at_half_its_speed_costs_twice() -> None:
    pool = pool_after(
        joined("slow", slots=4),
        joined("quick", slots=4),
        load_changed("slow", speed=0.5),
    )
    submit(pool, *"abcdef")

    # One job more costs the slow one as much as two the quick one.
    workers = [worker for _, worker in assign(pool)]
    assert workers == ["quick", "slow", "quick", "quick", "slow", "quick"]


def test_reason_of_a_lease_says_what_its_workers_condition_is() -> None:
    pool = pool_after(joined(slots=2), load_changed(queued=1, speed=0.5))
    submit(pool, "a")

    (lease,) = plan(pool)

    assert lease.reason == (
        "expected to be quickest: 50% of its slots in use, "
        "jobs of others there: 1, at 50% of its speed"
    )
