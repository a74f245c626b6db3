"""Hedging: which silent jobs get a second worker."""

import pytest
from msgspec.structs import replace

from pool.builders import assign, handle, job, joined, leased, pool_after
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
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CancelJob, Completed, Failed, Rejected
from shoal.domain.work import Completion, Embedding, Feature, JobKind, Work
from shoal.pool.hedge import JOBS_EXAMINED_MAX, hedges, next_hedge
from shoal.pool.inputs import (
    AnswerRejected,
    Cancellation,
    FirstOutput,
    HubInput,
    LeaseResult,
    LimitReached,
    WorkerDisconnected,
)
from shoal.pool.lifecycle import JobState
from shoal.pool.react import react, revocations
from shoal.pool.state import PoolState

J = JobId("j")
A, B = WorkerId("a"), WorkerId("b")
ONE, TWO, THREE = LeaseNumber(1), LeaseNumber(2), LeaseNumber(3)
AFTER = 5.0  # seconds
DONE = Outcome("done")
QUICKER = "the other one was faster"
KINDS = frozenset(JobKind)


def pool_with_silent_job(*facts: Fact) -> PoolState:
    """Return a pool in which "a" has had a job since 0.0, after more facts."""
    return pool_after(joined("a"), JobSubmitted(job()), leased("j", "a"), *facts)


def pool_with_hedge(*, cancels: bool = True) -> PoolState:
    """Return a pool in which "a" has had a job since 0.0, and "b" since 5.0."""
    pool = pool_with_silent_job(joined("b", cancels=cancels))
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)
    assert pool.hedged == 1
    return pool


def hedges_of(pool: PoolState, now: float = AFTER) -> list[tuple[str, str]]:
    return [(fact.job_id, fact.worker_id) for fact in hedges(pool, now, AFTER)]


# When.


def test_silent_job_is_hedged_to_an_idle_worker() -> None:
    pool = pool_with_silent_job(joined("b"))

    (fact,) = hedges(pool, AFTER, AFTER)

    assert fact == JobHedged(
        J, B, TWO, "attempt 1 silent for 5.0 s; idle: 0% of its slots in use"
    )


def test_hedge_waits_for_its_delay() -> None:
    pool = pool_with_silent_job(joined("b"))

    assert hedges_of(pool, now=AFTER - 0.1) == []
    assert next_hedge(pool, AFTER - 0.1, AFTER) == AFTER
    assert next_hedge(pool, AFTER, AFTER) is None


def test_deadline_is_that_of_the_next_silent_job() -> None:
    pool = pool_after(joined(slots=3))
    for at, name in enumerate("abc"):
        pool.apply(JobSubmitted(job(name)), float(at))
        assign(pool, now=float(at))

    assert next_hedge(pool, AFTER, AFTER) == AFTER + 1.0


@pytest.mark.parametrize(
    "second",
    [
        joined("b", "other"),
        joined("b", slots=0),
        joined("b", kinds=frozenset()),
        joined("b", only_for=frozenset({"somebody"})),
    ],
    ids=["other model", "no slots", "other kind", "other keys"],
)
def test_ineligible_worker_gets_no_hedge(second: WorkerJoined) -> None:
    assert hedges_of(pool_with_silent_job(second)) == []


def test_busy_worker_gets_no_hedge() -> None:
    pool = pool_with_silent_job(
        joined("b", slots=9), JobSubmitted(job("k")), leased("k", "b")
    )

    assert hedges_of(pool) == []


def test_worker_does_not_hedge_itself() -> None:
    pool = pool_after(joined("a", slots=9), JobSubmitted(job()), leased("j", "a"))

    assert hedges_of(pool) == []


def test_draining_worker_gets_no_hedge() -> None:
    pool = pool_with_silent_job(joined("b"), WorkerDraining(B, ""))

    assert hedges_of(pool) == []


def test_fastest_idle_worker_gets_the_hedge() -> None:
    pool = pool_with_silent_job(joined("b"), joined("c"))
    quick = pool.workers[WorkerId("c")]
    quick.pace = 100.0
    pool.roster.index(quick)

    assert hedges_of(pool) == [("j", "c")]


@pytest.mark.parametrize(
    ("work", "is_hedged"),
    [(Completion("m", "a"), True), (Embedding("m", ("a",)), False)],
)
def test_embeddings_are_not_hedged(work: Work, is_hedged: bool) -> None:
    each = replace(job(), work=work)
    pool = pool_after(
        joined("a", kinds=KINDS), JobSubmitted(each), leased("j", "a"),
        joined("b", kinds=KINDS),
    )  # fmt: skip

    assert (hedges_of(pool) != []) == is_hedged


@pytest.mark.parametrize(
    "facts",
    [
        [JobStarted(J, ONE)],
        [JobRequeued(J, ONE, "worker lost"), WorkerLeft(A, ""), joined("a"),
         leased("j", "a", 2)],
        [JobStarted(J, ONE), JobRequeued(J, ONE, "?", A), joined("c"),
         leased("j", "c", 2)],
    ],
    ids=["begun", "lost a worker", "begun once"],
)  # fmt: skip
def test_started_or_suspect_job_is_not_hedged(
    facts: list[Fact],
) -> None:
    pool = pool_with_silent_job(joined("b"))
    for fact in facts:
        pool.apply(fact, 0.0)

    assert hedges_of(pool, now=100.0) == []


def test_rejected_job_may_be_hedged_later() -> None:
    pool = pool_with_silent_job(joined("b"), joined("c"))
    pool.apply(JobRequeued(J, ONE, "loading", refused_by=A), 1.0)
    assert assign(pool, now=1.0) == [("j", "b")]

    (fact,) = hedges(pool, 6.0, AFTER)

    # The idle worker that rejected it does not get it again at once.
    assert (fact.worker_id, fact.lease) == ("c", THREE)


def test_job_is_hedged_once() -> None:
    pool = pool_with_hedge()
    pool.apply(joined("c"), AFTER)
    assert hedges_of(pool, now=100.0) == []

    handle(pool, WorkerDisconnected(B, "reset"), 101.0)

    assert hedges_of(pool, now=200.0) == []


# How many.


def silent_pool(running: int, idle: int = 100) -> PoolState:
    """Return a pool with ``running`` silent jobs, each at its own worker."""
    pool = pool_after(*(joined(f"w{number}") for number in range(running)))
    for number in range(running):
        pool.apply(JobSubmitted(job(f"j{number}")), 0.0)
    assign(pool)
    for number in range(idle):
        pool.apply(joined(f"idle{number}"), 0.0)
    return pool


@pytest.mark.parametrize(
    ("running", "most"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)]
)
def test_at_most_a_tenth_of_running_jobs_or_one_is_hedged(
    running: int, most: int
) -> None:
    pool = silent_pool(running)

    first = hedges(pool, AFTER, AFTER)
    for fact in first:
        pool.apply(fact, AFTER)

    assert [fact.job_id for fact in first] == [f"j{number}" for number in range(most)]
    assert len({fact.worker_id for fact in first}) == most
    assert hedges_of(pool) == []


def test_ended_hedge_makes_room_for_the_next() -> None:
    pool = silent_pool(5)
    (first,) = hedges(pool, AFTER, AFTER)
    pool.apply(first, AFTER)

    handle(pool, FirstOutput(first.job_id, first.lease), 6.0)

    assert hedges_of(pool, now=6.0) == [("j1", "idle1")]


def test_one_idle_worker_gets_one_hedge() -> None:
    assert len(hedges_of(silent_pool(100, idle=1))) == 1


def test_ineligible_jobs_do_not_block_other_hedges() -> None:
    pool = pool_after(joined("x", "x", slots=200), joined("m", slots=20))
    for number in range(JOBS_EXAMINED_MAX * 2):
        pool.apply(JobSubmitted(job(f"x{number}", "x")), 0.0)
    pool.apply(JobSubmitted(job()), 0.0)
    assign(pool)
    pool.apply(WorkerDraining(WorkerId("x"), ""), 0.0)
    pool.apply(joined("idle"), 0.0)

    assert hedges_of(pool) == [("j", "idle")]


# The end of a hedge.


@pytest.mark.parametrize(("winner", "loser", "worker"), [(ONE, TWO, A), (TWO, ONE, B)])
def test_first_to_start_wins_and_the_other_is_stopped(
    winner: LeaseNumber, loser: LeaseNumber, worker: WorkerId
) -> None:
    pool = pool_with_hedge()
    stopped = JobUnhedged(J, loser, QUICKER, cut=True)
    other = B if worker == A else A
    assert revocations(pool, stopped) == [(other, CancelJob(J, loser))]

    facts = handle(pool, FirstOutput(J, winner), 6.0)

    assert facts == [stopped, JobStarted(J, winner)]
    each = pool.jobs[J]
    assert list(each.holders) == [(worker, winner)]
    assert (each.state, each.last_lease) == (JobState.STREAMING, TWO)
    assert pool.workers[other].free_slots == 1


@pytest.mark.parametrize(("winner", "worker"), [(ONE, A), (TWO, B)])
def test_empty_answer_wins(winner: LeaseNumber, worker: WorkerId) -> None:
    pool = pool_with_hedge()

    facts = handle(pool, LeaseResult(worker, Completed(J, winner), DONE), 6.0)

    loser = TWO if winner == ONE else ONE
    assert facts == [
        JobUnhedged(J, loser, QUICKER, cut=True),
        JobCompleted(J, winner, DONE),
    ]
    assert [worker.free_slots for worker in pool.workers.values()] == [1, 1]


def test_second_result_is_late() -> None:
    pool = pool_with_hedge()
    handle(pool, FirstOutput(J, TWO), 6.0)

    assert handle(pool, FirstOutput(J, ONE), 6.0) == []
    late = handle(pool, LeaseResult(A, Completed(J, ONE), DONE), 6.0)

    assert late == [LateResult(J, ONE, A, "completed")]


def test_loser_without_cancellation_keeps_its_slot() -> None:
    pool = pool_with_hedge(cancels=False)
    handle(pool, FirstOutput(J, ONE), 6.0)
    assert pool.workers[B].free_slots == 0

    handle(pool, LeaseResult(B, Completed(J, TWO), DONE), 7.0)

    assert pool.workers[B].free_slots == 1


def test_loser_does_not_get_the_same_job_again() -> None:
    pool = pool_with_silent_job(joined("b", slots=2, cancels=False))
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)
    handle(pool, FirstOutput(J, ONE), 6.0)
    handle(pool, WorkerDisconnected(A, "reset"), 7.0)
    assert assign(pool, now=7.0) == []

    handle(pool, LeaseResult(B, Completed(J, TWO), DONE), 8.0)

    assert assign(pool, now=8.0) == [("j", "b")]
    # The number of the lost lease is not reused.
    assert pool.jobs[J].lease == THREE


@pytest.mark.parametrize(
    ("gone", "lease", "left"), [(A, ONE, (B, TWO)), (B, TWO, (A, ONE))]
)
def test_loss_of_one_leaves_the_other_running(
    gone: WorkerId, lease: LeaseNumber, left: tuple[WorkerId, LeaseNumber]
) -> None:
    pool = pool_with_hedge()

    facts = handle(pool, WorkerDisconnected(gone, "reset"), 6.0)

    assert facts == [
        JobUnhedged(J, lease, "worker lost: reset", lost=True),
        WorkerLeft(gone, "reset"),
    ]
    each = pool.jobs[J]
    assert list(each.holders) == [left]
    assert (each.lost, each.state) == (1, JobState.LEASED)
    assert pool.queued == 0


@pytest.mark.parametrize(
    ("kind", "reason", "failed"),
    [(Rejected, "refused it: loading", False), (Failed, "loading", True)],
)
@pytest.mark.parametrize(("worker", "lease"), [(A, ONE), (B, TWO)])
def test_rejection_by_one_leaves_the_other_running(
    worker: WorkerId,
    lease: LeaseNumber,
    kind: type[Rejected | Failed],
    reason: str,
    failed: bool,
) -> None:
    pool = pool_with_hedge()

    facts = handle(pool, LeaseResult(worker, kind(J, lease, "loading")), 6.0)

    assert facts == [JobUnhedged(J, lease, reason, failed=failed)]
    each = pool.jobs[J]
    assert len(list(each.holders)) == 1
    assert (each.lost, each.refused_by) == (0, {worker: reason})
    assert pool.workers[worker].free_slots == 1


def test_loss_of_the_last_requeues_the_job() -> None:
    pool = pool_with_hedge()
    handle(pool, WorkerDisconnected(A, "reset"), 6.0)

    facts = handle(pool, WorkerDisconnected(B, "reset"), 7.0)

    assert facts[0] == JobRequeued(J, TWO, "worker lost: reset")
    assert (pool.jobs[J].lost, pool.queued) == (2, 1)


def test_first_output_limit_restarts_for_the_remaining_worker() -> None:
    pool = pool_with_hedge()

    handle(pool, WorkerDisconnected(A, "reset"), 6.0)

    assert (pool.jobs[J].since, pool.jobs[J].leased_at) == (AFTER, AFTER)


@pytest.mark.parametrize(
    ("input_", "end"),
    [
        (Cancellation(J, "left"), JobCancelled),
        (LimitReached(J, TimeLimit.FIRST_OUTPUT), JobExpired),
        (AnswerRejected(J, "too long", lost=False), JobFailed),
    ],
)
@pytest.mark.parametrize("cancels", [True, False])
def test_end_of_the_job_ends_both(
    input_: HubInput, end: type[Fact], cancels: bool
) -> None:
    pool = pool_with_hedge(cancels=cancels)
    (fact,) = react(pool, input_)
    assert isinstance(fact, end)

    stopped = revocations(pool, fact)
    pool.apply(fact, 6.0)

    assert stopped == [(A, CancelJob(J, ONE)), (B, CancelJob(J, TWO))]
    assert pool.jobs == {}
    assert pool.hedged == 0
    assert pool.workers[A].free_slots == 1
    assert pool.workers[B].free_slots == int(cancels)


def test_session_stays_at_the_winner() -> None:
    pool = pool_after(
        joined("a"), JobSubmitted(job(session="talk")), leased("j", "a"), joined("b")
    )
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)

    handle(pool, FirstOutput(J, TWO), 6.0)

    assert pool.sessions == {"talk": (B, J)}


def test_only_eligible_jobs_are_hedged() -> None:
    pool = pool_with_hedge()
    pool.apply(joined("c", features=frozenset({Feature.STOP})), 6.0)

    with pytest.raises(AssertionError, match="two workers already"):
        pool.apply(JobHedged(J, WorkerId("c"), THREE, ""), 6.0)
    with pytest.raises(AssertionError, match="has two workers"):
        pool.apply(JobStarted(J, ONE), 6.0)
    pool = pool_with_hedge()
    with pytest.raises(AssertionError, match="has no lease 3"):
        pool.apply(JobUnhedged(J, THREE, ""), 6.0)
    with pytest.raises(AssertionError, match="has one worker"):
        pool_with_silent_job().apply(JobUnhedged(J, ONE, ""), 6.0)


def test_requeued_job_has_neither_of_its_workers() -> None:
    pool = pool_with_hedge()

    pool.apply(JobRequeued(J, ONE, "handed over", handed_over=True), 6.0)

    waiting = pool.jobs[J]
    assert (waiting.worker_id, waiting.hedge, pool.hedged) == (None, None, 0)
    assert [worker.free_slots for worker in pool.workers.values()] == [1, 1]
