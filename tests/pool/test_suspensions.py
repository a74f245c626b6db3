"""Workers that operators pause, drain and remove, and what becomes of their jobs."""

import pytest

from pool.builders import assign, handle, job, joined, leased, pool_after
from shoal.domain.facts import (
    Fact,
    JobCompleted,
    JobHedged,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
    WorkerDismissed,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
    WorkerSuspended,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CancelJob
from shoal.domain.worker import Suspension
from shoal.pool.departures import departures, overdue_drains
from shoal.pool.eligibility import no_worker_reason
from shoal.pool.inputs import WorkerConnected, WorkerResumption, WorkerSuspension
from shoal.pool.own_offers import own_offers
from shoal.pool.react import revocations
from shoal.pool.state import PoolState

J, W = JobId("j"), WorkerId("w")
ONE, TWO = LeaseNumber(1), LeaseNumber(2)
_, PAUSED, DRAINING, REMOVED = Suspension
HANDED_OVER = "handed over: the worker was removed by an operator"


def suspend(
    pool: PoolState,
    how: Suspension,
    name: str = "w",
    within: float | None = None,
    now: float = 0.0,
) -> list[Fact]:
    return handle(pool, WorkerSuspension(name, how, "al", within), now)


def busy_pool(*, cancels: bool = True) -> PoolState:
    return pool_after(joined(cancels=cancels), JobSubmitted(job()), leased())


def done(name: str = "j", lease: LeaseNumber = ONE) -> JobCompleted:
    return JobCompleted(JobId(name), lease, Outcome(""))


def dismissed(pool: PoolState) -> list[str]:
    """Apply the departures; return their workers."""
    facts = departures(pool)
    for fact in facts:
        pool.apply(fact, 0.0)
    return [fact.worker_id for fact in facts]


@pytest.mark.parametrize("how", [PAUSED, DRAINING, REMOVED])
def test_suspended_worker_gets_no_jobs_and_is_named_as_the_reason(
    how: Suspension,
) -> None:
    pool = pool_after(joined())
    assert own_offers(pool)

    suspend(pool, how)
    pool.apply(JobSubmitted(job()), 0.0)

    assert assign(pool) == []
    assert own_offers(pool) == ()
    described = {PAUSED: "paused", DRAINING: "drained", REMOVED: "removed"}[how]
    reason = no_worker_reason(pool, pool.jobs[J])
    assert reason == f"no worker for m: {described} by an operator (1 worker)"

    handle(pool, WorkerResumption("w", "al"))

    assert assign(pool) == [("j", "w")]


def test_paused_worker_finishes_its_jobs_and_stays_connected() -> None:
    pool = busy_pool()

    suspend(pool, PAUSED)
    pool.apply(done(), 1.0)

    assert dismissed(pool) == []
    assert pool.workers[W].suspension is PAUSED


def test_suspension_survives_a_reconnect() -> None:
    pool = pool_after(joined())
    suspend(pool, PAUSED)
    pool.apply(WorkerLeft(W, "reset"), 1.0)

    pool.apply(joined(), 2.0)
    pool.apply(JobSubmitted(job()), 2.0)

    assert assign(pool) == []
    assert next(iter(pool.suspensions)).workers == {W}


def test_worker_is_drained_after_its_last_job_and_stays_connected() -> None:
    pool = pool_after(
        joined(slots=2), JobSubmitted(job()), JobSubmitted(job("k")), leased()
    )
    pool.apply(leased("k"), 0.0)

    facts = suspend(pool, DRAINING)
    assert facts == [WorkerSuspended("w", DRAINING, "al")]
    pool.apply(done(), 1.0)
    assert not pool.is_drained(W)
    pool.apply(done("k"), 2.0)

    assert pool.is_drained(W)
    assert dismissed(pool) == []
    assert pool.suspensions.refusal("w") is None


def test_removed_worker_is_dismissed_once() -> None:
    pool = busy_pool()

    suspend(pool, REMOVED)

    ((fact),) = departures(pool)
    assert fact.reason == (
        "removed by an operator; `shoal nodes resume w` at the coordinator admits "
        "it again"
    )
    assert pool.suspensions.refusal("w") == fact.reason
    assert dismissed(pool) == ["w"]
    pool.apply(LateResult(J, ONE, W, "completed"), 3.0)
    assert dismissed(pool) == []


def test_model_on_a_shared_connection_is_not_dismissed_alone() -> None:
    pool = PoolState()
    for fact in (joined("pc/m"), joined("pc/n", "n")):
        handle(pool, WorkerConnected(fact.worker_id, fact.offer, True, shared=True))

    suspend(pool, REMOVED, "pc/m")
    assert dismissed(pool) == []
    assert pool.suspensions.refusal("pc") is None
    suspend(pool, REMOVED, "pc")

    assert sorted(dismissed(pool)) == ["pc/m", "pc/n"]


def test_pause_of_a_machine_keeps_the_connection_that_its_removal_would_end() -> None:
    pool, fact = PoolState(), joined("m/x")
    handle(pool, WorkerConnected(fact.worker_id, fact.offer, True, shared=True))
    suspend(pool, REMOVED, "m/x")
    suspend(pool, REMOVED, "m")

    suspend(pool, PAUSED, "m")

    assert dismissed(pool) == []


def test_strictest_order_holds_and_a_resume_of_the_machine_ends_all() -> None:
    pool = pool_after(joined("pc/m"), joined("pc/n", "n"))
    suspend(pool, PAUSED, "pc")
    suspend(pool, REMOVED, "pc/m")
    one, other = (pool.workers[WorkerId(name)] for name in ("pc/m", "pc/n"))
    assert (one.suspension, other.suspension) == (REMOVED, PAUSED)

    handle(pool, WorkerResumption("pc/m", "al"))
    assert (one.suspension, other.suspension) == (PAUSED, PAUSED)
    assert dismissed(pool) == []
    suspend(pool, REMOVED, "pc/m")
    facts = handle(pool, WorkerResumption("pc", "al"))

    assert facts == [WorkerResumed("pc", "al")]
    assert (one.suspension, other.suspension) == (None, None)
    assert handle(pool, WorkerResumption("pc", "al")) == []


def test_repeated_order_changes_nothing() -> None:
    pool = pool_after(joined())
    suspend(pool, PAUSED)

    assert suspend(pool, PAUSED) == []
    assert suspend(pool, REMOVED) == [WorkerSuspended("w", REMOVED, "al")]


@pytest.mark.parametrize("streaming", [False, True])
def test_jobs_of_a_removed_worker_go_to_another_without_blame(streaming: bool) -> None:
    pool = busy_pool()
    if streaming:
        pool.apply(JobStarted(J, ONE), 1.0)
    pool.apply(joined("v"), 1.0)
    requeued = JobRequeued(J, ONE, HANDED_OVER, handed_over=True)

    assert revocations(pool, requeued) == [(W, CancelJob(J, ONE))]
    facts = suspend(pool, REMOVED, now=5.0)

    assert facts == [WorkerSuspended("w", REMOVED, "al"), requeued]
    assert dismissed(pool) == ["w"]
    assert pool.jobs[J].lost == 0
    assert pool.jobs[J].queued_at == 5.0
    assert assign(pool) == [("j", "v")]


def test_worker_that_cannot_cancel_is_dismissed_while_it_runs_a_lost_job() -> None:
    pool = busy_pool(cancels=False)

    suspend(pool, REMOVED)

    assert dismissed(pool) == ["w"]
    assert pool.workers[W].leases == {J: ONE}


def hedged_pool(other: str) -> PoolState:
    pool = pool_after(joined("pc/m"), joined(other), JobSubmitted(job()))
    pool.apply(leased(worker="pc/m"), 0.0)
    pool.apply(JobHedged(J, WorkerId(other), TWO, ""), 1.0)
    return pool


def test_second_lease_of_a_removed_worker_goes_on() -> None:
    pool = hedged_pool("v")

    facts = suspend(pool, REMOVED, "pc")

    assert facts[1:] == [JobUnhedged(J, ONE, HANDED_OVER, cut=True)]
    assert (pool.jobs[J].worker_id, pool.jobs[J].lease) == ("v", TWO)
    assert dismissed(pool) == ["pc/m"]


def test_job_with_both_leases_at_a_removed_machine_waits_again() -> None:
    pool = hedged_pool("pc/n")

    suspend(pool, REMOVED, "pc")

    assert pool.jobs[J].worker_id is None
    assert pool.hedged == 0
    assert sorted(dismissed(pool)) == ["pc/m", "pc/n"]


def test_drain_hands_its_jobs_over_at_its_limit() -> None:
    pool = busy_pool()

    suspend(pool, DRAINING, within=60.0, now=100.0)

    assert pool.suspensions.next_due == 160.0
    assert overdue_drains(pool, 159.9) == []
    facts = overdue_drains(pool, 160.0)
    assert facts == [
        WorkerSuspended("w", DRAINING, "al"),
        JobRequeued(
            J,
            ONE,
            "handed over: the worker was drained by an operator",
            handed_over=True,
        ),
    ]
    for fact in facts:
        pool.apply(fact, 160.0)
    assert pool.is_drained(W)
    assert dismissed(pool) == []
    assert pool.suspensions.next_due is None
    assert overdue_drains(pool, 1e9) == []


def test_drains_of_a_machine_and_its_worker_end_together() -> None:
    pool = pool_after(joined("pc/m"), JobSubmitted(job()), leased(worker="pc/m"))
    suspend(pool, DRAINING, "pc/m", within=60.0)
    suspend(pool, DRAINING, "pc", within=60.0)

    for fact in overdue_drains(pool, 60.0):
        pool.apply(fact, 60.0)

    assert pool.jobs[J].worker_id is None
    assert pool.is_drained(WorkerId("pc/m"))


def test_drains_of_both_workers_of_a_job_end_together() -> None:
    pool = hedged_pool("v")
    suspend(pool, DRAINING, "pc", within=60.0)
    suspend(pool, DRAINING, "v", within=60.0)

    for fact in overdue_drains(pool, 60.0):
        pool.apply(fact, 60.0)

    assert pool.jobs[J].worker_id is None
    assert pool.hedged == 0
    assert all(map(pool.is_drained, pool.workers))


@pytest.mark.parametrize("end", [PAUSED, None])
def test_limit_ends_with_its_drain(end: Suspension | None) -> None:
    pool = busy_pool()
    suspend(pool, DRAINING, within=60.0)

    if end is None:
        handle(pool, WorkerResumption("w", "al"))
    else:
        suspend(pool, end)

    assert pool.suspensions.next_due is None
    assert overdue_drains(pool, 1000.0) == []


def test_worker_resumed_before_it_is_dismissed_stays() -> None:
    pool = pool_after(joined())
    suspend(pool, REMOVED)

    handle(pool, WorkerResumption("w", "al"))

    assert dismissed(pool) == []


def test_removed_worker_that_joins_nevertheless_is_dismissed() -> None:
    pool = PoolState()
    suspend(pool, REMOVED)

    fact = joined()
    assert isinstance(fact, WorkerJoined)
    pool.apply(fact, 1.0)

    assert [type(each) for each in departures(pool)] == [WorkerDismissed]


def test_model_with_a_connection_of_its_own_is_dismissed_alone() -> None:
    pool = pool_after(joined("pc/m"), joined("pc/n", "n"))

    suspend(pool, REMOVED, "pc/m")

    assert dismissed(pool) == ["pc/m"]


def test_paused_worker_may_join_again() -> None:
    pool = pool_after(joined())

    suspend(pool, PAUSED)

    assert pool.suspensions.refusal("w") is None


@pytest.mark.parametrize(("how", "within"), [(DRAINING, None), (PAUSED, 60.0)])
def test_only_a_drain_with_a_limit_hands_jobs_over(
    how: Suspension, within: float | None
) -> None:
    pool = busy_pool()

    suspend(pool, how, within=within)

    assert pool.suspensions.next_due is None
    assert overdue_drains(pool, 1e9) == []


def test_repeated_drain_gets_the_later_limit() -> None:
    pool = busy_pool()
    suspend(pool, DRAINING, within=60.0)

    facts = suspend(pool, DRAINING, within=90.0)

    assert facts == [WorkerSuspended("w", DRAINING, "al", 90.0)]
    assert pool.suspensions.next_due == 90.0


def test_each_drain_ends_at_its_own_limit() -> None:
    pool = pool_after(joined("v"), joined("w"))
    suspend(pool, DRAINING, "w", within=120.0)
    suspend(pool, DRAINING, "v", within=60.0)

    assert pool.suspensions.next_due == 60.0
    assert overdue_drains(pool, 60.0) == [WorkerSuspended("v", DRAINING, "al")]
    handle(pool, WorkerResumption("v", "al"))

    assert pool.suspensions.next_due == 120.0


def test_worker_is_dismissed_once_whatever_is_ordered_next() -> None:
    pool = pool_after(joined())
    suspend(pool, REMOVED)
    assert dismissed(pool) == ["w"]

    suspend(pool, REMOVED, within=1.0)

    assert dismissed(pool) == []


def test_worker_of_a_removed_machine_leaves_although_it_is_resumed_itself() -> None:
    pool = pool_after(joined("pc/m"))
    suspend(pool, REMOVED, "pc/m")
    suspend(pool, REMOVED, "pc")

    handle(pool, WorkerResumption("pc/m", "al"))

    assert dismissed(pool) == ["pc/m"]
