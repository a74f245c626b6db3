"""Which silent job is given to a second worker as well."""

from dataclasses import replace

import pytest

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
from shoal.pool.hedge import EXAMINED_MAX, hedges, next_hedge
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
QUICKER = "the other was quicker"
KINDS = frozenset(JobKind)


def silent(*facts: Fact) -> PoolState:
    """Return a pool in which "a" has had a job since 0.0, and then more happened."""
    return pool_after(joined("a"), JobSubmitted(job()), leased("j", "a"), *facts)


def hedged(*, cancels: bool = True) -> PoolState:
    """Return a pool in which "a" has had a job since 0.0, and "b" since 5.0."""
    pool = silent(joined("b", cancels=cancels))
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)
    assert pool.hedged == 1
    return pool


def given(pool: PoolState, now: float = AFTER) -> list[tuple[str, str]]:
    return [(fact.job_id, fact.worker_id) for fact in hedges(pool, now, AFTER)]


# When.


def test_silent_job_goes_to_an_idle_worker_as_well() -> None:
    pool = silent(joined("b"))

    (fact,) = hedges(pool, AFTER, AFTER)

    assert fact == JobHedged(
        J, B, TWO, "attempt 1 silent for 5.0 s; idle: 0% of its slots in use"
    )


def test_job_is_given_time_first() -> None:
    pool = silent(joined("b"))

    assert given(pool, now=AFTER - 0.1) == []
    assert next_hedge(pool, AFTER - 0.1, AFTER) == AFTER
    assert next_hedge(pool, AFTER, AFTER) is None


def test_next_time_is_that_of_the_longest_silent_job_that_is_not_due() -> None:
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
def test_worker_that_cannot_do_it_is_not_asked(second: WorkerJoined) -> None:
    assert given(silent(second)) == []


def test_worker_that_has_something_to_do_is_not_asked() -> None:
    pool = silent(joined("b", slots=9), JobSubmitted(job("k")), leased("k", "b"))

    assert given(pool) == []


def test_worker_does_not_compete_with_itself() -> None:
    pool = pool_after(joined("a", slots=9), JobSubmitted(job()), leased("j", "a"))

    assert given(pool) == []


def test_draining_worker_is_not_asked() -> None:
    pool = silent(joined("b"), WorkerDraining(B, ""))

    assert given(pool) == []


def test_of_idle_workers_the_quickest_is_asked() -> None:
    pool = silent(joined("b"), joined("c"))
    quick = pool.workers[WorkerId("c")]
    quick.pace = 100.0
    pool.roster.index(quick)

    assert given(pool) == [("j", "c")]


@pytest.mark.parametrize(
    ("work", "is_hedged"),
    [(Completion("m", "a"), True), (Embedding("m", ("a",)), False)],
)
def test_embeddings_are_not_worth_it(work: Work, is_hedged: bool) -> None:
    each = replace(job(), work=work)
    pool = pool_after(
        joined("a", kinds=KINDS), JobSubmitted(each), leased("j", "a"),
        joined("b", kinds=KINDS),
    )  # fmt: skip

    assert (given(pool) != []) == is_hedged


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
def test_job_that_has_begun_or_may_have_killed_a_worker_has_one_at_a_time(
    facts: list[Fact],
) -> None:
    pool = silent(joined("b"))
    for fact in facts:
        pool.apply(fact, 0.0)

    assert given(pool, now=100.0) == []


def test_job_that_was_refused_may_have_a_second_worker_later() -> None:
    pool = silent(joined("b"), joined("c"))
    pool.apply(JobRequeued(J, ONE, "loading", refused_by=A), 1.0)
    assert assign(pool, now=1.0) == [("j", "b")]

    (fact,) = hedges(pool, 6.0, AFTER)

    # The idle worker that has refused it is not asked again at once.
    assert (fact.worker_id, fact.lease) == ("c", THREE)


def test_job_has_a_second_worker_once() -> None:
    pool = hedged()
    pool.apply(joined("c"), AFTER)
    assert given(pool, now=100.0) == []

    handle(pool, WorkerDisconnected(B, "reset"), 101.0)

    assert given(pool, now=200.0) == []


# How many.


def crowd(running: int, idle: int = 100) -> PoolState:
    """Return a pool in which so many jobs are silent, each at a worker of its own."""
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
def test_a_tenth_of_the_running_jobs_and_always_one_has_two_workers(
    running: int, most: int
) -> None:
    pool = crowd(running)

    first = hedges(pool, AFTER, AFTER)
    for fact in first:
        pool.apply(fact, AFTER)

    assert [fact.job_id for fact in first] == [f"j{number}" for number in range(most)]
    assert len({fact.worker_id for fact in first}) == most
    assert given(pool) == []


def test_room_that_one_leaves_is_for_the_next() -> None:
    pool = crowd(5)
    (first,) = hedges(pool, AFTER, AFTER)
    pool.apply(first, AFTER)

    handle(pool, FirstOutput(first.job_id, first.lease), 6.0)

    assert given(pool, now=6.0) == [("j1", "idle1")]


def test_one_idle_worker_is_given_one_job() -> None:
    assert len(given(crowd(100, idle=1))) == 1


def test_jobs_that_nobody_can_take_do_not_hide_the_others() -> None:
    pool = pool_after(joined("x", "x", slots=200), joined("m", slots=20))
    for number in range(EXAMINED_MAX * 2):
        pool.apply(JobSubmitted(job(f"x{number}", "x")), 0.0)
    pool.apply(JobSubmitted(job()), 0.0)
    assign(pool)
    pool.apply(WorkerDraining(WorkerId("x"), ""), 0.0)
    pool.apply(joined("idle"), 0.0)

    assert given(pool) == [("j", "idle")]


# What becomes of the two.


@pytest.mark.parametrize(("winner", "loser", "worker"), [(ONE, TWO, A), (TWO, ONE, B)])
def test_whoever_begins_goes_on_and_the_other_is_stopped(
    winner: LeaseNumber, loser: LeaseNumber, worker: WorkerId
) -> None:
    pool = hedged()
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
def test_empty_answer_wins_as_well(winner: LeaseNumber, worker: WorkerId) -> None:
    pool = hedged()

    facts = handle(pool, LeaseResult(worker, Completed(J, winner), DONE), 6.0)

    loser = TWO if winner == ONE else ONE
    assert facts == [
        JobUnhedged(J, loser, QUICKER, cut=True),
        JobCompleted(J, winner, DONE),
    ]
    assert [worker.free_slots for worker in pool.workers.values()] == [1, 1]


def test_second_of_two_that_ends_is_late() -> None:
    pool = hedged()
    handle(pool, FirstOutput(J, TWO), 6.0)

    assert handle(pool, FirstOutput(J, ONE), 6.0) == []
    late = handle(pool, LeaseResult(A, Completed(J, ONE), DONE), 6.0)

    assert late == [LateResult(J, ONE, A, "completed")]


def test_loser_that_cannot_be_told_keeps_its_slot_until_it_is_done() -> None:
    pool = hedged(cancels=False)
    handle(pool, FirstOutput(J, ONE), 6.0)
    assert pool.workers[B].free_slots == 0

    handle(pool, LeaseResult(B, Completed(J, TWO), DONE), 7.0)

    assert pool.workers[B].free_slots == 1


def test_loser_that_cannot_be_told_is_not_given_the_same_job_again() -> None:
    pool = silent(joined("b", slots=2, cancels=False))
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)
    handle(pool, FirstOutput(J, ONE), 6.0)
    handle(pool, WorkerDisconnected(A, "reset"), 7.0)
    assert assign(pool, now=7.0) == []

    handle(pool, LeaseResult(B, Completed(J, TWO), DONE), 8.0)

    assert assign(pool, now=8.0) == [("j", "b")]
    # The number of the lease that was lost is not used twice.
    assert pool.jobs[J].lease == THREE


@pytest.mark.parametrize(
    ("gone", "lease", "left"), [(A, ONE, (B, TWO)), (B, TWO, (A, ONE))]
)
def test_worker_that_is_lost_leaves_the_other_at_work(
    gone: WorkerId, lease: LeaseNumber, left: tuple[WorkerId, LeaseNumber]
) -> None:
    pool = hedged()

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
    ("kind", "reason"),
    [(Rejected, "refused it: loading"), (Failed, "failed: loading")],
)
@pytest.mark.parametrize(("worker", "lease"), [(A, ONE), (B, TWO)])
def test_worker_that_does_not_do_it_leaves_the_other_at_work(
    worker: WorkerId,
    lease: LeaseNumber,
    kind: type[Rejected | Failed],
    reason: str,
) -> None:
    pool = hedged()

    facts = handle(pool, LeaseResult(worker, kind(J, lease, "loading")), 6.0)

    assert facts == [JobUnhedged(J, lease, reason)]
    each = pool.jobs[J]
    assert len(list(each.holders)) == 1
    assert (each.lost, each.refused_by) == (0, {worker: reason})
    assert pool.workers[worker].free_slots == 1


def test_last_of_two_workers_is_lost_as_any_other() -> None:
    pool = hedged()
    handle(pool, WorkerDisconnected(A, "reset"), 6.0)

    facts = handle(pool, WorkerDisconnected(B, "reset"), 7.0)

    assert facts[0] == JobRequeued(J, TWO, "worker lost: reset")
    assert (pool.jobs[J].lost, pool.queued) == (2, 1)


def test_time_for_the_first_output_begins_anew_for_a_worker_that_is_left() -> None:
    pool = hedged()

    handle(pool, WorkerDisconnected(A, "reset"), 6.0)

    assert (pool.jobs[J].since, pool.jobs[J].leased_at) == (AFTER, AFTER)


@pytest.mark.parametrize(
    ("stimulus", "end"),
    [
        (Cancellation(J, "left"), JobCancelled),
        (LimitReached(J, TimeLimit.FIRST_OUTPUT), JobExpired),
        (AnswerRejected(J, "too long", lost=False), JobFailed),
    ],
)
@pytest.mark.parametrize("cancels", [True, False])
def test_end_of_the_job_ends_both(
    stimulus: HubInput, end: type[Fact], cancels: bool
) -> None:
    pool = hedged(cancels=cancels)
    (fact,) = react(pool, stimulus)
    assert isinstance(fact, end)

    stopped = revocations(pool, fact)
    pool.apply(fact, 6.0)

    assert stopped == [(A, CancelJob(J, ONE)), (B, CancelJob(J, TWO))]
    assert pool.jobs == {}
    assert pool.hedged == 0
    assert pool.workers[A].free_slots == 1
    assert pool.workers[B].free_slots == int(cancels)


def test_conversation_goes_on_where_it_was_answered() -> None:
    pool = pool_after(
        joined("a"), JobSubmitted(job(session="talk")), leased("j", "a"), joined("b")
    )
    for fact in hedges(pool, AFTER, AFTER):
        pool.apply(fact, AFTER)

    handle(pool, FirstOutput(J, TWO), 6.0)

    assert pool.sessions == {"talk": (B, J)}


def test_nothing_has_two_workers_that_should_not() -> None:
    pool = hedged()
    pool.apply(joined("c", features=frozenset({Feature.STOP})), 6.0)

    with pytest.raises(AssertionError, match="two workers already"):
        pool.apply(JobHedged(J, WorkerId("c"), THREE, ""), 6.0)
    with pytest.raises(AssertionError, match="has two workers"):
        pool.apply(JobStarted(J, ONE), 6.0)
    pool = hedged()
    with pytest.raises(AssertionError, match="has no lease 3"):
        pool.apply(JobUnhedged(J, THREE, ""), 6.0)
    with pytest.raises(AssertionError, match="has one worker"):
        silent().apply(JobUnhedged(J, ONE, ""), 6.0)
