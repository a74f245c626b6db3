"""A job goes to a worker that can run it, and its answer or failure to the client."""

import asyncio
import logging

import pytest

from coordinator.hubs import (
    SECRET,
    TOOL_CALL,
    Coordinator,
    kinds,
    run_pending,
    run_script,
)
from shoal.coordinator.worker_events import STARTED_AFTER
from shoal.domain.errors import (
    CannotDo,
    ContextExceeded,
    InvalidRequest,
    JobError,
    ShoalError,
    TooLarge,
    UnknownModel,
    Unprocessable,
)
from shoal.domain.facts import (
    Fact,
    JobCompleted,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
)
from shoal.domain.job import TimeLimits
from shoal.domain.job_kinds import FUNCTION_KINDS
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.vocabulary import Draining, Failed, Rejected
from shoal.domain.work import JobKind
from shoal.domain.worker import Suspension
from shoal.pool.inputs import WorkerSuspension
from simulation.virtual import scripted


@scripted(run_script)
async def test_job_runs_and_its_text_is_returned(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("Hello, ", "world")
    await run_pending()
    assert client.text == "Hello, world"
    assert client.outcome is None

    worker.complete()
    await run_pending()

    assert client.outcome == Outcome("Hello, world")
    assert kinds(await coordinator.history(client.job_id)) == [
        JobSubmitted,
        JobLeased,
        JobStarted,
        JobCompleted,
    ]
    assert coordinator.hub.pool.jobs == {}


@scripted(run_script)
async def test_the_hub_learns_of_a_first_output_before_what_depends_on_it(
    coordinator: Coordinator,
) -> None:
    facts: list[Fact] = []
    coordinator.hub.subscribe(facts.extend)
    worker = await coordinator.join(slots=3)
    short, long, failed = [await coordinator.request() for _ in range(3)]
    for run in range(3):
        worker.write("a", run=run)
    await run_pending()
    worker.complete(run=0)
    last = worker.runs[2]
    worker.emit(Failed(last.job_id, last.lease, "out of range", Fault.REQUEST))
    await asyncio.sleep(2 * STARTED_AFTER)

    course = [JobSubmitted, JobLeased, JobStarted]
    told = [
        kinds([fact for fact in facts if getattr(fact, "job_id", "") == job_id])
        for job_id in (short.job_id, long.job_id, failed.job_id)
    ]
    assert told[0] == [JobSubmitted, JobLeased, JobCompleted]
    assert told[1] == course
    assert told[2] == [*course, JobFailed]
    stored = await coordinator.history(short.job_id)
    assert kinds(stored) == [*course, JobCompleted]


@scripted(run_script)
async def test_a_worker_is_removed_after_the_hub_has_learnt_of_its_first_output(
    coordinator: Coordinator,
) -> None:
    facts: list[Fact] = []
    coordinator.hub.subscribe(facts.extend)
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("a")
    (name,) = coordinator.hub.pool.workers
    await coordinator.hub.process(
        WorkerSuspension(name, Suspension.REMOVED, "an operator")
    )

    told = [fact for fact in facts if getattr(fact, "job_id", "") == client.job_id]
    assert kinds(told) == [JobSubmitted, JobLeased, JobStarted, JobRequeued]


@scripted(run_script)
async def test_each_worker_receives_what_remains_of_the_total_limit(
    coordinator: Coordinator,
) -> None:
    first, second = await coordinator.join("a"), await coordinator.join("b")
    await coordinator.request(limits=TimeLimits(total=100.0))
    await asyncio.sleep(20.0)
    runner, other = (first, second) if first.runs else (second, first)
    runner.reject()
    await run_pending()

    remaining = [runner.runs[0].remaining, other.runs[0].remaining]
    assert [round(each or 0.0) for each in remaining] == [100, 80]


@scripted(run_script)
async def test_job_waits_for_a_worker_that_just_left(coordinator: Coordinator) -> None:
    first = await coordinator.join()
    first.port.on_disconnect("restarted")
    await run_pending()
    client = await coordinator.request()
    assert client.accepted

    worker = await coordinator.join()
    worker.write("here")
    worker.complete()
    await run_pending()

    assert client.text == "here"


@scripted(run_script)
async def test_rejected_job_goes_to_another_worker(coordinator: Coordinator) -> None:
    first, second = await coordinator.join("a"), await coordinator.join("b")
    client = await coordinator.request()
    run = first.runs[0]

    first.emit(Rejected(run.job_id, run.lease, "loading"))
    await run_pending()
    second.write("done")
    second.complete()
    await run_pending()

    assert client.text == "done"
    assert [run.lease, second.runs[0].lease] == [1, 2]


@scripted(run_script)
async def test_failed_job_goes_to_one_other_worker(coordinator: Coordinator) -> None:
    first, second = await coordinator.join("a"), await coordinator.join("b")
    client = await coordinator.request()
    run = first.runs[0]

    first.emit(Failed(run.job_id, run.lease, "status 500: out of blocks 17"))
    await run_pending()
    (again,) = second.runs
    second.emit(Failed(run.job_id, again.lease, "status 500: out of blocks 23"))
    await run_pending()

    assert isinstance(client.error, JobError)
    assert str(client.error) == "status 500: out of blocks 23"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.WORKER, JobError),
        (Fault.REQUEST, InvalidRequest),
        (Fault.CONTEXT, ContextExceeded),
        (Fault.SIZE, TooLarge),
        (Fault.VALUES, Unprocessable),
    ],
)
def test_failure_maps_to_the_error_of_its_fault(
    fault: Fault, error: type[ShoalError]
) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        run = worker.runs[0]

        worker.emit(Failed(run.job_id, run.lease, "too long", fault))
        await run_pending()

        assert type(client.error) is error
        assert str(client.error) == "too long"

    run_script(script)


@pytest.mark.parametrize(
    "kind", [each for each in JobKind if each not in FUNCTION_KINDS]
)
def test_every_kind_of_work_goes_to_a_capable_worker(kind: JobKind) -> None:
    async def script(coordinator: Coordinator) -> None:
        others = frozenset(JobKind) - {kind}
        other = await coordinator.join("other", kinds=others)
        worker = await coordinator.join("worker", kinds=frozenset({kind}))

        client = await coordinator.request(kind=kind)
        worker.write("done")
        worker.complete()
        await run_pending()

        assert other.runs == []
        assert worker.runs[0].work.kind is kind
        assert client.outcome == Outcome("done")

    run_script(script)


@scripted(run_script)
async def test_unsupported_work_is_rejected_at_once(coordinator: Coordinator) -> None:
    await coordinator.join()

    client = await coordinator.request(kind=JobKind.EMBEDDING)

    assert isinstance(client.error, CannotDo)
    assert not client.accepted


@scripted(run_script)
async def test_draining_worker_finishes_and_gets_no_new_jobs(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(slots=2)
    client = await coordinator.request()
    worker.emit(Draining("bye"))
    await run_pending()

    other = await coordinator.request()
    worker.write("last words")
    worker.complete()
    await run_pending()

    assert client.text == "last words"
    assert len(worker.runs) == 1
    assert other.outcome is None


@pytest.mark.parametrize(
    ("models", "asked", "said"),
    [
        ([], "m", "no worker has the model m: the pool has no model yet"),
        (["llama-3"], "lama-3", "no worker has the model lama-3: did you mean llama-3"),
        (["x"], "m", "no worker has the model m: the pool has x"),
    ],
)
def test_unknown_model_is_rejected_with_a_hint(
    models: list[str], asked: str, said: str
) -> None:
    async def script(coordinator: Coordinator) -> None:
        for model in models:
            await coordinator.join(model=model)

        client = await coordinator.request(asked)

        assert isinstance(client.error, UnknownModel)
        assert str(client.error).startswith(said)

    run_script(script)


@scripted(run_script)
async def test_structured_answer_is_streamed_and_assembled(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()

    worker.write("Hm. ", TOOL_CALL)
    worker.complete()
    await run_pending()

    assert client.pieces == ["Hm. ", TOOL_CALL]
    assert client.outcome is not None
    (choice,) = client.outcome.choices
    assert choice.fields["content"] == "Hm. "
    assert client.outcome.text == "Hm. "
    stored = await coordinator.store.job(client.job_id)
    assert stored is not None
    assert stored.outcome == client.outcome


def test_log_has_every_fact_and_no_prompt_or_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("a private answer")
        worker.complete()
        await run_pending()
        assert client.outcome is not None

    with caplog.at_level(logging.DEBUG):
        run_script(script)

    lines = [record.getMessage() for record in caplog.records]
    for fact in ("WorkerJoined", "JobSubmitted", "JobLeased", "JobCompleted"):
        assert sum(f"fact={fact}" in line for line in lines) == 1
    assert not any(SECRET in line or "private" in line for line in lines)
