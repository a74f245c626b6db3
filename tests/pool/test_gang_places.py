"""Where the members of gangs run, and for which machines they wait."""

from msgspec.structs import replace

from pool.builders import (
    RUN,
    assign,
    chat,
    gang,
    handle,
    job,
    joined,
    leased,
    load_changed,
    member,
    pool_after,
)
from shoal.domain.facts import (
    JobCompleted,
    JobRequeued,
    JobSubmitted,
    WorkerLeft,
    WorkerMarked,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Priority
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Rejected
from shoal.domain.worker import WorkerLoad
from shoal.pool.eligibility import POINTS_MAX
from shoal.pool.hedge import hedges
from shoal.pool.inputs import LeaseResult, LoadReported, WorkerDisconnected
from shoal.pool.plan import plan
from shoal.pool.state import RETURN_GRACE, PoolState

OTHER_RUN = "f" * 32
ONE = LeaseNumber(1)


def complete(pool: PoolState, name: str, lease: int = 1) -> None:
    pool.apply(JobCompleted(JobId(name), LeaseNumber(lease), Outcome("")), 1.0)


def submit(pool: PoolState, *names: str, priority: Priority = Priority.NORMAL) -> None:
    for name in names:
        pool.apply(JobSubmitted(job(name, priority=priority)), 0.0)


def test_members_begin_together_on_machines_of_their_own() -> None:
    pool = pool_after(
        joined("a/x", slots=4), joined("a/y", slots=4), joined("b"), *gang(3)
    )

    assert assign(pool) == []

    pool.apply(joined("c", slots=2), 0.0)
    workers = dict(assign(pool))
    assert sorted(workers) == ["r0", "r1", "r2"]
    assert {each.partition("/")[0] for each in workers.values()} == {"a", "b", "c"}


def test_gang_waits_until_all_of_its_members_were_submitted() -> None:
    first, second = gang(2)
    pool = pool_after(joined("a"), joined("b"), first)

    assert assign(pool) == []

    pool.apply(second, 0.0)
    assert len(assign(pool)) == 2


def test_lease_says_rank_and_machines_that_were_passed_over() -> None:
    pool = pool_after(joined("a"), joined("b", slots=0), joined("c"), *gang(2))

    leases = plan(pool)

    assert [each.reason for each in leases] == [
        "rank 0 of 2, all ranks at once",
        "rank 1 of 2, all ranks at once",
    ]
    assert [group.workers for group in leases[0].passed_over] == [("b",)]
    assert leases[0].passed_over == leases[1].passed_over


def test_member_takes_a_whole_machine_or_its_slots() -> None:
    whole = pool_after(joined("a", slots=4), *gang(1))
    assert assign(whole) == [("r0", "a")]
    submit(whole, "j")
    assert assign(whole) == []
    assert whole.workers[WorkerId("a")].free_slots == 0

    share = pool_after(joined("a", slots=4), *gang(1, slots=3))
    assert assign(share) == [("r0", "a")]
    submit(share, "j", "k")
    assert assign(share) == [("j", "a")]
    complete(share, "r0")
    assert share.workers[WorkerId("a")].free_slots == 3


def test_share_needs_enough_free_slots() -> None:
    pool = pool_after(joined("a", slots=4), JobSubmitted(job()), leased(worker="a"))
    for fact in gang(1, slots=4):
        pool.apply(fact, 0.0)

    assert assign(pool) == []

    complete(pool, "j")
    assert assign(pool) == [("r0", "a")]


def test_no_call_is_prefetched_behind_a_member() -> None:
    pool = pool_after(joined("a", slots=2), *gang(1, slots=1))
    pool.workers[WorkerId("a")].prefetch_max = 8
    pool.roster.index(pool.workers[WorkerId("a")])

    assign(pool)

    assert pool.workers[WorkerId("a")].free_slots == 1


def test_small_jobs_do_not_overtake_a_gang() -> None:
    pool = pool_after(joined("a", slots=2), joined("b", slots=2))
    submit(pool, "j1", "j2", "j3")
    assert len(assign(pool)) == 3
    for fact in gang(2):
        pool.apply(fact, 0.0)
    submit(pool, "k1", "k2", "k3", "k4")

    assert assign(pool) == []
    complete(pool, "j1")
    assert assign(pool) == []
    complete(pool, "j2")
    assert assign(pool) == []
    complete(pool, "j3")
    assert sorted(name for name, _ in assign(pool)) == ["r0", "r1"]


def test_only_as_many_machines_are_reserved_as_a_gang_needs() -> None:
    pool = pool_after(*(joined(name, slots=2) for name in "abc"))
    submit(pool, "j1", "j2", "j3")
    assert {worker for _, worker in assign(pool)} == {"a", "b", "c"}
    for fact in gang(1):
        pool.apply(fact, 0.0)
    submit(pool, "k1", "k2", "k3")

    assert [name for name, _ in assign(pool)] == ["k1", "k2"]


def test_gang_that_can_never_begin_holds_no_slot() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(3))
    submit(pool, "j1", "j2", "j3")

    assert [name for name, _ in assign(pool)] == ["j1", "j2"]


def test_gang_reserves_nothing_while_another_gang_has_its_machines() -> None:
    pool = pool_after(joined("a"), joined("b"), joined("c"), *gang(2))
    assert len(assign(pool)) == 2
    for fact in gang(2, run=OTHER_RUN):
        pool.apply(fact, 0.0)
    submit(pool, "j")

    assert [name for name, _ in assign(pool)] == ["j"]


def test_a_younger_gang_does_not_overtake_an_older_one() -> None:
    pool = pool_after(joined("a"), joined("b"), joined("c"), joined("d"), *gang(2))
    assert len(assign(pool)) == 2
    for fact in [*gang(4, run=OTHER_RUN), *gang(2, run="e" * 32)]:
        pool.apply(fact, 0.0)

    assert assign(pool) == []

    complete(pool, "r0")
    complete(pool, "r1")
    assert sorted(name for name, _ in assign(pool)) == ["f0", "f1", "f2", "f3"]


def test_gang_with_too_few_machines_is_overtaken() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(3), *gang(2, run=OTHER_RUN))

    assert sorted(name for name, _ in assign(pool)) == ["f0", "f1"]


def test_gangs_of_a_higher_priority_come_first() -> None:
    pool = pool_after(
        *(joined("a"), joined("b")),
        *gang(2),
        *gang(2, run=OTHER_RUN, priority=Priority.HIGH),
    )

    assert sorted(name for name, _ in assign(pool)) == ["f0", "f1"]


def test_gangs_that_have_begun_come_before_those_of_a_higher_priority() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(2, priority=Priority.LOW))
    workers = dict(assign(pool))
    lost = next(name for name, worker in workers.items() if worker == "b")
    handle(pool, WorkerDisconnected(WorkerId("b"), "gone"))
    pool.expire_penalties(RETURN_GRACE)
    for fact in gang(1, run=OTHER_RUN, priority=Priority.HIGH):
        pool.apply(fact, 0.0)

    pool.apply(joined("c"), 0.0)

    assert assign(pool) == [(lost, "c")]


def test_gang_gets_no_machine_that_an_earlier_one_of_another_model_claims() -> None:
    """Else each of two gangs would hold machines that the other waits for."""
    pool = pool_after(*(joined(name, "x", "y") for name in "abcd"))
    for run, model, size in (("d", "x", 2), ("e", "x", 4), ("f", "y", 2)):
        for rank in range(size):
            each = replace(member(rank, size, run=run * 32), work=chat(model))
            pool.apply(JobSubmitted(each), 0.0)
        if run == "d":
            assert len(assign(pool)) == 2

    assert assign(pool) == []

    complete(pool, "d0")
    complete(pool, "d1")
    assert sorted(name for name, _ in assign(pool)) == ["e0", "e1", "e2", "e3"]


def test_jobs_of_a_higher_priority_precede_a_gang() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(2))
    submit(pool, "low", priority=Priority.LOW)
    submit(pool, "high", priority=Priority.HIGH)

    assert [name for name, _ in assign(pool)] == ["high"]


def test_member_that_lost_its_worker_is_leased_alone_on_another_machine() -> None:
    pool = pool_after(joined("a/x"), joined("b"), *gang(2))
    workers = dict(assign(pool))
    lost = next(name for name, worker in workers.items() if worker == "b")
    handle(pool, WorkerDisconnected(WorkerId("b"), "gone"))
    pool.expire_penalties(RETURN_GRACE)
    pool.apply(joined("a/y"), 0.0)

    assert assign(pool) == []

    pool.apply(joined("c"), 0.0)
    (lease,) = plan(pool)
    assert (lease.job_id, lease.worker_id, lease.lease) == (lost, "c", 2)
    assert lease.reason == f"rank {lost[1]} of 2, in the place of a lost worker"


def test_member_waits_for_its_worker_to_reconnect_before_it_gets_another() -> None:
    """The worker still runs it, and the coordinator only lost the connection."""
    pool = pool_after(joined("a"), joined("b"), joined("c"), *gang(2))
    workers = dict(assign(pool))
    again = joined(workers["r0"])
    handle(pool, WorkerDisconnected(again.worker_id, "cut"))
    submit(pool, "j1", "j2")

    assert [name for name, _ in assign(pool)] == ["j1"]
    assert pool.expire_penalties(RETURN_GRACE - 1.0) == RETURN_GRACE
    pool.apply(again, 0.0)
    (lease,) = plan(pool)
    assert (lease.job_id, lease.worker_id) == ("r0", again.worker_id)
    assert lease.reason == "rank 0 of 2, whose worker has reconnected"


def test_member_that_was_handed_over_does_not_wait_for_its_worker() -> None:
    pool = pool_after(joined("a"), *gang(1))
    assign(pool)
    pool.apply(JobRequeued(JobId("r0"), ONE, "removed", handed_over=True), 1.0)
    pool.apply(WorkerLeft(WorkerId("a"), "removed"), 1.0)

    pool.apply(joined("b"), 1.0)

    assert assign(pool) == [("r0", "b")]


def test_gang_waits_for_no_machine_that_gets_no_more_jobs() -> None:
    pool = pool_after(joined("a"), JobSubmitted(job()), leased("j", "a"), joined("b"))
    for fact in gang(2):
        pool.apply(fact, 0.0)
    submit(pool, "k")
    assert assign(pool) == []  # b is reserved

    pool.apply(WorkerMarked(WorkerId("a"), POINTS_MAX, "", JobId("j")), 1.0)

    assert assign(pool) == [("k", "b")]


def test_each_member_returns_to_its_own_worker_after_a_restart() -> None:
    pool = PoolState()
    for rank, worker in enumerate("ba"):
        pool.restore(member(rank), ONE, 120.0, WorkerId(worker))
    pool.apply(joined("c"), 0.0)

    assert assign(pool) == []

    pool.apply(joined("a"), 0.0)
    assert assign(pool) == [("r1", "a")]
    assert pool.expire_penalties(119.0) == 120.0
    assert assign(pool) == []
    pool.expire_penalties(120.0)
    assert assign(pool) == [("r0", "c")]


def test_member_whose_worker_refuses_it_waits_alone() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(2))
    workers = dict(assign(pool))
    refused = Rejected(JobId("r0"), ONE, "busy")
    handle(pool, LeaseResult(WorkerId(workers["r0"]), refused))

    assert assign(pool) == []

    pool.apply(joined("c"), 0.0)
    assert assign(pool) == [("r0", "c")]


def test_gang_that_had_begun_goes_on_after_a_restart() -> None:
    before = pool_after(joined("a"), joined("b"), *gang(2))
    assign(before)
    pool = PoolState()
    for opened in before.jobs.values():
        pool.restore(opened.job, opened.last_lease, 0.0)
    pool.apply(joined("b"), 0.0)

    assert len(assign(pool)) == 1
    pool.apply(joined("a"), 0.0)
    assert len(assign(pool)) == 1


def test_gang_does_not_wait_for_the_machines_of_its_members() -> None:
    """Else a later gang would not get the rest of their slots."""
    pool = PoolState()
    for rank in range(2):
        pool.restore(member(rank, slots=1), ONE, 0.0)
    for fact in gang(1, slots=1, run=OTHER_RUN):
        pool.apply(fact, 0.0)
    pool.apply(joined("a", slots=2), 0.0)

    assert assign(pool) == [("r0", "a"), ("f0", "a")]
    assert assign(pool) == []


def test_gangs_of_different_models_have_different_machines() -> None:
    pool = pool_after(joined("a", "x"), joined("b", "y"))
    for run, model in (("e" * 32, "x"), ("f" * 32, "y")):
        each = replace(member(0, 1, run=run), work=chat(model))
        pool.apply(JobSubmitted(each), 0.0)

    assert assign(pool) == [("e0", "a"), ("f0", "b")]


def test_machines_of_other_pools_get_no_members() -> None:
    pool = pool_after(joined("a"), joined("n", neighbour=True), *gang(2))

    assert assign(pool) == []


def test_whole_machine_is_free_of_others_jobs() -> None:
    pool = pool_after(joined("a", slots=2), load_changed("a", queued=1), *gang(1))

    assert assign(pool) == []

    handle(pool, LoadReported(WorkerId("a"), WorkerLoad()))
    assert assign(pool) == [("r0", "a")]


def test_slots_that_tasks_lend_are_not_reserved() -> None:
    """Else the task waits for its own calls, and the gang for the task."""
    pool = pool_after(joined("a"), JobSubmitted(job("parent")))
    assign(pool)
    for fact in gang(1):
        pool.apply(fact, 0.0)
    handle(pool, LoadReported(WorkerId("a"), WorkerLoad(lent=1)))
    submit(pool, "child")

    assert assign(pool) == [("child", "a")]


def test_reserved_machines_are_not_used_for_hedges() -> None:
    pool = pool_after(joined("a"), joined("b"), JobSubmitted(job()), leased(worker="a"))
    assert len(hedges(pool, 100.0, 1.0)) == 1

    for fact in gang(2):
        pool.apply(fact, 0.0)

    assert hedges(pool, 100.0, 1.0) == []


def test_duration_of_a_member_is_not_that_of_a_job() -> None:
    pool = pool_after(joined("a"), *gang(1))
    assign(pool)

    complete(pool, "r0")

    assert pool.speeds.job_seconds == {}


def test_nothing_is_left_of_a_gang_that_ended() -> None:
    pool = pool_after(joined("a"), joined("b"), *gang(2))
    assign(pool)

    complete(pool, "r0")
    assert pool.gangs.get(RUN) is not None
    complete(pool, "r1")

    assert not pool.gangs.by_id
    assert not pool.gangs.held
