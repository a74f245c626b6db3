"""Application of facts to the pool."""

import pytest
from msgspec.structs import replace

from pool.builders import assign, job, joined, leased, pool_after
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
    WorkerDistrusted,
    WorkerDraining,
    WorkerLeft,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import JobTerms, Privacy, TimeLimit
from shoal.domain.outcome import Outcome
from shoal.pool.lifecycle import ImpossibleTransition, JobState
from shoal.pool.state import PENALTY_SECONDS, REFUSAL_PAUSE, PoolState
from shoal.pool.worker import CostLevel

J, W = JobId("j"), WorkerId("w")
ONE = LeaseNumber(1)
CANCELLED = JobCancelled(J, "the client left")
EXPIRED = JobExpired(J, TimeLimit.SILENCE, "")
SECOND = (JobSubmitted(job("k")),)


def busy_pool(*, cancels: bool) -> PoolState:
    return pool_after(joined(cancels=cancels), JobSubmitted(job()), leased())


@pytest.mark.parametrize(
    "end", [JobCompleted(J, ONE, Outcome("")), JobFailed(J, ""), CANCELLED, EXPIRED]
)
def test_ended_job_frees_the_slot_of_a_worker_that_cancels(end: Fact) -> None:
    pool = busy_pool(cancels=True)

    pool.apply(end, 1.0)

    assert pool.jobs == {}
    assert pool.workers[W].free_slots == 1


@pytest.mark.parametrize("end", [CANCELLED, EXPIRED])
def test_cut_job_keeps_the_slot_of_a_worker_that_cannot_cancel(end: Fact) -> None:
    pool = busy_pool(cancels=False)
    pool.apply(end, 1.0)
    pool.apply(*SECOND, 1.0)
    assert assign(pool) == []

    pool.apply(LateResult(J, ONE, W, "completed"), 2.0)

    assert assign(pool) == [("k", "w")]


@pytest.mark.parametrize(
    ("end", "free"),
    [
        (JobCompleted(J, ONE, Outcome("")), 1),
        (JobFailed(J, "boom"), 1),
        (JobFailed(J, "spoilt", cut=True), 0),
        (JobRequeued(J, ONE, "busy", refused_by=W), 1),
        (JobRequeued(J, ONE, "removed", handed_over=True), 0),
    ],
)
def test_worker_that_cannot_cancel_has_a_slot_again_after_its_own_end_of_a_job(
    end: Fact, free: int
) -> None:
    pool = busy_pool(cancels=False)

    pool.apply(end, 1.0)

    assert pool.workers[W].free_slots == free


def test_cut_job_keeps_its_slot_until_the_worker_is_lost() -> None:
    pool = busy_pool(cancels=False)
    pool.apply(CANCELLED, 1.0)

    pool.apply(WorkerLeft(W, ""), 2.0)
    pool.apply(joined(), 2.0)
    pool.apply(*SECOND, 2.0)

    assert assign(pool) == [("k", "w")]


def test_late_event_of_an_older_lease_frees_nothing() -> None:
    pool = pool_after(joined(slots=1), JobSubmitted(job()), leased(lease=2))

    pool.apply(LateResult(J, ONE, W, "completed"), 1.0)

    assert pool.workers[W].free_slots == 0


def test_late_event_of_a_disconnected_worker_is_ignored() -> None:
    pool = pool_after(LateResult(J, ONE, W, "completed"))

    assert pool == PoolState()


def test_requeued_job_restarts_its_wait_and_counts_losses() -> None:
    pool = busy_pool(cancels=True)
    pool.apply(JobStarted(J, ONE), 5.0)

    pool.apply(JobRequeued(J, ONE, "worker lost"), 9.0)

    waiting = pool.jobs[J]
    assert (waiting.state, waiting.since, waiting.worker_id) == (
        JobState.QUEUED,
        9.0,
        None,
    )
    assert (waiting.lost, waiting.started, waiting.lease) == (1, True, 1)
    assert pool.queued == 1
    assert (waiting.refused_by, [*pool.refusals]) == ({}, [])


def test_job_that_was_handed_over_in_mid_answer_is_not_hedged() -> None:
    pool = busy_pool(cancels=True)
    pool.apply(JobStarted(J, ONE), 5.0)
    pool.apply(JobRequeued(J, ONE, "removed", handed_over=True), 9.0)

    pool.apply(leased(lease=2), 9.0)

    assert pool.jobs[J].lost == 0
    assert not pool.without_output


@pytest.mark.parametrize(
    "fact",
    [
        JobStarted(J, ONE),
        JobRequeued(J, ONE, ""),
        JobCompleted(J, ONE, Outcome("")),
        JobHedged(J, W, LeaseNumber(2), ""),
        JobUnhedged(J, ONE, ""),
    ],
)
def test_impossible_fact_is_an_error(fact: Fact) -> None:
    pool = pool_after(JobSubmitted(job()))

    with pytest.raises(ImpossibleTransition):
        pool.apply(fact, 0.0)


def test_repeated_fact_is_an_error() -> None:
    pool = busy_pool(cancels=True)

    with pytest.raises(AssertionError, match="submitted twice"):
        pool.apply(JobSubmitted(job()), 0.0)
    with pytest.raises(AssertionError, match="joined twice"):
        pool.apply(joined(), 0.0)
    pool.apply(JobSubmitted(job("k")), 0.0)
    with pytest.raises(AssertionError, match="no free slot"):
        pool.apply(leased("k"), 0.0)


def test_restored_job_is_queued_under_its_last_lease() -> None:
    pool = PoolState()

    pool.restore(job(), LeaseNumber(4), 30.0)

    opened = pool.jobs[J]
    assert (opened.state, opened.lease, opened.since) == (JobState.QUEUED, 4, 30.0)
    assert (pool.queued, opened.submitted_at) == (1, 30.0)


def test_share_of_an_owner_is_the_number_of_its_leased_jobs() -> None:
    jobs = {"a": "al", "b": "al", "c": "bo"}
    pool = pool_after(joined(slots=3))
    for name, owner in jobs.items():
        pool.apply(JobSubmitted(job(name, owner=owner)), 0.0)
    assert pool.shares.running == {}

    waiting = {"al": 2, "bo": 1}
    for name, owner in jobs.items():
        assert pool.queued_by_owner == {each: n for each, n in waiting.items() if n}
        pool.apply(leased(name), 0.0)
        waiting[owner] -= 1
    assert pool.shares.running == {"al": 2, "bo": 1}

    pool.apply(JobRequeued(JobId("a"), ONE, "busy", refused_by=W), 1.0)
    assert pool.shares.running == {"al": 1, "bo": 1}

    for name in ("b", "c"):
        pool.apply(JobCompleted(JobId(name), ONE, Outcome("")), 2.0)
    assert pool.shares.running == {}


def test_rejected_job_returns_to_its_worker_after_a_pause() -> None:
    pool = pool_after(joined(), JobSubmitted(job()), leased())
    pool.apply(JobRequeued(J, ONE, "loading", refused_by=W), 7.0)

    assert pool.expire_penalties(7.0) == 7.0 + REFUSAL_PAUSE
    assert assign(pool) == []
    assert pool.expire_penalties(7.0 + REFUSAL_PAUSE) is None
    assert assign(pool) == [("j", "w")]


def test_job_whose_answer_was_given_up_has_its_whole_time_in_the_queue_again() -> None:
    pool = pool_after(joined(), JobSubmitted(job()), leased())
    pool.apply(JobStarted(J, ONE), 5.0)

    pool.apply(JobRequeued(J, ONE, "the server died", refused_by=W), 90.0)

    assert (pool.jobs[J].queued_at, pool.jobs[J].lost) == (90.0, 1)
    assert assign(pool) == []  # not to the same worker at once


def test_marks_survive_a_reconnection_and_expire() -> None:
    pool = pool_after(joined(), WorkerMarked(W, 2, "", J), WorkerLeft(W, ""))
    pool.apply(joined(), 1.0)
    assert pool.workers[W].points == 2

    assert pool.expire_penalties(PENALTY_SECONDS - 1.0) == PENALTY_SECONDS
    assert pool.workers[W].points == 2

    assert pool.expire_penalties(PENALTY_SECONDS) is None
    assert pool.workers[W].points == 0


def test_oldest_of_too_many_marks_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.pool.state.PENALTIES_MAX", 1)
    pool = busy_pool(cancels=True)
    pool.apply(JobRequeued(J, ONE, "busy", refused_by=W), 1.0)

    pool.apply(WorkerMarked(W, 2, "first", J), 1.0)
    pool.apply(WorkerMarked(W, 1, "second", J), 1.0)

    assert pool.workers[W].points == 1
    assert assign(pool, 1.0) == []  # it still does not get it again so soon


def test_users_without_partners_are_not_stored() -> None:
    private = replace(job(), terms=JobTerms(privacy=Privacy.PRIVATE, user="ada"))

    pool = pool_after(JobSubmitted(private), JobFailed(J, "no_trusted_worker"))

    assert pool.trusted_keys == {}
    assert pool.sizes_by_owner == {}


def test_sessions_map_to_their_last_worker_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.pool.state.SESSIONS_MAX", 10)
    pool = pool_after(joined("a"), joined("b"))

    for number in range(100):
        name = f"j{number}"
        session = "kept" if number % 5 == 0 else f"s{number}"
        pool.apply(JobSubmitted(job(name, session=session)), 0.0)
        pool.apply(leased(name, "a"), 0.0)
        pool.apply(JobCompleted(JobId(name), ONE, Outcome("")), 0.0)

    assert len(pool.sessions) == 10
    assert pool.sessions["kept"][0] == "a"
    pool.apply(JobSubmitted(job(session="kept")), 0.0)
    pool.apply(leased(worker="b"), 0.0)
    assert pool.sessions["kept"] == ("b", "j")


def test_session_that_was_used_last_is_remembered_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.pool.state.SESSIONS_MAX", 2)
    pool = pool_after(joined(slots=4))

    for name, session in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "three")):
        pool.apply(JobSubmitted(job(name, session=session)), 0.0)
        pool.apply(leased(name), 0.0)

    assert pool.sessions == {"one": (W, "c"), "three": (W, "d")}


@pytest.mark.parametrize(
    ("level", "usual", "cost"),
    [
        ((0.5, None), None, 0.5),
        ((0.5, 0), None, 0.5),
        ((0.5, 3), None, 0.0625),
        ((0.5, -1), None, 1.0),
        ((0.5, None), 8.0, 0.0625),
        ((0.5, None), 9.0, 0.0625),
        ((1.0, 4), 8.0, 0.0625),
    ],
)
def test_cost_is_load_over_speed(
    level: CostLevel, usual: float | None, cost: float
) -> None:
    pool = PoolState()
    pool.speeds.typical_pace = usual

    assert pool.cost(level) == cost


def test_next_expiry_is_the_earliest_of_refusals_and_penalties() -> None:
    pool = pool_after(joined("v"), joined("w"), *map(JobSubmitted, map(job, "ab")))
    pool.apply(WorkerMarked(W, 2, "", J), 0.0)
    for name, worker, now in (("a", "v", 100.0), ("b", "w", 101.0)):
        pool.apply(leased(name, worker), now)
        refused = JobRequeued(JobId(name), ONE, "busy", refused_by=WorkerId(worker))
        pool.apply(refused, now)
    pool.apply(WorkerMarked(W, 3, "", J), 200.0)

    assert pool.expire_penalties(101.0) == 100.0 + REFUSAL_PAUSE
    assert pool.expire_penalties(100.0 + REFUSAL_PAUSE) == 101.0 + REFUSAL_PAUSE
    assert pool.expire_penalties(101.0 + REFUSAL_PAUSE) == PENALTY_SECONDS
    assert pool.expire_penalties(PENALTY_SECONDS) == 200.0 + PENALTY_SECONDS


def test_refusal_may_outlive_its_job() -> None:
    pool = busy_pool(cancels=True)
    pool.apply(JobRequeued(J, ONE, "busy", refused_by=W), 1.0)
    pool.apply(CANCELLED, 1.0)

    assert pool.expire_penalties(1.0 + REFUSAL_PAUSE) is None


def test_holder_of_a_job_is_its_worker_while_it_has_one() -> None:
    pool = pool_after(joined(), JobSubmitted(job()))
    assert pool.holder_of(J) is None

    pool.apply(leased(), 0.0)
    assert pool.holder_of(J) is pool.workers[W]

    pool.apply(JobFailed(J, ""), 1.0)
    assert pool.holder_of(J) is None


def test_points_of_one_worker_are_not_another_s() -> None:
    pool = pool_after(joined(), joined("u"), WorkerMarked(W, 2, "", J))

    pool.apply(joined("v"), 1.0)

    points = {name: worker.points for name, worker in pool.workers.items()}
    assert points == {"w": 2, "u": 0, "v": 0}


def test_user_s_trust_in_a_worker_can_end() -> None:
    private = replace(job(), terms=JobTerms(privacy=Privacy.PRIVATE, user="ada"))
    worker = joined(privacy=Privacy.PRIVATE)
    offer = replace(worker.offer, public_key="aa" * 32, proven=True)
    pool = pool_after(
        replace(worker, offer=offer),
        WorkerTrusted("", "ada", "aa" * 32),
        JobSubmitted(private),
    )

    pool.apply(WorkerDistrusted("", "ada", "aa" * 32), 1.0)
    assert assign(pool) == []

    pool.apply(WorkerTrusted("", "ada", "aa" * 32), 2.0)
    assert assign(pool) == [("j", "w")]


def test_drain_shows_the_worker_s_reason() -> None:
    pool = pool_after(joined("v"), joined("w"))

    pool.apply(WorkerDraining(W, "an update"), 1.0)
    pool.apply(WorkerDraining(WorkerId("v"), ""), 1.0)

    reasons = {name: worker.draining for name, worker in pool.workers.items()}
    assert reasons == {"w": "an update", "v": "draining"}


def test_speed_of_a_model_is_forgotten_with_its_last_worker() -> None:
    pool = busy_pool(cancels=True)
    pool.apply(joined("v"), 0.0)
    pool.apply(JobCompleted(J, ONE, Outcome("")), 3.0)
    assert pool.speeds.job_seconds

    pool.apply(WorkerLeft(W, ""), 4.0)
    assert pool.speeds.job_seconds

    pool.apply(WorkerLeft(WorkerId("v"), ""), 4.0)
    assert not pool.speeds.job_seconds
