"""Open jobs outlive a restart, and end before a coordinator stops."""

import asyncio

import pytest

from coordinator.hubs import (
    SHORT_LIMITS,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    kinds,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator.recovery import RESTART_GRACE
from shoal.domain.errors import QueueFull, ShuttingDown, UnknownModel
from shoal.domain.facts import (
    JobCompleted,
    JobExpired,
    JobLeased,
    JobRequeued,
    JobStarted,
    LateResult,
)
from shoal.domain.job import TimeLimit, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Completed, Joined
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer
from shoal.pool.lifecycle import JobState
from shoal.protocols.seam.session import CloseCode
from simulation import virtual
from simulation.virtual import in_virtual_time, scripted


@in_virtual_time
async def test_open_jobs_resume_after_a_restart(store: SlowStore) -> None:
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        begun, queued = await coordinator.request(), await coordinator.request()
        worker.write("lost")
        await run_pending()

    async with running_coordinator(store) as coordinator:
        # Longer than the default queue limit.
        await asyncio.sleep(RESTART_GRACE - 1.0)
        worker = await coordinator.join(slots=2)
        assert [(run.job_id, run.lease) for run in worker.runs] == [
            (begun.job_id, 2),
            (queued.job_id, 1),
        ]
        for run in (0, 1):
            worker.write("anew", run=run)
            worker.complete(run=run)
        await run_pending()

        story = await coordinator.history(begun.job_id)

    assert [JobRequeued, JobLeased, JobStarted, JobCompleted] == kinds(story)[-4:]
    for client in (begun, queued):
        stored = await store.job(client.job_id)
        assert stored is not None
        assert stored.outcome == Outcome("anew")


@in_virtual_time
async def test_models_from_before_a_restart_are_awaited(store: SlowStore) -> None:
    async with running_coordinator(store) as coordinator:
        await coordinator.join(model="m")

    async with running_coordinator(store) as coordinator:
        client = await coordinator.request("m")
        unknown = await coordinator.request("never heard of")
        worker = await coordinator.join(model="m")
        worker.write("back")
        worker.complete()
        await client.task

        assert client.text == "back"
        assert isinstance(unknown.error, UnknownModel)


@in_virtual_time
async def test_result_for_the_previous_coordinator_is_late(
    store: SlowStore,
) -> None:
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        client = await coordinator.request()
        old = worker.runs[0]

    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        worker.emit(Completed(old.job_id, old.lease))
        await run_pending()
        stored = await store.job(client.job_id)
        assert stored is not None
        assert stored.state is JobState.LEASED

        worker.complete()
        await run_pending()

        story = await coordinator.history(client.job_id)
        assert [LateResult, JobCompleted] == kinds(story)[-2:]


def test_function_is_waited_for_after_a_restart(store: SlowStore) -> None:
    """Others may come back before the worker that has it."""

    async def join(coordinator: Coordinator, task: str) -> ScriptedWorker:
        worker = await coordinator.join(task)
        tasks = frozenset({JobKind.TASK})
        worker.emit(Joined(task, Offer(tasks, tasks=frozenset({task}))))
        await run_pending()
        return worker

    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            await join(coordinator, "classify")

        async with running_coordinator(store) as coordinator:
            await join(coordinator, "sum")
            client = await coordinator.request(kind=JobKind.TASK)
            worker = await join(coordinator, "classify")
            assert [each.job_id for each in worker.runs] == [client.job_id]

    virtual.run(scenario())


@in_virtual_time
async def test_job_without_a_worker_after_a_restart_expires(store: SlowStore) -> None:
    async with running_coordinator(store) as coordinator:
        await coordinator.join()
        await coordinator.request(limits=SHORT_LIMITS)
    async with running_coordinator(store) as coordinator:
        await asyncio.sleep(RESTART_GRACE + 1.0)

        assert coordinator.hub.pool.jobs == {}
    assert await store.open_jobs() == []


@pytest.mark.parametrize("limit", [TimeLimit.QUEUE, TimeLimit.TOTAL])
def test_limits_of_a_job_count_from_its_submission_after_a_restart(
    store: SlowStore, limit: TimeLimit
) -> None:
    limits = TimeLimits(
        queue=8.0 if limit is TimeLimit.QUEUE else 600.0,
        total=8.0 if limit is TimeLimit.TOTAL else 600.0,
    )

    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            await coordinator.join(slots=1)
            await coordinator.request()  # which is given to the worker
            client = await coordinator.request(limits=limits)
        async with running_coordinator(store) as coordinator:
            await coordinator.join(slots=0)
            await asyncio.sleep(14.0)

            *_, end = await coordinator.history(client.job_id)
        assert isinstance(end, JobExpired)
        assert end.limit is limit

    virtual.run(scenario())


def test_coordinator_that_restarts_in_a_loop_does_not_renew_queue_limits(
    store: SlowStore,
) -> None:
    """A job that had a worker waits since it was requeued, not since each restart."""

    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            await coordinator.join()
            client = await coordinator.request(limits=TimeLimits(queue=8.0))
        for _ in range(4):
            async with running_coordinator(store) as coordinator:
                await coordinator.join(slots=0)
                await asyncio.sleep(3.0)

        *_, end = [each.fact for each in await store.history(client.job_id)]
        assert isinstance(end, JobExpired)
        assert end.limit is TimeLimit.QUEUE

    virtual.run(scenario())


@scripted(run_script)
async def test_drain_finishes_open_jobs_and_rejects_new_ones(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()

    draining = asyncio.create_task(coordinator.hub.drain())
    await run_pending()
    refused = await coordinator.request()
    assert isinstance(refused.error, ShuttingDown)
    assert coordinator.hub.unavailable_reason == "stopping"
    assert not draining.done()
    worker.complete()
    await draining

    assert client.outcome is not None


@scripted(run_script)
async def test_drain_waits_for_a_job_in_acceptance(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    coordinator.store.writable.clear()
    client = await coordinator.request()

    draining = asyncio.create_task(coordinator.hub.drain())
    await run_pending()
    assert not draining.done()
    coordinator.store.writable.set()
    await run_pending()
    assert not draining.done()
    worker.complete()
    await draining

    assert client.outcome is not None


@scripted(run_script)
async def test_drain_without_open_jobs_completes_at_once(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    refused = await coordinator.request("unknown")
    assert isinstance(refused.error, UnknownModel)

    async with asyncio.timeout(1.0):
        await coordinator.hub.drain()


def test_drain_after_a_rejection_completes_at_once() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        assert isinstance((await coordinator.request()).error, QueueFull)

        async with asyncio.timeout(1.0):
            await coordinator.hub.drain()

    run_script(script, queue_max=0)


@scripted(run_script)
async def test_stop_disconnects_all_workers(coordinator: Coordinator) -> None:
    workers = [await coordinator.join(name) for name in "abc"]

    coordinator.hub.disconnect_all("the coordinator is stopping")

    for worker in workers:
        assert worker.disconnections == [
            ("the coordinator is stopping", CloseCode.GOING_AWAY)
        ]
