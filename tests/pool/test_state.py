"""What facts do to the pool."""

import pytest

from pool.given import hand_out, job, joined, leased, pool_after
from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerLost,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.work import Limit, Outcome
from shoal.pool.lifecycle import ImpossibleTransition, JobState
from shoal.pool.state import MODEL_MEMORY, REFUSAL_PAUSE, Pool

J, W = JobId("j"), WorkerId("w")
ONE = LeaseNumber(1)
CANCELLED = JobCancelled(J, "the client left")
EXPIRED = JobExpired(J, Limit.SILENCE, "")
SECOND = (JobSubmitted(job("k")),)


def busy_pool(*, cancels: bool) -> Pool:
    return pool_after(joined(cancels=cancels), JobSubmitted(job()), leased())


@pytest.mark.parametrize(
    "end", [JobCompleted(J, ONE, Outcome("")), JobFailed(J, ""), CANCELLED, EXPIRED]
)
def test_ended_job_frees_the_slot_of_a_worker_that_can_be_told(end: Fact) -> None:
    pool = busy_pool(cancels=True)

    pool.apply(end, 1.0)

    assert pool.jobs == {}
    assert pool.workers[W].free_slots == 1


@pytest.mark.parametrize("end", [CANCELLED, EXPIRED])
def test_cut_job_holds_the_slot_of_a_worker_that_cannot_be_told(end: Fact) -> None:
    pool = busy_pool(cancels=False)
    pool.apply(end, 1.0)
    pool.apply(*SECOND, 1.0)
    assert hand_out(pool) == []

    pool.apply(CameLate(J, ONE, W, "completed"), 2.0)

    assert hand_out(pool) == [("k", "w")]


def test_cut_job_holds_its_slot_until_the_worker_is_lost() -> None:
    pool = busy_pool(cancels=False)
    pool.apply(CANCELLED, 1.0)

    pool.apply(WorkerLost(W, ""), 2.0)
    pool.apply(joined(), 2.0)
    pool.apply(*SECOND, 2.0)

    assert hand_out(pool) == [("k", "w")]


def test_late_word_of_an_older_lease_frees_nothing() -> None:
    pool = pool_after(joined(slots=1), JobSubmitted(job()), leased(lease=2))

    pool.apply(CameLate(J, ONE, W, "completed"), 1.0)

    assert pool.workers[W].free_slots == 0


def test_late_word_of_a_worker_that_is_gone_is_nothing() -> None:
    pool = pool_after(CameLate(J, ONE, W, "completed"))

    assert pool == Pool()


def test_requeued_job_waits_anew_and_counts_its_losses() -> None:
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
    assert pool.waiting == 1


@pytest.mark.parametrize(
    "fact",
    [
        JobStarted(J, ONE),
        JobRequeued(J, ONE, ""),
        JobCompleted(J, ONE, Outcome("")),
    ],
)
def test_what_cannot_have_happened_is_refused(fact: Fact) -> None:
    pool = pool_after(JobSubmitted(job()))

    with pytest.raises(ImpossibleTransition):
        pool.apply(fact, 0.0)


def test_nothing_happens_twice() -> None:
    pool = busy_pool(cancels=True)

    with pytest.raises(AssertionError, match="submitted twice"):
        pool.apply(JobSubmitted(job()), 0.0)
    with pytest.raises(AssertionError, match="joined twice"):
        pool.apply(joined(), 0.0)
    pool.apply(JobSubmitted(job("k")), 0.0)
    with pytest.raises(AssertionError, match="no free slot"):
        pool.apply(leased("k"), 0.0)


def test_model_is_known_while_a_worker_has_it_and_for_a_while_after() -> None:
    pool = pool_after(joined("a"), joined("b"))
    assert pool.knows("m", 1e9)
    assert not pool.knows("other", 0.0)

    pool.apply(WorkerLost(WorkerId("a"), ""), 50.0)
    assert pool.knows("m", 1e9)
    pool.apply(WorkerLost(WorkerId("b"), ""), 100.0)

    assert pool.knows("m", 100.0 + MODEL_MEMORY - 1)
    assert not pool.knows("m", 100.0 + MODEL_MEMORY)


def test_models_of_passing_workers_do_not_pile_up() -> None:
    pool = Pool()

    for number in range(1000):
        now = number * MODEL_MEMORY / 10
        pool.apply(joined("w", f"model{number}"), now)
        pool.apply(WorkerLost(W, ""), now)

    assert len(pool.model_last_seen) <= 12
    assert not pool.with_model
    assert not pool.available


def test_job_from_the_store_is_queued_under_its_last_lease() -> None:
    pool = Pool()

    pool.reopen(job(), LeaseNumber(4), 30.0)

    opened = pool.jobs[J]
    assert (opened.state, opened.lease, opened.since) == (JobState.QUEUED, 4, 30.0)
    assert (pool.waiting, opened.submitted_at) == (1, 30.0)


def test_worker_that_refused_is_asked_again_after_a_pause() -> None:
    pool = pool_after(joined(), JobSubmitted(job()), leased())
    pool.apply(JobRequeued(J, ONE, "loading", refused_by=W), 7.0)

    assert pool.forgive(7.0) == 7.0 + REFUSAL_PAUSE
    assert hand_out(pool) == []
    assert pool.forgive(7.0 + REFUSAL_PAUSE) is None
    assert hand_out(pool) == [("j", "w")]
