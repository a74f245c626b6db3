"""Admission and eligibility of function calls."""

import json

import pytest
from msgspec.structs import replace

from pool.builders import pool_after
from shoal.domain.errors import CannotDo, Forbidden, UnknownTask
from shoal.domain.facts import (
    JobCancelled,
    JobFailed,
    JobSubmitted,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Completed
from shoal.domain.work import (
    JSON,
    Call,
    CallStream,
    Feature,
    JobKind,
    NamedWork,
    Task,
)
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.eligibility import no_worker_reason
from shoal.pool.functions import ALL
from shoal.pool.inputs import LeaseResult, Submission, WorkerDisconnected
from shoal.pool.job_admission import permanent_rejection
from shoal.pool.own_offers import own_offers
from shoal.pool.plan import plan
from shoal.pool.react import react
from shoal.pool.roster import MODEL_MEMORY
from shoal.pool.state import PoolState
from shoal.pool.worker import PREFETCH_BELOW, PREFETCH_MAX

PLAIN: frozenset[Feature] = frozenset()
OURS = frozenset({Feature.VALUES})
TRUSTING = frozenset({Feature.VALUES, Feature.CODE})
CALLING = frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM})


def calls(
    name: str = "w",
    *tasks: str,
    features: frozenset[Feature] = OURS,
    slots: int = 1,
    only_for: frozenset[str] = frozenset(),
    neighbour: bool = False,
    pythons: frozenset[str] = frozenset(),
) -> WorkerJoined:
    offer = Offer(
        CALLING,
        slots=slots,
        features=features,
        tasks=frozenset(tasks),
        only_for=only_for,
        neighbour=neighbour,
        pythons=pythons,
    )
    return WorkerJoined(WorkerId(name), offer, cancels=True)


def call(name: str = "f", needs: frozenset[Feature] = PLAIN) -> Call:
    return Call(name, b"\x90", b"\x80", needs=needs)


def job(work: NamedWork | None = None, name: str = "j", *, near: bool = False) -> Job:
    return Job(JobId(name), work or call(), terms=JobTerms(near=near))


def test_call_waits_without_function_workers() -> None:
    assert permanent_rejection(PoolState(), job(), 0.0) is None


@pytest.mark.parametrize("work", [call("g"), CallStream("g"), call("f")])
def test_offered_function_can_be_called(work: NamedWork) -> None:
    pool = pool_after(calls("a", "f"), calls("b", "g"))

    assert permanent_rejection(pool, job(work), 0.0) is None


@pytest.mark.parametrize(
    ("tasks", "name", "words"),
    [
        (("resize", "train"), "resise", "did you mean resize?"),
        (("a", "b"), "xyz", "the pool has a, b"),
        (
            tuple("abcdef"),
            "xyz",
            f"the pool has a, b, c, d, e; {ALL}",
        ),
        ((), "xyz", "no connected worker offers functions"),
    ],
)
def test_unknown_function_is_rejected_with_similar_names(
    tasks: tuple[str, ...], name: str, words: str
) -> None:
    error = permanent_rejection(pool_after(calls("w", *tasks)), job(call(name)), 0.0)

    assert isinstance(error, UnknownTask)
    assert str(error) == f"no worker has the function {name!r}: {words}"


def task(name: str, payload: JSON = None) -> Job:
    terms = JobTerms(form=json.dumps(payload))
    return Job(JobId("j"), Task(name, payload), terms=terms)


def test_unknown_task_is_rejected_unless_a_worker_may_have_it() -> None:
    ours, any_task = calls("w", "resize"), calls("any", features=PLAIN)
    wrong = task("resise")

    assert permanent_rejection(PoolState(), wrong, 0.0) is None
    error = permanent_rejection(pool_after(ours), wrong, 0.0)
    assert isinstance(error, UnknownTask)
    assert str(error) == "no worker has the task 'resise': did you mean resize?"
    assert permanent_rejection(pool_after(ours), task("resize"), 0.0) is None
    assert permanent_rejection(pool_after(ours, any_task), wrong, 0.0) is None


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"args": [1, [-(1 << 64)]]}, "payload.args[1][0]"),
        ({"kwargs": {"n": 1 << 64}}, "payload.kwargs.n"),
        ({"n": 1 << 64}, "payload.n"),
        ({"args": [(1 << 64) - 1, -(1 << 63), 1e300]}, ""),
    ],
)
def test_integers_that_a_function_cannot_get_are_rejected(
    payload: JSON, place: str
) -> None:
    error = permanent_rejection(pool_after(calls("w", "f")), task("f", payload), 0.0)

    assert (
        place and f"{place}: functions get integers of up to 64 bits from JSON"
    ) == ("" if error is None else str(error))
    others = pool_after(calls("w", "f", features=PLAIN))
    assert permanent_rejection(others, task("f", payload), 0.0) is None


def test_only_workers_of_others_have_unnamed_functions() -> None:
    stranger, ours = calls(features=PLAIN), calls(features=OURS)

    assert permanent_rejection(pool_after(stranger), job(), 0.0) is None
    assert isinstance(permanent_rejection(pool_after(ours), job(), 0.0), UnknownTask)


def test_function_of_a_worker_that_just_left_is_awaited() -> None:
    gone = WorkerLeft(WorkerId("a"), "gone")
    pool = pool_after(calls("a", "f"), calls("b", "g"), gone)

    assert permanent_rejection(pool, job(), 0.0) is None
    assert permanent_rejection(pool, job(), MODEL_MEMORY + 1) is not None


def test_code_needs_a_worker_that_allows_it() -> None:
    sent = job(call("<lambda>", frozenset({Feature.CODE})))

    error = permanent_rejection(pool_after(calls("w", "f")), sent, 0.0)

    assert isinstance(error, CannotDo)
    assert error.field == "code"
    assert "shoal join --trust-code" in str(error)
    assert permanent_rejection(pool_after(calls(features=TRUSTING)), sent, 0.0) is None


def code_worker(name: str, *pythons: str) -> WorkerJoined:
    return calls(name, features=TRUSTING, pythons=frozenset(pythons))


def code_of(python: str) -> Job:
    return job(replace(call("<lambda>", frozenset({Feature.CODE})), python=python))


def test_code_is_for_workers_with_its_version_of_python() -> None:
    pool = pool_after(
        code_worker("a", "3.12"), code_worker("b", "3.9"), code_worker("c", "3.10")
    )

    error = permanent_rejection(pool, code_of("3.11"), 0.0)

    assert isinstance(error, CannotDo)
    assert error.field == "code"
    assert "code of Python 3.11; the workers have 3.9, 3.10, 3.12" in str(error)
    assert permanent_rejection(pool, code_of("3.10"), 0.0) is None


@pytest.mark.parametrize(
    ("stated", "wanted"), [((), "3.11"), (("3.12",), ""), (("3.11", "3.12"), "3.11")]
)
def test_unstated_versions_of_python_are_no_reason_to_refuse(
    stated: tuple[str, ...], wanted: str
) -> None:
    pool = pool_after(code_worker("w", *stated), JobSubmitted(code_of(wanted)))

    assert permanent_rejection(pool, code_of(wanted), 0.0) is None
    assert [each.worker_id for each in plan(pool)] == [WorkerId("w")]


def test_call_by_name_runs_at_any_version_of_python() -> None:
    pool = pool_after(calls("w", "f", pythons=frozenset({"3.12"})), JobSubmitted(job()))

    assert [each.worker_id for each in plan(pool)] == [WorkerId("w")]


def test_each_code_goes_to_its_version_of_python() -> None:
    jobs = [replace(code_of(each), id=JobId(each)) for each in ("3.11", "3.12")]
    pool = pool_after(
        code_worker("new", "3.12"),
        code_worker("old", "3.11"),
        *map(JobSubmitted, jobs),
    )

    assert {(each.job_id, each.worker_id) for each in plan(pool)} == {
        ("3.11", "old"),
        ("3.12", "new"),
    }


def test_pool_offers_the_versions_of_python_of_its_workers() -> None:
    old, new, unknown = code_worker("a", "3.11"), code_worker("b", "3.12"), "c"

    (both,) = own_offers(pool_after(old, new))
    (unstated,) = own_offers(pool_after(old, new, code_worker(unknown)))

    assert both.pythons == {"3.11", "3.12"}
    assert unstated.pythons == frozenset()


def test_rich_values_need_a_shoal_worker() -> None:
    rich = job(call("f", OURS))

    error = permanent_rejection(pool_after(calls("w", "f", features=PLAIN)), rich, 0.0)

    assert isinstance(error, CannotDo)
    assert error.field == "values"


def test_workers_for_other_keys_are_not_used() -> None:
    pool = pool_after(calls("w", "f", only_for=frozenset({"somebody"})))

    assert isinstance(permanent_rejection(pool, job(), 0.0), Forbidden)


def test_call_of_a_peer_pool_is_not_forwarded() -> None:
    pool = pool_after(calls("w", "f", neighbour=True), calls("v", "g"))

    assert isinstance(permanent_rejection(pool, job(near=True), 0.0), UnknownTask)


def test_call_of_a_peer_does_not_go_back_to_it() -> None:
    pool = pool_after(calls("wire:mac", "f"), calls("v", "g"))
    theirs = replace(job(), terms=JobTerms(near=True, peer="wire:mac"))

    assert isinstance(permanent_rejection(pool, theirs, 0.0), UnknownTask)
    assert permanent_rejection(pool, job(), 0.0) is None


@pytest.mark.parametrize(
    ("worker", "work", "why"),
    [
        (calls("w", "g"), call(), "does not have the function 'f'"),
        (calls("w", "g"), Task("f"), "does not have the task 'f'"),
        (calls("w", "f", features=PLAIN), call("f", OURS), "accepts plain values only"),
        (
            calls("w", "f"),
            call("f", TRUSTING),
            "does not run functions sent by clients (`shoal join --trust-code` does)",
        ),
        (
            code_worker("w", "3.12"),
            code_of("3.11").work,
            "runs code of Python 3.12, not 3.11",
        ),
    ],
    ids=["function", "task", "values", "code", "python"],
)
def test_ineligibility_for_calls_is_explained(
    worker: WorkerJoined, work: NamedWork, why: str
) -> None:
    pool = pool_after(worker, JobSubmitted(job(work)))

    assert plan(pool) == []
    assert f"{why} (1 worker)" in no_worker_reason(pool, pool.jobs[JobId("j")])


def test_call_stream_is_lost_with_its_worker_and_a_call_is_requeued() -> None:
    pool = pool_after(calls("w", "f", slots=2))
    for work, name in ((CallStream("f"), "lane"), (call(), "call")):
        pool.apply(JobSubmitted(job(work, name)), 0.0)
    for lease in plan(pool):
        pool.apply(lease, 0.0)

    facts = react(pool, WorkerDisconnected(WorkerId("w"), "gone"))

    assert facts[0] == JobFailed(JobId("lane"), "worker lost: gone", lost=True)
    assert [type(each).__name__ for each in facts[1:]] == ["JobRequeued", "WorkerLeft"]


def done(pool: PoolState, count: int, took: float) -> None:
    """Complete calls of a worker one after the other."""
    for number in range(count):
        name = f"{took}-{number}"
        for fact in react(pool, Submission(job(name=name))):
            pool.apply(fact, 0.0)
        for lease in plan(pool):
            pool.apply(lease, 0.0)
        event = Completed(JobId(name), LeaseNumber(1), value=b"\xc0")
        answered = LeaseResult(WorkerId("w"), event, Outcome("", value=b"\xc0"))
        for fact in react(pool, answered):
            pool.apply(fact, took)


def waiting(pool: PoolState, work: NamedWork, count: int) -> None:
    for number in range(count):
        pool.apply(JobSubmitted(job(work, f"{type(work).__name__}{number}")), 0.0)


def leased(pool: PoolState) -> list[str]:
    leases = plan(pool)
    for lease in leases:
        pool.apply(lease, 0.0)
    return [lease.job_id for lease in leases]


def test_short_calls_are_prefetched_increasingly() -> None:
    pool = pool_after(calls("w", "f", slots=2))
    done(pool, 10, took=0.001)
    waiting(pool, call(), 50)

    assert len(leased(pool)) == 2 + 10


def test_prefetch_is_limited() -> None:
    pool = pool_after(calls("w", "f", slots=2))

    done(pool, 2 * PREFETCH_MAX, took=0.001)

    assert pool.workers[WorkerId("w")].prefetch == PREFETCH_MAX


def test_long_calls_are_not_prefetched() -> None:
    pool = pool_after(calls("w", "f", slots=2))
    done(pool, 10, took=0.001)
    done(pool, 10, took=PREFETCH_BELOW + 1)
    waiting(pool, call(), 50)

    assert len(leased(pool)) == 2


@pytest.mark.parametrize("work", [CallStream("f"), Task("f")])
def test_only_calls_are_prefetched(work: NamedWork) -> None:
    pool = pool_after(calls("w", "f", slots=2))
    done(pool, 10, took=0.001)
    waiting(pool, work, 50)

    assert len(leased(pool)) == 2


def test_no_call_is_queued_behind_a_call_stream() -> None:
    pool = pool_after(calls("w", "f", slots=2))
    done(pool, 10, took=0.001)
    waiting(pool, CallStream("f"), 1)
    waiting(pool, call(), 50)

    assert leased(pool) == ["CallStream0", "Call0"]
    assert leased(pool) == []

    pool.apply(JobCancelled(JobId("CallStream0"), "closed"), 1.0)
    assert len(leased(pool)) > 1


def test_prefetched_calls_do_not_delay_a_waiting_call_stream() -> None:
    pool = pool_after(calls("w", "f", slots=2))
    done(pool, 10, took=0.001)
    waiting(pool, call(), 5)
    assert len(leased(pool)) == 5

    waiting(pool, CallStream("f"), 1)
    pool.apply(JobSubmitted(job(name="late")), 0.0)

    assert leased(pool) == []


def test_pool_offers_its_functions_without_call_streams() -> None:
    pool = pool_after(calls("a", "f"), calls("b", "g", slots=3))

    (offer,) = own_offers(pool)

    assert offer.kinds == {JobKind.TASK, JobKind.CALL}
    assert offer.tasks == {"f", "g"}
    assert offer.slots == 4


def test_slots_that_waiting_tasks_lend_take_calls() -> None:
    pool = pool_after(
        calls("w", "f"),
        JobSubmitted(job(CallStream("f"), "a")),
        JobSubmitted(job(CallStream("f"), "b")),
    )
    assert leased(pool) == ["a"]
    assert leased(pool) == []

    pool.apply(WorkerLoadChanged(WorkerId("w"), WorkerLoad(lent=1)), 0.0)
    assert leased(pool) == ["b"]
