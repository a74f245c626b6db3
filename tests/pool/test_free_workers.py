"""The choice among free workers."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

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
from shoal.domain.job import JobTerms, Policy
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat
from shoal.pool.eligibility import ineligibility
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.open_job import OpenJob
from shoal.pool.plan import plan
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

LONG = "word " * 2000  # about 2,500 tokens, and at least 1,250


def submit(pool: PoolState, *names: str, session: str = "", prompt: str = "hi") -> None:
    for name in names:
        each = job(name, session=session, prompt=prompt)
        pool.apply(JobSubmitted(each), 0.0)


def end(pool: PoolState, name: str) -> None:
    lease = pool.jobs[JobId(name)].lease
    pool.apply(JobCompleted(JobId(name), lease, Outcome("")), 0.0)


def with_pace(pool: PoolState, name: str, pace: float) -> None:
    """Set the measured speed of a worker, in tokens per second."""
    worker = pool.workers[WorkerId(name)]
    worker.pace = pace
    pool.roster.index(worker)


# Price.


def worker_of(pool: PoolState, policy: Policy, price: int = 5_000) -> str:
    """Return the worker that gets a job of this policy and price."""
    terms = JobTerms(policy=policy, price=price)
    pool.apply(JobSubmitted(replace(job(), terms=terms)), 0.0)
    ((_, worker),) = assign(pool)
    return worker


def test_cheap_job_goes_to_the_worker_that_asks_the_least() -> None:
    asks = {"none": "", "dear": "$0.004", "odd": "a lot", "least": "$0.001"}
    pool = pool_after(*(joined(name, price=ask) for name, ask in asks.items()))

    assert worker_of(pool, Policy.CHEAP) == "least"


def test_reason_of_a_lease_names_the_price() -> None:
    pool = pool_after(joined(price="$0.001"), joined("other"))
    terms = JobTerms(policy=Policy.CHEAP, price=5_000)
    pool.apply(JobSubmitted(replace(job(), terms=terms)), 0.0)

    (lease,) = plan(pool)

    assert lease.reason == "asks the lowest price, $0.001: 0% of its slots in use"


def test_fast_job_ignores_what_workers_ask_for() -> None:
    pool = pool_after(joined("slow", price="$0.001"), joined("quick", price="$0.004"))
    with_pace(pool, "slow", 16.0)
    with_pace(pool, "quick", 64.0)

    assert worker_of(pool, Policy.FAST) == "quick"


def test_cheap_job_goes_to_a_worker_above_its_price_only_if_no_other_is_free() -> None:
    pool = pool_after(joined("above", price="$0.006"), joined("none"))
    alone = pool_after(joined("above", price="$0.006"))

    assert worker_of(pool, Policy.CHEAP) == "none"
    assert worker_of(alone, Policy.CHEAP) == "above"


def test_free_job_goes_to_a_worker_that_asks_nothing_and_else_to_the_least() -> None:
    asks = {"dear": "$0.004", "least": "$0.001", "none": ""}
    workers = [joined(name, price=ask) for name, ask in asks.items()]
    pool, asking = pool_after(*workers), pool_after(*workers[:2])
    with_pace(asking, "dear", 64.0)
    with_pace(asking, "least", 16.0)

    assert worker_of(pool, Policy.CHEAP, price=0) == "none"
    assert worker_of(asking, Policy.CHEAP, price=0) == "least"


def test_cheap_job_at_equal_prices_goes_to_the_quicker_worker() -> None:
    pool = pool_after(joined("slow", price="0.001"), joined("quick", price="$0.001"))
    with_pace(pool, "slow", 16.0)
    with_pace(pool, "quick", 64.0)

    assert worker_of(pool, Policy.CHEAP) == "quick"


def test_price_of_a_worker_that_left_is_forgotten() -> None:
    pool = pool_after(joined("a", price="$0.001"), joined("b", price="$0.001"))
    assert len(pool.roster.asks) == 1

    for name in "ab":
        pool.apply(WorkerLeft(WorkerId(name), ""), 0.0)

    assert not pool.roster.asks


# Speed.


def test_fast_worker_is_preferred_even_if_busier() -> None:
    pool = pool_after(joined("slow", slots=4), joined("quick", slots=4))
    with_pace(pool, "slow", 16.0)
    with_pace(pool, "quick", 64.0)
    submit(pool, *"abcdef")

    # A fourth job on the fast one takes as long as the first on the slow one.
    workers = [worker for _, worker in assign(pool)]
    assert workers == ["quick", "quick", "quick", "slow", "quick", "slow"]


def test_workers_of_similar_speed_take_turns() -> None:
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
def test_unmeasured_worker_counts_as_average(
    usual: float | None, expected: str
) -> None:
    pool = pool_after(joined("known"), joined("new"))
    with_pace(pool, "known", 16.0)
    pool.speeds.typical_pace = usual
    submit(pool, "j")

    assert assign(pool) == [("j", expected)]


def test_first_measured_worker_does_not_get_all_jobs() -> None:
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
        "expected to be fastest: 25% of its slots in use, about 32 tokens/s"
    )


def test_planned_worker_comes_after_equal_ones() -> None:
    pool = pool_after(joined("two", slots=2), joined("one", slots=1))
    submit(pool, "a", "b", "c")

    assert assign(pool) == [("a", "two"), ("b", "one"), ("c", "two")]


# Sessions.


def pool_with_session(*others: str, slots: int = 4) -> PoolState:
    """Return a pool in which a worker "had" the session "talk"."""
    pool = pool_after(joined("had", slots=slots))
    submit(pool, "before", session="talk")
    assign(pool)
    end(pool, "before")
    for name in others:
        pool.apply(joined(name, slots=slots), 0.0)
    return pool


def test_session_stays_at_its_worker() -> None:
    pool = pool_with_session("other")
    submit(pool, "a", "b", "c")
    for name, worker in (("a", "had"), ("b", "had"), ("c", "other")):
        pool.apply(leased(name, worker), 0.0)
    submit(pool, "next", session="talk")

    (lease,) = plan(pool)

    assert lease.worker_id == "had"
    assert lease.reason == "has served the conversation before: 50% of its slots in use"


def test_session_leaves_an_overloaded_worker() -> None:
    pool = pool_with_session("idle")
    submit(pool, "a")
    pool.apply(leased("a", "had"), 0.0)
    submit(pool, "next", session="talk")

    assert assign(pool) == [("next", "idle")]


def test_requests_of_a_session_run_concurrently() -> None:
    pool = pool_with_session("idle")
    submit(pool, "one", session="talk")
    submit(pool, "two", session="talk")

    assert assign(pool) == [("one", "had"), ("two", "idle")]


@pytest.mark.parametrize(
    "fact",
    [WorkerDraining(WorkerId("had"), ""), WorkerLeft(WorkerId("had"), "")],
    ids=["draining", "lost"],
)
def test_session_leaves_a_full_worker(
    fact: WorkerDraining | WorkerLeft,
) -> None:
    pool = pool_with_session("idle")
    pool.apply(fact, 0.0)
    submit(pool, "next", session="talk")

    assert assign(pool) == [("next", "idle")]


def test_plan_does_not_overfill_the_worker_of_a_session() -> None:
    pool = pool_with_session("idle", slots=1)
    submit(pool, "a", "b", "c", session="talk")

    assert assign(pool) == [("a", "had"), ("b", "idle")]


def test_session_with_another_model_does_not_count() -> None:
    pool = pool_with_session()
    pool.apply(joined("v", "n"), 0.0)
    pool.apply(JobSubmitted(job("next", "n", session="talk")), 0.0)

    assert assign(pool) == [("next", "v")]


# Capabilities.


def test_long_prompt_goes_to_a_worker_with_enough_context() -> None:
    pool = pool_after(joined("unknown"), joined("roomy", slots=2, context=8192))
    submit(pool, "x")
    pool.apply(leased("x", "roomy"), 0.0)
    submit(pool, "long", prompt=LONG)

    (lease,) = plan(pool)

    assert lease.worker_id == "roomy"
    assert lease.reason == "has enough context: 50% of its slots in use"


def test_long_prompt_goes_to_a_worker_of_unknown_context_last() -> None:
    pool = pool_after(joined("small", context=1000), joined("unknown"))
    submit(pool, "long", prompt=LONG)

    assert assign(pool) == [("long", "unknown")]


def test_prompt_that_may_fit_is_tried() -> None:
    pool = pool_after(joined("tight", context=1500))
    submit(pool, "long", prompt=LONG)

    assert assign(pool) == [("long", "tight")]


def test_worker_with_allowed_keys_serves_only_them() -> None:
    pool = pool_after(joined("theirs", slots=2, only_for=frozenset({"al"})))
    pool.apply(JobSubmitted(job("b", owner="bo")), 0.0)
    pool.apply(JobSubmitted(job("a", owner="al")), 0.0)

    assert assign(pool) == [("a", "theirs")]
    pool.apply(joined("anybodys", only_for=NO_OWNERS), 0.0)
    assert assign(pool) == [("b", "anybodys")]


def test_job_is_not_leased_twice_to_one_worker() -> None:
    # As after a lost hedge on a wire that cannot cancel.
    pool = pool_after(joined(slots=2, cancels=False))
    submit(pool, "j")
    pool.workers[WorkerId("w")].leases[JobId("j")] = LeaseNumber(1)

    assert assign(pool) == []


# Large pools.


class CountingDict(dict[WorkerId, Worker]):
    """Counts how many of its workers are examined."""

    looked = 0

    def values(self) -> Iterator[Worker]:  # type: ignore[override]  # lazy on purpose
        for worker in super().values():
            self.looked += 1
            yield worker


def test_plan_examines_only_as_many_workers_as_jobs() -> None:
    pool = pool_after(*(joined(f"w{number}") for number in range(200)))
    ((level, workers),) = pool.roster.available["m"].items()
    counted = pool.roster.available["m"][level] = CountingDict(workers)
    submit(pool, *"abc")

    given = plan(pool)

    assert [lease.worker_id for lease in given] == ["w0", "w1", "w2"]
    assert counted.looked == 3


def test_only_one_of_many_equal_ineligible_jobs_is_tried() -> None:
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


def test_overlong_job_does_not_block_shorter_ones() -> None:
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
    assert explained == "needs a message other than the system's"


def test_rejected_job_does_not_block_equal_ones() -> None:
    pool = pool_after(joined())
    submit(pool, "refused", "other")
    pool.apply(leased("refused"), 0.0)
    pool.apply(JobRequeued(JobId("refused"), LeaseNumber(1), "no", WorkerId("w")), 0.0)

    assert assign(pool) == [("other", "w")]


def test_workers_skipped_by_one_job_remain_for_the_next() -> None:
    pool = pool_after(*(joined(f"w{n}", context=1000) for n in range(3)))
    pool.apply(joined("roomy", context=8192), 0.0)
    submit(pool, "long", prompt=LONG)
    submit(pool, "a", "b", "c", "d")

    given = assign(pool)

    assert given == [("long", "roomy"), ("a", "w0"), ("b", "w1"), ("c", "w2")]


# Load.


def test_foreign_jobs_raise_cost_and_take_no_slot() -> None:
    pool = pool_after(joined("busy"), joined("idle"), load_changed("busy", queued=1))
    submit(pool, "a", "b", "c")

    assert assign(pool) == [("a", "idle"), ("b", "busy")]


def test_worker_at_half_speed_costs_twice() -> None:
    pool = pool_after(
        joined("slow", slots=4),
        joined("quick", slots=4),
        load_changed("slow", speed=0.5),
    )
    submit(pool, *"abcdef")

    # One more job costs as much on the slow one as two on the fast one.
    workers = [worker for _, worker in assign(pool)]
    assert workers == ["quick", "slow", "quick", "quick", "slow", "quick"]


def test_reason_of_a_lease_names_the_load_of_the_worker() -> None:
    pool = pool_after(joined(slots=2), load_changed(queued=1, speed=0.5))
    submit(pool, "a")

    (lease,) = plan(pool)

    assert lease.reason == (
        "expected to be fastest: 50% of its slots in use, other jobs "
        "there: 1, at 50% of its speed"
    )
