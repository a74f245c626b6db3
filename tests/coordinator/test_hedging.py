"""A second worker for a silent job, from the hub's clock to the client."""

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
from simulation import virtual

AFTER = 5.0  # seconds
LIMITS = TimeLimits(queue=100.0, first_output=20.0, silence=50.0, total=500.0)
NO_CANCEL: frozenset[type] = frozenset({RunJob, Dismiss})


async def two_workers(
    coordinator: Coordinator, accepts: frozenset[type] = EVERYTHING
) -> list[ScriptedWorker]:
    """Let two workers join that can do the same, and one with something else."""
    first = await coordinator.join("a")
    await coordinator.join("busy", "other")
    return [first, await coordinator.join("b", accepts=accepts)]


def test_silent_worker_is_overtaken() -> None:
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


def test_first_worker_may_still_be_the_quicker_one() -> None:
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


def test_nobody_is_asked_twice_unless_that_is_wanted() -> None:
    async def script(coordinator: Coordinator) -> None:
        _, second = await two_workers(coordinator)
        await coordinator.request(limits=LIMITS)

        await asyncio.sleep(19.0)

        assert second.runs == []

    run_script(script)


def test_worker_that_becomes_idle_is_asked_then() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 5.0)

        second = await coordinator.join("b")
        assert [run.job_id for run in second.runs] == [client.job_id]
        assert first.cancelled == []

    run_script(script, hedge_after=AFTER)


def test_waiting_jobs_go_before_a_second_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join("a")
        await coordinator.request()
        waiting = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

        second = await coordinator.join("b")

        assert [run.job_id for run in second.runs] == [waiting.job_id]

    run_script(script, hedge_after=AFTER)


def test_loser_that_cannot_be_told_keeps_its_slot_and_its_text_to_itself() -> None:
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
def test_one_worker_gives_up_and_the_other_goes_on(gone: int, how: str) -> None:
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


def test_both_workers_give_up() -> None:
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


def test_third_worker_takes_over_from_both() -> None:
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


def test_job_that_takes_both_down_is_given_up_as_soon_as_any_other() -> None:
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


def test_text_that_comes_while_the_second_lease_is_being_stored_decides() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator, accepts=NO_CANCEL)
        client = await coordinator.request()
        await asyncio.sleep(AFTER - 0.5)
        coordinator.store.writable.clear()
        await asyncio.sleep(1.0)

        first.write("just in time")
        coordinator.store.writable.set()
        await run_pending()
        # It was told, for it cannot be called back, and ends in its own time.
        assert len(second.runs) == 1
        second.write("of no use")
        second.complete()
        first.complete()
        await run_pending()

        assert client.outcome == Outcome("just in time")
        assert {w.free_slots for w in coordinator.hub.pool.workers.values()} == {1}

    run_script(script, hedge_after=AFTER)


def test_worker_that_is_lost_while_the_second_lease_is_being_stored() -> None:
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


def test_both_write_while_nothing_can_be_stored() -> None:
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


def test_time_for_the_first_output_is_that_of_the_first_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request(limits=LIMITS)
        await asyncio.sleep(19.0)
        assert client.error is None

        await asyncio.sleep(2.0)

        assert isinstance(client.error, NoFirstOutput)
        assert first.cancelled == second.cancelled == [client.job_id]

    run_script(script, hedge_after=AFTER)


def test_output_of_the_second_worker_ends_the_wait_for_the_first_output() -> None:
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


def test_client_that_leaves_frees_both() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await two_workers(coordinator)
        client = await coordinator.request()
        await asyncio.sleep(AFTER + 1.0)

        await client.disconnect()

        assert first.cancelled == second.cancelled == [client.job_id]
        assert {w.free_slots for w in coordinator.hub.pool.workers.values()} == {1}

    run_script(script, hedge_after=AFTER)


def test_job_that_two_workers_had_is_taken_up_again_after_a_restart(
    store: SlowStore,
) -> None:
    async def scenario() -> None:
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

    virtual.run(scenario())
