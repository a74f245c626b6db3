"""The plan: which worker gets which job."""

import pytest

from pool.builders import assign, job, joined, leased, pool_after
from shoal.domain.facts import (
    JobCompleted,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerDraining,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Feature
from shoal.pool.own_offers import own_slots
from shoal.pool.plan import plan
from shoal.pool.state import PoolState
from shoal.pool.worker import LOAD_SLOTS_MAX

CONTINUES = frozenset({Feature.CONTINUE})
ONE = LeaseNumber(1)


def submit(*names: str, model: str = "m") -> list[JobSubmitted]:
    return [JobSubmitted(job(name, model)) for name in names]


def apply_all(pool: PoolState, facts: list[JobSubmitted]) -> None:
    for fact in facts:
        pool.apply(fact, 0.0)


def complete(pool: PoolState, name: str) -> None:
    lease = pool.jobs[JobId(name)].lease
    pool.apply(JobCompleted(JobId(name), lease, Outcome("")), 0.0)


def test_empty_queue_has_an_empty_plan() -> None:
    assert plan(pool_after(joined())) == []


def test_plan_does_not_change_the_pool() -> None:
    pool = pool_after(joined(slots=2), *submit("a", "b", "c"))

    assert plan(pool) == plan(pool)
    assert pool.queued == 3


def test_oldest_job_goes_first() -> None:
    pool = pool_after(*submit("a", "b", "c"), joined(slots=2))

    assert assign(pool) == [("a", "w"), ("b", "w")]


def test_least_loaded_worker_goes_first() -> None:
    # Half of its slots are busy against a quarter: the share counts, not the number.
    pool = pool_after(
        joined("small", slots=2),
        *submit("a", "b"),
        leased("a", "small"),
        joined("large", slots=4),
        leased("b", "large"),
        *submit("c", "d", "e", "f"),
    )

    assert assign(pool) == [
        ("c", "large"),
        ("d", "large"),
        ("e", "small"),
        ("f", "large"),
    ]


def test_one_plan_spreads_over_equal_workers() -> None:
    names = [f"w{number}" for number in range(4)]
    pool = pool_after(*(joined(name, slots=2) for name in names), *submit(*"abcdefgh"))

    assert [worker for _, worker in assign(pool)] == names * 2


def test_idle_workers_take_turns() -> None:
    pool = pool_after(*(joined(name) for name in ("w1", "w2", "w3")))
    served = []

    for number in range(9):
        apply_all(pool, submit(f"j{number}"))
        ((_, worker),) = assign(pool)
        served.append(worker)
        complete(pool, f"j{number}")

    assert served == ["w1", "w2", "w3"] * 3


def test_requeued_job_goes_first() -> None:
    pool = pool_after(
        joined("lost"),
        *submit("old", "fresh1"),
        leased("old", "lost"),
        *submit("fresh2"),
        JobRequeued(JobId("old"), ONE, "worker lost"),
        WorkerLeft(WorkerId("lost"), ""),
        joined("w", slots=2),
    )

    assert assign(pool) == [("old", "w"), ("fresh1", "w")]


def test_started_job_of_before_a_restart_goes_first() -> None:
    pool = pool_after(*submit("fresh"))
    pool.restore(job("waited"), LeaseNumber(0), 0.0)
    pool.restore(job("begun"), LeaseNumber(3), 0.0)
    pool.apply(joined(slots=3), 0.0)

    leases = plan(pool)

    assert [lease.job_id for lease in leases] == ["begun", "fresh", "waited"]
    assert [lease.lease for lease in leases] == [4, 1, 1]


def begun_job(*workers_after: JobLeased) -> PoolState:
    return pool_after(
        joined("first"),
        *submit("j"),
        leased("j", "first"),
        JobStarted(JobId("j"), ONE),
        JobRequeued(JobId("j"), ONE, "worker lost"),
        WorkerLeft(WorkerId("first"), ""),
        *workers_after,
    )


def test_started_answer_prefers_a_worker_that_can_continue_it() -> None:
    pool = begun_job()
    pool.apply(joined("idle", slots=4), 0.0)
    pool.apply(joined("busy", slots=2, features=CONTINUES), 0.0)
    apply_all(pool, submit("x"))
    pool.apply(leased("x", "busy"), 0.0)

    assert assign(pool) == [("j", "busy")]


def test_started_answer_restarts_if_no_worker_can_continue_it() -> None:
    pool = begun_job()
    pool.apply(joined("busy", features=CONTINUES), 0.0)
    apply_all(pool, submit("x"))
    pool.apply(leased("x", "busy"), 0.0)
    pool.apply(joined("plain"), 0.0)

    assert assign(pool) == [("j", "plain")]


def test_new_job_ignores_the_continue_feature() -> None:
    pool = pool_after(
        joined("plain"), joined("continues", features=CONTINUES), *submit("j")
    )

    assert assign(pool) == [("j", "plain")]


def test_jobs_go_to_workers_with_their_model() -> None:
    pool = pool_after(
        joined("a", "x"), joined("b", "y"), *submit("j", model="y"), *submit("k")
    )

    assert assign(pool) == [("j", "b")]


def test_worker_with_two_models_is_not_overbooked() -> None:
    pool = pool_after(
        joined("both", "x", "y"), *submit("j", model="x"), *submit("k", model="y")
    )

    assert assign(pool) == [("j", "both")]
    complete(pool, "j")
    assert assign(pool) == [("k", "both")]


def test_planned_worker_still_counts_for_another_model() -> None:
    # Half of the slots of "both" are planned when "y" is examined, as many as are
    # busy at "half".
    pool = pool_after(
        joined("both", "x", "y", slots=2),
        joined("half", "y", slots=2),
        *submit("old", model="y"),
        leased("old", "half"),
        *submit("j", model="x"),
        *submit("k", "l", model="y"),
    )

    assert sorted(assign(pool)) == [("j", "both"), ("k", "half"), ("l", "both")]


def test_draining_worker_gets_no_jobs() -> None:
    pool = pool_after(joined(slots=2), *submit("a"))
    assign(pool)
    pool.apply(WorkerDraining(WorkerId("w"), "bye"), 0.0)
    apply_all(pool, submit("b"))

    assert assign(pool) == []
    complete(pool, "a")
    assert assign(pool) == []


def test_lease_numbers_count_attempts_and_the_reason_names_the_load() -> None:
    pool = pool_after(joined(slots=4), *submit("a", "b"))

    first, second = plan(pool)

    assert (first.lease, second.lease) == (1, 1)
    assert first.reason == "expected to be fastest: 0% of its slots in use"
    assert second.reason == "expected to be fastest: 25% of its slots in use"


@pytest.mark.parametrize("slots", [LOAD_SLOTS_MAX, 100_000])
def test_excessive_slots_do_not_attract_all_jobs(slots: int) -> None:
    pool = pool_after(
        joined("boaster", slots=slots),
        joined("honest", slots=LOAD_SLOTS_MAX),
        *submit(*(f"j{number}" for number in range(100))),
    )

    got = [worker for _, worker in assign(pool)]

    assert got.count("boaster") == got.count("honest") == 50


def test_models_of_one_engine_share_its_slots() -> None:
    one, two, other = ("s/a", "s/b", "t/b")
    pool = pool_after(
        joined(one, "a", slots=2, engine="e"),
        joined(two, "b", slots=2, engine="e"),
        *submit("a1", "a2", model="a"),
        *submit("b1", "b2", model="b"),
    )

    # The models take turns, and none gets what another has been promised.
    assert assign(pool) == [("a1", one), ("a2", one)]
    assert assign(pool) == []
    complete(pool, "a1")
    assert assign(pool) == [("b1", two)]
    assert pool.workers[WorkerId(one)].utilization() == 1.0

    # Another machine's engine is another, whatever it is called.
    pool.apply(joined(other, "b", engine="e"), 0.0)
    assert assign(pool) == [("b2", other)]
    assert own_slots(pool) == 3

    # What a worker held is free when it is gone.
    pool.apply(JobRequeued(JobId("a2"), ONE, "lost"), 0.0)
    pool.apply(WorkerLeft(WorkerId(one), "gone"), 0.0)
    apply_all(pool, submit("b3", model="b"))
    assert assign(pool) == [("b3", two)]


def test_a_plan_knows_all_workers_of_an_engine_that_do_the_same_work() -> None:
    stop = frozenset({Feature.STOP})
    pool = pool_after(
        joined("s/a", slots=2, engine="e"),
        joined("s/b", slots=2, engine="e", features=stop),
        *submit("a"),
        JobSubmitted(job("b", stop=True)),
        *submit("c"),
    )

    assert pool.roster.slots["m"] == 2
    assert assign(pool) == [("a", "s/a"), ("b", "s/b")]
