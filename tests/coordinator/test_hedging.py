"""Hedging, from the hub's clock to the client."""

import asyncio

import pytest

from coordinator.hubs import (
    CONTINUES,
    EVERYTHING,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.domain.errors import JobError, NoFirstOutput, WorkerLost
from shoal.domain.facts import (
    JobCompleted,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
)
from shoal.domain.ids import WorkerId
from shoal.domain.job import TimeLimits
from shoal.domain.outcome import Delta, Outcome
from shoal.domain.vocabulary import CancelJob, Dismiss, Failed, RunJob
from shoal.pool.lifecycle import JobState
from simulation.virtual import in_virtual_time, scripted

AFTER = 5.0  # seconds
LIMITS = TimeLimits(queue=100.0, first_output=20.0, silence=50.0, total=500.0)
NO_CANCEL: frozenset[type] = frozenset({RunJob, Dismiss})


async def two_workers(
    coordinator: Coordinator, accepts: frozenset[type] = EVERYTHING
) -> list[ScriptedWorker]:
    """Join two equal workers, and one with another model."""
    first = await coordinator.join("a")
    await coordinator.join("busy", "other")
    return [first, await coordinator.join("b", accepts=accepts)]


def test_silent_worker_is_hedged() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER - 1.0)
        assert second.runs == []

        await asyncio.sleep(1.0)
        assert [run.lease for run in second.runs] == [2]
        second.write("quick")
        await run_pending()
        assert first.commands[-1] == CancelJob(client.job_id, first.runs[0].lease)
        first.write("slow")
        first.complete()
        second.complete()
        await run_pending()

        assert client.outcome == Outcome("quick")
        kinds = [type(fact) for fact in await coordinator.history(client.job_id)]
        assert kinds == [
            JobSubmitted,
            JobLeased,
            JobHedged,
            JobUnhedged,
            JobStarted,
            LateResult,
            JobCompleted,
        ]
        assert {w.free_slots for w in coordinator.hub.pool.workers.values()} == {1}

    run_script(script, hedge_after=AFTER)


def test_first_worker_may_still_win() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

        first.write("after all", Delta(0, {"content": "!"}))
        second.write("too late")
        first.complete()
        await run_pending()

        assert client.pieces == ["after all", Delta(0, {"content": "!"})]
        assert second.cancelled == [client.job_id]
        assert first.cancelled == []

    run_script(script, hedge_after=AFTER)


@scripted(run_script)
async def test_jobs_are_not_hedged_by_default(coordinator: Coordinator) -> None:
    _, second = await two_workers(coordinator)
    await coordinator.request(limits=LIMITS)

    await asyncio.sleep(19.0)

    assert second.runs == []


def test_worker_that_becomes_idle_gets_the_hedge() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 5.0)

        second = await coordinator.join("b")
        assert [run.job_id for run in second.runs] == [client.job_id]
        assert first.cancelled == []

    run_script(script, hedge_after=AFTER)


def test_waiting_jobs_precede_hedges() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join("a")
        await coordinator.request()
        waiting = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

        second = await coordinator.join("b")

        assert [run.job_id for run in second.runs] == [waiting.job_id]

    run_script(script, hedge_after=AFTER)


def test_loser_without_cancellation_keeps_its_slot_and_its_text_is_dropped() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator, accepts=NO_CANCEL)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        first.write("quick")
        await run_pending()
        second.write("slow")
        in_pool = coordinator.hub.pool.workers
        slots = {name: worker.free_slots for name, worker in in_pool.items()}
        assert slots[WorkerId("wire:b")] == 0

        second.complete()
        first.complete()
        await run_pending()

        assert client.outcome == Outcome("quick")
        assert {worker.free_slots for worker in in_pool.values()} == {1}

    run_script(script, hedge_after=AFTER)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("how", ["lost", "refused", "failed"])
def test_other_worker_continues_if_one_rejects(gone: int, how: str) -> None:
    async def script(coordinator: Coordinator) -> None:
        workers = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        leaving, staying = workers[gone], workers[1 - gone]
        run = leaving.runs[0]

        match how:
            case "lost":
                leaving.port.on_disconnect("connection reset")
            case "refused":
                leaving.reject()
            case _:
                leaving.emit(Failed(run.job_id, run.lease, "out of memory"))
        await run_pending()
        staying.write("mine")
        staying.complete()
        await run_pending()

        assert client.outcome == Outcome("mine")
        assert len(staying.runs) == 1
        assert staying.cancelled == []

    run_script(script, hedge_after=AFTER)


def test_job_is_requeued_if_both_reject() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        for worker in (first, second):
            run = worker.runs[0]
            worker.emit(Failed(run.job_id, run.lease, f"{run.lease}: out of memory"))
        await run_pending()

        assert isinstance(client.error, JobError)
        assert str(client.error) == "2: out of memory"

    run_script(script, hedge_after=AFTER)


def test_third_worker_takes_over_from_two_lost() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        first.port.on_disconnect("reset")
        await run_pending()
        second.write("Hello, ")
        await run_pending()
        third = await coordinator.join("c", features=CONTINUES)

        second.port.on_disconnect("reset")
        await run_pending()

        assert [(run.lease, run.continues) for run in third.runs] == [(3, "Hello, ")]
        third.write("world")
        third.complete()
        await run_pending()
        assert client.outcome == Outcome("Hello, world")

    run_script(script, hedge_after=AFTER)


def test_hedged_job_that_loses_workers_is_given_up_like_any_other() -> None:
    async def script(coordinator: Coordinator) -> None:
        workers = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        for worker in workers:
            worker.port.on_disconnect("killed")
        await run_pending()

        third = await coordinator.join("c")
        third.port.on_disconnect("killed")
        await run_pending()

        assert isinstance(client.error, WorkerLost)

    run_script(script, hedge_after=AFTER)


def test_text_during_the_commit_of_the_second_lease_wins() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator, accepts=NO_CANCEL)
        client = await coordinator.request()
        await asyncio.sleep(AFTER - 0.5)
        coordinator.store.writable.clear()
        await asyncio.sleep(1.0)

        first.write("just in time")
        coordinator.store.writable.set()
        await run_pending()
        # It got the job, which cannot be cancelled, and ends later.
        assert len(second.runs) == 1
        second.write("of no use")
        second.complete()
        first.complete()
        await run_pending()

        assert client.outcome == Outcome("just in time")
        assert {w.free_slots for w in coordinator.hub.pool.workers.values()} == {1}

    run_script(script, hedge_after=AFTER)


def test_worker_is_lost_during_the_commit_of_the_second_lease() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER - 0.5)
        coordinator.store.writable.clear()
        await asyncio.sleep(1.0)

        first.port.on_disconnect("connection reset")
        coordinator.store.writable.set()
        await run_pending()
        second.write("here")
        second.complete()
        await run_pending()

        assert client.outcome == Outcome("here")

    run_script(script, hedge_after=AFTER)


def test_both_write_during_a_commit() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)
        coordinator.store.writable.clear()

        second.write("second")
        first.write("first")
        second.write(" goes on")
        await run_pending()
        assert client.text == "second goes on"
        first.complete()
        second.complete()
        coordinator.store.writable.set()
        await run_pending()

        assert client.outcome == Outcome("second goes on")

    run_script(script, hedge_after=AFTER)


def test_first_output_limit_counts_from_the_first_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request(limits=LIMITS)
        await asyncio.sleep(19.0)
        assert client.error is None

        await asyncio.sleep(2.0)

        assert isinstance(client.error, NoFirstOutput)
        assert first.cancelled == second.cancelled == [client.job_id]

    run_script(script, hedge_after=AFTER)


def test_output_of_the_second_worker_meets_the_first_output_limit() -> None:
    async def script(coordinator: Coordinator) -> None:
        _, second = await two_workers(coordinator)
        client = await coordinator.request(limits=LIMITS)
        await asyncio.sleep(19.0)
        second.write("at last")

        await asyncio.sleep(40.0)

        assert client.error is None
        second.complete()
        await run_pending()
        assert client.outcome == Outcome("at last")

    run_script(script, hedge_after=AFTER)


def test_client_disconnect_frees_both_workers() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

        await client.disconnect()

        assert first.cancelled == second.cancelled == [client.job_id]
        assert {w.free_slots for w in coordinator.hub.pool.workers.values()} == {1}

    run_script(script, hedge_after=AFTER)


@in_virtual_time
async def test_hedged_job_resumes_after_a_restart(
    store: SlowStore,
) -> None:
    async with running_coordinator(store, hedge_after=AFTER) as coordinator:
        await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

    async with running_coordinator(store, hedge_after=AFTER) as coordinator:
        stored = await store.job(client.job_id)
        assert stored is not None
        assert (stored.state, stored.lease) == (JobState.QUEUED, 2)
        worker = await coordinator.join("a")
        assert [run.lease for run in worker.runs] == [3]
        worker.complete()
        await run_pending()
        story = [type(fact) for fact in await coordinator.history(client.job_id)]

    assert story[-4:] == [JobHedged, JobRequeued, JobLeased, JobCompleted]
