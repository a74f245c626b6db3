"""Workers that operators approve before they get jobs."""

import math

import pytest

from pool.builders import CHAT_ONLY, assign, gang, handle, job, pool_after
from shoal.domain.facts import (
    Fact,
    JobSubmitted,
    WorkerApproved,
    WorkerDisapproved,
    WorkerSuspended,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.worker import Offer, Suspension
from shoal.pool.departures import overdue_drains
from shoal.pool.eligibility import no_worker_reason
from shoal.pool.inputs import (
    WorkerApproval,
    WorkerConnected,
    WorkerDisconnected,
    WorkerResumption,
    WorkerSuspension,
)
from shoal.pool.own_offers import own_offers
from shoal.pool.plan import plan
from shoal.pool.state import PoolState
from shoal.pool.suspensions import Approvals

PENDING, PAUSED, DRAINING, REMOVED = Suspension
KEY, OTHER = "8a" * 32, "5e" * 32


def strict_pool() -> PoolState:
    return PoolState(approvals=Approvals(required=True))


def connect(
    pool: PoolState, name: str = "w", key: str = "", *, proven: bool = True
) -> Suspension | None:
    """Connect a worker; return why it gets no jobs."""
    models, key_proven = frozenset({"m"}), proven and bool(key)
    offer = Offer(CHAT_ONLY, models, public_key=key, proven=key_proven)
    handle(pool, WorkerConnected(WorkerId(name), offer, cancels=True))
    return pool.workers[WorkerId(name)].suspension


def leave(pool: PoolState, name: str = "w") -> None:
    handle(pool, WorkerDisconnected(WorkerId(name), "reset"))


def approve(pool: PoolState, name: str = "w", key: str | None = None) -> list[Fact]:
    return handle(pool, WorkerApproval(name, "al", key))


def order(
    pool: PoolState, how: Suspension, name: str = "w", within: float | None = None
) -> list[Fact]:
    return handle(pool, WorkerSuspension(name, how, "al", within))


def suspension(pool: PoolState, name: str = "w") -> Suspension | None:
    return pool.workers[WorkerId(name)].suspension


def test_new_worker_gets_no_jobs_until_it_is_approved() -> None:
    pool = strict_pool()
    assert connect(pool) is PENDING
    pool.apply(JobSubmitted(job()), 0.0)

    assert assign(pool) == []
    assert own_offers(pool) == ()
    assert no_worker_reason(pool, pool.jobs[JobId("j")]) == (
        "no worker for m: not approved by an operator yet (1 worker)"
    )

    assert approve(pool) == [WorkerApproved("w", "al", "")]
    assert assign(pool) == [("j", "w")]
    assert own_offers(pool)


def test_rank_of_a_gang_waits_for_an_approval() -> None:
    pool = strict_pool()
    for name in ("a/m", "b/m"):
        connect(pool, name)
    approve(pool, "a")
    for fact in gang(size=2):
        pool.apply(fact, 0.0)
    assert plan(pool) == []

    approve(pool, "b")

    assert sorted(lease.worker_id for lease in plan(pool)) == ["a/m", "b/m"]


def test_nothing_is_pending_where_no_approval_is_required() -> None:
    pool = pool_after()

    assert connect(pool) is None

    assert approve(pool) == [WorkerApproved("w", "al", "")]
    pool.approvals.required = True  # as after a restart
    assert connect(pool) is None
    assert connect(pool, "x") is PENDING


def test_approval_outlives_the_connection() -> None:
    pool = strict_pool()
    connect(pool, key=KEY)
    approve(pool)
    leave(pool)

    assert connect(pool, key=KEY) is None


def test_key_is_approved_under_every_name_and_on_every_wire() -> None:
    pool = strict_pool()
    connect(pool, "one:w/m", KEY)
    connect(pool, "two:w", KEY)

    approve(pool, "one:w")

    assert suspension(pool, "two:w") is None
    assert connect(pool, "one:renamed/m", KEY) is None
    assert approve(pool, "two:w") == []


@pytest.mark.parametrize(("key", "proven"), [(OTHER, True), (KEY, False), ("", False)])
def test_machine_of_an_approved_name_needs_the_key(key: str, *, proven: bool) -> None:
    pool = strict_pool()
    connect(pool, key=KEY)
    approve(pool)
    leave(pool)

    assert connect(pool, key=key, proven=proven) is PENDING


def test_approval_without_a_key_is_of_the_name() -> None:
    pool = strict_pool()
    connect(pool, "pc/m")
    approve(pool, "pc")

    assert connect(pool, "pc/n") is None
    assert connect(pool, "pcs/m") is PENDING
    # Another machine: the approved one proved no key.
    assert connect(pool, "pc/o", KEY) is PENDING


def test_unproven_key_is_approved_by_its_name_only() -> None:
    pool = strict_pool()
    connect(pool, "w", KEY, proven=False)

    approve(pool)

    assert suspension(pool) is None
    assert connect(pool, "x", KEY, proven=False) is PENDING


def test_stranger_beside_a_machine_is_not_approved_with_it() -> None:
    pool = strict_pool()
    connect(pool, "pc/m", KEY)
    connect(pool, "pc/unproven", KEY, proven=False)

    assert approve(pool, "pc") == [WorkerApproved("pc", "al", KEY)]

    assert suspension(pool, "pc/m") is None
    assert suspension(pool, "pc/unproven") is PENDING
    assert approve(pool, "pc") == []
    assert approve(pool, "pc/unproven") == [WorkerApproved("pc/unproven", "al", "")]
    assert suspension(pool, "pc/unproven") is None


@pytest.mark.parametrize("key", ["", KEY])
def test_approval_in_advance_is_of_the_first_that_connects(key: str) -> None:
    pool = strict_pool()
    assert approve(pool, "pc") == [WorkerApproved("pc", "al")]
    assert not pool.approvals.is_pending("pc", KEY)

    assert connect(pool, "pc/m", key) is None

    assert pool.approvals.of("pc") == [key or "pc"]
    assert connect(pool, "pc/n", OTHER) is PENDING
    assert connect(pool, "pc/n", key) is None


def test_peer_without_workers_is_approved_by_its_key() -> None:
    pool = strict_pool()

    assert approve(pool, "pc", KEY) == [WorkerApproved("pc", "al", KEY)]

    assert connect(pool, "pc/m", OTHER) is PENDING
    assert connect(pool, "pc/m", KEY) is None


def test_approval_twice_is_one() -> None:
    pool = strict_pool()
    approve(pool, "away")
    connect(pool, key=KEY)
    approve(pool)

    assert approve(pool, "away") == []
    assert approve(pool) == []
    leave(pool)
    assert approve(pool) == []
    connect(pool, key=OTHER)
    assert approve(pool) == [WorkerApproved("w", "al", OTHER)]


@pytest.mark.parametrize("name", ["w", "renamed"])
def test_removal_ends_the_approval_of_the_key(name: str) -> None:
    pool = strict_pool()
    connect(pool, key=KEY)
    approve(pool)
    leave(pool)
    connect(pool, name, KEY)
    connect(pool, "also", KEY)

    facts = order(pool, REMOVED, name)

    assert facts == [
        WorkerDisapproved("w", "al", KEY),
        WorkerSuspended(name, REMOVED, "al"),
    ]
    assert suspension(pool, "also") is PENDING
    handle(pool, WorkerResumption(name, "al"))
    assert suspension(pool, name) is PENDING
    assert approve(pool, name)
    assert suspension(pool, "also") is None


def test_removal_of_an_absent_machine_ends_the_approvals_of_its_keys() -> None:
    pool = strict_pool()
    approve(pool, "pc/m", KEY)
    pool.apply(WorkerApproved("other", "al", KEY), 0.0)
    connect(pool, "third", KEY)

    order(pool, REMOVED, "pc")

    assert suspension(pool, "third") is PENDING


def test_removal_of_a_model_leaves_the_machine_approved() -> None:
    pool = strict_pool()
    connect(pool, "pc/m", KEY)
    connect(pool, "pc/n", KEY)
    approve(pool, "pc")

    assert order(pool, REMOVED, "pc/m") == [WorkerSuspended("pc/m", REMOVED, "al")]

    assert suspension(pool, "pc/n") is None


def test_second_removal_ends_an_approval_in_between() -> None:
    pool = strict_pool()
    order(pool, REMOVED)
    approve(pool)

    assert order(pool, REMOVED) == [WorkerDisapproved("w", "al")]
    assert order(pool, REMOVED) == []


def test_drain_and_its_limit_leave_the_approval() -> None:
    pool = strict_pool()
    connect(pool, key=KEY)
    approve(pool)
    order(pool, DRAINING, within=5.0)

    for fact in overdue_drains(pool, math.inf):
        pool.apply(fact, 5.0)
    leave(pool)
    handle(pool, WorkerResumption("w", "al"))

    assert connect(pool, key=KEY) is None


def test_order_about_a_pending_worker_holds_beyond_its_approval() -> None:
    pool = strict_pool()
    connect(pool)
    order(pool, PAUSED)
    assert suspension(pool) is PAUSED

    approve(pool)
    assert suspension(pool) is PAUSED
    handle(pool, WorkerResumption("w", "al"))
    assert suspension(pool) is None


def test_resume_does_not_approve() -> None:
    pool = strict_pool()
    connect(pool)
    assert handle(pool, WorkerResumption("w", "al")) == []
    order(pool, PAUSED)

    handle(pool, WorkerResumption("w", "al"))

    assert suspension(pool) is PENDING
