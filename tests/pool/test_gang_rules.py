"""Who may join a gang, when it ends, and why it waits."""

import pytest
from msgspec.structs import replace

from pool.builders import (
    RUN,
    assign,
    gang,
    handle,
    job,
    joined,
    leased,
    member,
    pool_after,
)
from shoal.domain.errors import InvalidRequest
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority, TimeLimit
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.gangs.rules import explain_gang
from shoal.pool.inputs import (
    Cancellation,
    LeaseResult,
    LimitReached,
    Submission,
    WorkerDisconnected,
)
from shoal.pool.job_admission import permanent_rejection
from shoal.pool.state import MEMBER_SETTLED, RETURN_GRACE, PoolState


def running(size: int = 3, least: int = 0) -> PoolState:
    """Return a pool in which a gang runs, each rank on the worker w0, w1 and so on."""
    pool = pool_after(*(joined(f"w{rank}") for rank in range(size)))
    for fact in gang(size, least):
        pool.apply(fact, 0.0)
    for rank in range(size):
        pool.apply(leased(f"r{rank}", f"w{rank}"), 0.0)
    return pool


def gang_of(pool: PoolState) -> OpenGang:
    found = pool.gangs.get(RUN)
    assert found is not None
    return found


def ends(facts: list[Fact]) -> dict[str, str]:
    """Return the jobs that end by facts, with the reasons."""
    return {
        fact.job_id: fact.reason if isinstance(fact, JobCancelled) else fact.error
        for fact in facts
        if isinstance(fact, JobCancelled | JobExpired | JobFailed)
    }


def fail(
    pool: PoolState, rank: int, error: str = "Traceback\nValueError: no"
) -> dict[str, str]:
    failed = Failed(JobId(f"r{rank}"), LeaseNumber(1), error)
    return ends(handle(pool, LeaseResult(WorkerId(f"w{rank}"), failed)))


def done(pool: PoolState, rank: int) -> dict[str, str]:
    event = Completed(JobId(f"r{rank}"), LeaseNumber(1))
    return ends(handle(pool, LeaseResult(WorkerId(f"w{rank}"), event, Outcome(""))))


def test_failed_member_ends_its_gang_which_names_it() -> None:
    pool = running(3)

    ended = fail(pool, 1)

    reason = "rank 1 failed: ValueError: no; 2 of 3 members left, and the group needs 3"
    assert {name: ended[name] for name in ("r0", "r2")} == dict.fromkeys(
        ("r0", "r2"), reason
    )
    assert pool.jobs == {}


def test_gang_goes_on_while_enough_members_are_left() -> None:
    pool = running(4, least=2)

    assert [*fail(pool, 3)] == ["r3"]
    assert [*fail(pool, 0)] == ["r0"]
    assert [*fail(pool, 1)] == ["r1", "r2"]


def test_members_that_are_done_count_as_left() -> None:
    pool = running(3, least=2)
    done(pool, 0)

    assert [*fail(pool, 1)] == ["r1"]
    assert [*pool.jobs] == ["r2"]


def test_member_without_a_worker_is_cancelled_once_another_is_done() -> None:
    pool = running(3, least=2)
    handle(pool, WorkerDisconnected(WorkerId("w2"), "gone"))
    pool.expire_penalties(RETURN_GRACE)

    ended = done(pool, 0)

    assert ended == {"r2": "rank 0 is done, and this one has no worker"}
    assert [*pool.jobs] == ["r1"]
    assert done(pool, 1) == {}


def test_gang_ends_when_too_few_are_left_by_such_a_cancellation() -> None:
    pool = running(3)
    handle(pool, WorkerDisconnected(WorkerId("w2"), "gone"))
    pool.expire_penalties(RETURN_GRACE)

    ended = done(pool, 0)

    reason = "rank 0 is done, and this one has no worker"
    too_few = "2 of 3 members left, and the group needs 3"
    assert ended == {"r2": reason, "r1": f"rank 2 was cancelled: {reason}; {too_few}"}
    assert pool.jobs == {}


def test_member_whose_worker_may_return_is_kept() -> None:
    pool = running(3, least=2)
    handle(pool, WorkerDisconnected(WorkerId("w2"), "cut"))

    assert done(pool, 0) == {}


def test_cancelled_member_ends_its_gang() -> None:
    pool = running(2)

    ended = ends(handle(pool, Cancellation(JobId("r0"), "cancelled by its owner")))

    assert ended["r1"].startswith("rank 0 was cancelled: cancelled by its owner; 1 of")


def test_gang_that_has_not_begun_needs_every_member() -> None:
    pool = pool_after(*gang(3, least=1))

    ended = ends(handle(pool, Cancellation(JobId("r2"), "enough")))

    reason = "rank 2 was cancelled: enough; the group of 3 had not begun"
    assert ended == {"r2": "enough", "r0": reason, "r1": reason}


def test_members_that_never_begin_expire_together() -> None:
    pool = pool_after(
        *(joined("a"), joined("b"), joined("c", slots=4)),
        *(JobSubmitted(job()), leased(worker="c")),
        *gang(3),
    )

    ended = ends(handle(pool, LimitReached(JobId("r1"), TimeLimit.QUEUE)))

    reason = (
        "needs 3 machines without other jobs, 2 of 3 suitable ones are free: a, b: "
        "free, c: 1 of its 4 slots busy, and each member needs all (waiting in the "
        "queue: over the limit of 30 s)"
    )
    assert ended == dict.fromkeys(("r0", "r1", "r2"), reason)


def test_members_expire_if_others_were_not_submitted() -> None:
    pool = pool_after(joined("a"), *gang(4)[:2])

    ended = ends(handle(pool, LimitReached(JobId("r0"), TimeLimit.QUEUE)))

    assert set(ended) == {"r0", "r1"}
    assert ended["r0"].startswith("ranks 2, 3 of 4 not submitted (waiting in the queue")


def test_queue_limit_of_a_member_that_was_just_leased_has_no_effect() -> None:
    pool = running(2)

    assert handle(pool, LimitReached(JobId("r0"), TimeLimit.QUEUE)) == []


def test_member_of_a_gang_that_has_begun_expires_alone() -> None:
    pool = running(3, least=2)
    handle(pool, WorkerDisconnected(WorkerId("w1"), "gone"))

    assert [*ends(handle(pool, LimitReached(JobId("r1"), TimeLimit.QUEUE)))] == ["r1"]
    assert [*pool.jobs] == ["r0", "r2"]


def lose(pool: PoolState, lease: int, ran: float, began: float = 0.0) -> list[Fact]:
    """Lease a gang's only member to a worker that is lost after ``ran`` seconds."""
    name = f"w{lease}"
    pool.apply(joined(name), began)
    pool.apply(leased("r0", name, lease), began)
    return handle(pool, WorkerDisconnected(WorkerId(name), "gone"), began + ran)


def test_member_that_ends_its_workers_fails_after_three() -> None:
    pool = pool_after(*gang(1))

    for lease in (1, 2):
        assert any(isinstance(fact, JobRequeued) for fact in lose(pool, lease, 600.0))
    assert ends(lose(pool, 3, 600.0)) == {"r0": "lost 3 workers, the last one: gone"}


def test_member_may_lose_one_more_worker_for_each_hour_that_it_ran() -> None:
    pool = pool_after(*gang(1))

    for lease in range(1, 20):
        assert any(isinstance(fact, JobRequeued) for fact in lose(pool, lease, 3600.0))


@pytest.mark.parametrize(
    ("given", "goes_on"), [(member(0, 1), True), (job("r0"), False)]
)
def test_only_members_may_be_given_up_once_more_for_each_hour_that_they_ran(
    given: Job, goes_on: bool
) -> None:
    pool = pool_after(JobSubmitted(given))

    for number in (1, 2, 3):
        name, lease, now = f"w{number}", LeaseNumber(number), number * 36_000.0
        pool.apply(joined(name), now)
        pool.apply(leased("r0", name, number), now)
        pool.apply(JobStarted(given.id, lease), now)
        stopped = Rejected(given.id, lease, "its server died")
        handle(pool, LeaseResult(WorkerId(name), stopped), now + 3600.0)

    assert [*pool.jobs] == (["r0"] if goes_on else [])


def test_hours_in_which_a_member_waits_do_not_count() -> None:
    pool = pool_after(*gang(1))

    for lease in (1, 2):
        assert ends(lose(pool, lease, 1.0, began=lease * 36_000.0)) == {}
    assert [*ends(lose(pool, 3, 1.0, began=3 * 36_000.0))] == ["r0"]


@pytest.mark.parametrize(
    ("ran", "lost_max"), [(MEMBER_SETTLED, 100), (MEMBER_SETTLED - 1, 3)]
)
def test_worker_that_reconnects_was_lost_only_if_the_member_had_just_begun(
    ran: float, lost_max: int
) -> None:
    pool = pool_after(*gang(1))
    now = 0.0

    for lease in range(1, 10):
        pool.apply(joined("w"), now)
        ((_, worker),) = assign(pool, now)
        assert worker == "w"
        now += ran
        facts = handle(pool, WorkerDisconnected(WorkerId("w"), "cut"), now)
        if lease == lost_max:
            assert ends(facts) == {"r0": "lost 3 workers, the last one: cut"}
            break
        assert ends(facts) == {}


def test_worker_that_reconnects_does_not_make_up_for_others_that_are_lost() -> None:
    pool = pool_after(*gang(1))
    now = 0.0
    for _ in range(5):
        pool.apply(joined("w"), now)
        assign(pool, now)
        now += MEMBER_SETTLED
        handle(pool, WorkerDisconnected(WorkerId("w"), "cut"), now)

    # It does not come back from the last of these: that is the first loss.
    assert ends(lose(pool, 6, 1.0, now)) == {}
    assert [*ends(lose(pool, 7, 1.0, now))] == ["r0"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (member(0, 3), "gang: rank: 0 was submitted already"),
        (member(1, 2), "gang: size: 2, but 3 of earlier members"),
        (member(1, 3, least=1), "gang: least: 1, but 3 of earlier members"),
        (member(1, 3, slots=2), "gang: slots: 2, but 0 of earlier members"),
        (replace(member(1, 3), owner="al"), "gang: id: another key uses it"),
        (
            member(1, 3, priority=Priority.LOW),
            "gang: all members must call the same function with the same options",
        ),
        (
            replace(member(1, 3), work=job(stop=True).work),
            "gang: all members must call the same function with the same options",
        ),
    ],
)
def test_member_that_does_not_match_the_others_is_rejected(
    wrong: Job, message: str
) -> None:
    first = member(0, 3)
    pool = pool_after(joined(), JobSubmitted(first))
    wrong = replace(wrong, id=JobId("wrong"))

    error = permanent_rejection(pool, wrong, 0.0)
    facts = handle(pool, Submission(wrong))

    assert isinstance(error, InvalidRequest)
    assert (str(error), error.field) == (message, "gang")
    assert ends(facts) == {"wrong": message}, "both came in one batch"
    assert [*pool.jobs] == ["r0"]
    assert pool.jobs[JobId("r0")].gang is pool.gangs.get(RUN)


def test_gang_that_has_begun_takes_no_new_member() -> None:
    pool = running(2)
    done(pool, 0)

    error = permanent_rejection(pool, replace(member(0, 2), id=JobId("late")), 0.0)

    assert str(error) == "gang: the gang has begun"


def test_explanation_says_where_members_run_and_why_others_wait() -> None:
    pool = running(3)
    handle(pool, WorkerDisconnected(WorkerId("w1"), "gone"))
    pool.apply(joined("x", slots=0), 0.0)

    assert explain_gang(pool, gang_of(pool), 2) == [
        "rank 0 of 3: runs on w0",
        "rank 1 of 3: waits for w1 to reconnect",
        "rank 2 of 3 (this job): runs on w2",
    ]
    pool.expire_penalties(RETURN_GRACE)
    assert explain_gang(pool, gang_of(pool), 2) == [
        "rank 0 of 3: runs on w0",
        "rank 1 of 3: waits",
        "rank 2 of 3 (this job): runs on w2",
        "the group needs 1 more machine without other jobs, and none that is connected "
        "is suitable",
        "  w0: runs rank 0 of the group",
        "  w2: runs rank 2 of the group",
        "  x: offers no slots",
    ]


def test_explanation_says_which_members_are_missing() -> None:
    pool = pool_after(joined("a", slots=2), gang(2, slots=1)[1])

    assert explain_gang(pool, gang_of(pool), 1) == [
        "rank 1 of 2 (this job): waits",
        "the group waits: rank 0 of 2 not submitted",
    ]


def test_explanation_counts_the_members_of_large_gangs() -> None:
    pool = pool_after(*gang(20, slots=1))

    lines = explain_gang(pool, gang_of(pool), noun="machine")

    assert lines[7:] == [
        "machine 7 of 20: waits",
        "and 12 more; in all, 20 of 20 wait",
        "the group needs 20 machines with 1 free slot each, and none that is connected "
        "is suitable",
    ]
