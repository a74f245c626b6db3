"""Reasons why a worker is ineligible for a job."""

import pytest
from msgspec.structs import replace

from pool.builders import (
    NOTHING,
    assign,
    handle,
    job,
    joined,
    leased,
    load_changed,
    pool_after,
)
from shoal.domain.facts import (
    JobRequeued,
    JobSubmitted,
    PassedOver,
    WorkerDraining,
    WorkerJoined,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Privacy
from shoal.domain.work import ANY_MODEL, Chat, Feature, JobKind, Task, Work
from shoal.domain.worker import Offer
from shoal.pool.eligibility import (
    LISTED_MAX,
    WORKERS_EXAMINED_MAX,
    ineligibility,
    no_worker_reason,
    passed_over,
)
from shoal.pool.inputs import Submission

J, W = JobId("j"), WorkerId("w")


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (joined(), None),
        (joined("w", "m", "n", slots=9), None),
        (joined("w", "other"), "does not have m"),
        (joined(kinds=frozenset()), "does not run chat jobs"),
        (joined(slots=0), "offers no slots"),
        (
            joined(slots=0, remark="max_concurrency=abc is no number"),
            "offers no slots (max_concurrency=abc is no number)",
        ),
    ],
)
def test_eligibility_follows_from_the_offer(
    worker: WorkerJoined, reason: str | None
) -> None:
    pool = pool_after(worker, JobSubmitted(job()))

    assert ineligibility(pool.jobs[J], pool.workers[W]) == reason


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (NOTHING, "cannot do: stop"),
        (frozenset({Feature.CONTINUE, Feature.OPTIONS}), "cannot do: stop"),
        (frozenset({Feature.STOP}), None),
    ],
)
def test_stop_strings_need_a_worker_with_the_feature(
    features: frozenset[Feature], reason: str | None
) -> None:
    pool = pool_after(joined(features=features), JobSubmitted(job(stop=True)))

    assert ineligibility(pool.jobs[J], pool.workers[W]) == reason


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (joined(context=99), "reads 99 tokens, fewer than the request has"),
        (joined(context=100), None),
        (joined(context=0), None),
        (joined(only_for=frozenset({"bo"})), "works for other keys only"),
        (joined(only_for=frozenset({"al", "bo"})), None),
        (joined(privacy=Privacy.PRIVATE), "accepts private jobs only"),
        (joined(privacy=Privacy.PUBLIC), None),
        (joined(kinds=frozenset({JobKind.EMBEDDING})), "does not run chat jobs"),
    ],
)
def test_length_and_owner_of_a_job_matter(
    worker: WorkerJoined, reason: str | None
) -> None:
    asked = job(owner="al", prompt="x" * 800)
    pool = pool_after(worker, JobSubmitted(asked))

    assert ineligibility(pool.jobs[J], pool.workers[W]) == reason


def test_worker_does_not_get_its_job_twice() -> None:
    pool = pool_after(joined(slots=2), JobSubmitted(job()), leased())

    assert ineligibility(pool.jobs[J], pool.workers[W]) == "is already running it"


def test_draining_worker_is_ineligible() -> None:
    pool = pool_after(joined(), WorkerDraining(W, ""), JobSubmitted(job()))

    assert ineligibility(pool.jobs[J], pool.workers[W]) == "draining"


def test_worker_does_not_get_a_rejected_job_again() -> None:
    requeued = JobRequeued(J, LeaseNumber(1), "too long", refused_by=W)
    pool = pool_after(joined(), JobSubmitted(job()), leased(), requeued)

    assert ineligibility(pool.jobs[J], pool.workers[W]) == "refused it: too long"
    assert assign(pool) == []


def test_full_worker_is_ineligible() -> None:
    pool = pool_after(joined(), JobSubmitted(job()), leased(), JobSubmitted(job("k")))

    assert ineligibility(pool.jobs[JobId("k")], pool.workers[W]) == "all slots busy"


def test_workers_passed_over_are_grouped_by_reason() -> None:
    pool = pool_after(
        joined("a"),
        joined("b"),
        joined("c", slots=0),
        joined("d", "other"),
        joined("e", "other"),
        JobSubmitted(job()),
    )

    groups = passed_over(pool, pool.jobs[J], chosen=(WorkerId("a"),))

    assert groups == (
        PassedOver("another worker was expected to be faster", 1, (WorkerId("b"),)),
        PassedOver("offers no slots", 1, (WorkerId("c"),)),
        PassedOver("does not have m", 2),
    )


def test_explanation_stays_small_in_a_large_pool() -> None:
    crowd = [joined(f"w{number}", slots=0) for number in range(1000)]
    pool = pool_after(*crowd, JobSubmitted(job()))

    looked_at, others = passed_over(pool, pool.jobs[J])

    assert (looked_at.count, len(looked_at.workers)) == (
        WORKERS_EXAMINED_MAX,
        LISTED_MAX,
    )
    assert others.count == 1000 - WORKERS_EXAMINED_MAX


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([], "no worker for m: no worker is connected"),
        ([joined("a", "x")], "no worker for m: does not have m (1 worker)"),
        (
            [joined("a", slots=0), joined("b", slots=0), joined("c", "x")],
            "no worker for m: offers no slots (2 workers), does not have m (1 worker)",
        ),
    ],
)
def test_rejection_names_missing_features_in_one_line(
    workers: list[WorkerJoined], text: str
) -> None:
    pool = pool_after(*workers)
    handle(pool, Submission(job()))

    assert no_worker_reason(pool, pool.jobs[J]) == text


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("m", "no worker for m: 2 workers have it but are full, does not have m (1 "),
        (ANY_MODEL, "no worker for any model: 3 workers have one but are full"),
    ],
)
def test_workers_that_are_full_are_counted(model: str, text: str) -> None:
    pool = pool_after(joined("a"), joined("b"), joined("c", "x"))
    for number, wanted in enumerate(("m", "m", "x")):
        handle(pool, Submission(Job(JobId(f"{number}"), Chat(wanted, ()))))
    assert len(assign(pool)) == 3

    handle(pool, Submission(Job(J, Chat(model, ()))))

    assert no_worker_reason(pool, pool.jobs[J]).startswith(text)


def test_empty_pool_lists_no_ineligible_workers() -> None:
    pool = pool_after(JobSubmitted(job()))

    assert passed_over(pool, pool.jobs[J]) == ()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (Chat("m", ()), "no worker for m: does not have m (1 worker)"),
        (
            Chat(ANY_MODEL, ()),
            "no worker for any model: has no chat model (1 worker)",
        ),
        (
            Task("sum"),
            "no worker for the task 'sum': does not have the task 'sum' (1 worker)",
        ),
        (Task(""), "no worker for a task without a name: does not have a task witho"),
        (
            Task("x" * 9999),
            f"no worker for the task '{'x' * 64}': does not have the ta",
        ),
    ],
)
def test_rejection_names_the_requested_model(work: Work, said: str) -> None:
    offer = Offer(frozenset({JobKind.TASK}), tasks=frozenset({"classify"}))
    wanted = Job(J, work)
    pool = pool_after(WorkerJoined(W, offer, cancels=True), JobSubmitted(wanted))

    assert no_worker_reason(pool, pool.jobs[J]).startswith(said)


def test_unfit_worker_is_ineligible_with_its_reason() -> None:
    pool = pool_after(joined(), load_changed(unfit="is too hot"), JobSubmitted(job()))

    assert ineligibility(pool.jobs[J], pool.workers[W]) == "is too hot"
    assert (
        no_worker_reason(pool, pool.jobs[J]) == "no worker for m: is too hot (1 worker)"
    )
    assert assign(pool) == []


def test_recovered_worker_gets_waiting_jobs() -> None:
    pool = pool_after(joined(), load_changed(unfit="is paused"), JobSubmitted(job()))
    assert assign(pool) == []

    pool.apply(load_changed(), 1.0)

    assert assign(pool) == [("j", "w")]


def test_unfit_worker_keeps_its_jobs() -> None:
    pool = pool_after(joined(slots=2), JobSubmitted(job()), leased())

    pool.apply(load_changed(unfit="is too hot"), 1.0)
    handle(pool, Submission(job("k")))

    assert assign(pool) == []
    assert pool.workers[W].leases == {J: 1}


def test_job_of_a_peer_pool_is_not_forwarded() -> None:
    pool = pool_after(
        joined("far", neighbour=True),
        JobSubmitted(replace(job(), terms=JobTerms(near=True))),
        JobSubmitted(job("k")),
    )
    far = pool.workers[WorkerId("far")]

    reason = ineligibility(pool.jobs[J], far)

    assert reason == "is another pool, and the job came from one"
    assert assign(pool) == [("k", "far")]


def test_jobs_of_different_origin_are_planned_separately() -> None:
    pool = pool_after(joined("far", slots=2, neighbour=True))
    handle(pool, Submission(replace(job("a"), terms=JobTerms(near=True))))
    handle(pool, Submission(job("b")))

    assert assign(pool) == [("b", "far")]


def test_job_of_a_peer_goes_to_none_of_its_models() -> None:
    pool = pool_after(joined("wire:mac/m"), joined("wire:mac", "m"))
    handle(pool, Submission(replace(job("a"), terms=JobTerms(peer="wire:mac"))))
    handle(pool, Submission(job("b")))

    reasons = [
        ineligibility(pool.jobs[JobId("a")], each) for each in pool.workers.values()
    ]

    assert reasons == ["submitted it", "submitted it"]
    assert [name for name, _ in assign(pool)] == ["b"]
