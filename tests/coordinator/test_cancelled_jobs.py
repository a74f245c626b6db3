"""A job whose client leaves, or that an operator cancels, frees its worker."""

import asyncio

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    LIMITS,
    NO_CANCEL,
    Client,
    Coordinator,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.domain.errors import Cancelled
from shoal.domain.facts import JobCancelled
from shoal.domain.vocabulary import CancelJob, Completed
from simulation.virtual import in_virtual_time, scripted


@pytest.mark.parametrize("when", ["leased", "streaming"])
def test_client_disconnect_frees_its_worker(when: str) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        if when == "streaming":
            worker.write("some text")
            await run_pending()

        await client.disconnect()

        lease = worker.runs[0].lease
        assert worker.commands[-1] == CancelJob(client.job_id, lease)
        assert isinstance((await coordinator.history(client.job_id))[-1], JobCancelled)
        (in_pool,) = coordinator.hub.pool.workers.values()
        assert in_pool.free_slots == 1

    run_script(script)


def test_keyed_job_goes_on_without_a_client_for_as_long_as_that_asked() -> None:
    limits = replace(LIMITS, unattended=20.0)

    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request(key="k", limits=limits)
        worker.write("some text")
        await run_pending()
        await client.disconnect()
        await asyncio.sleep(15.0)

        returned = await coordinator.request(key="k", limits=limits)
        assert returned.job_id == client.job_id
        await returned.disconnect()
        await asyncio.sleep(19.0)
        cancel = CancelJob(client.job_id, worker.runs[0].lease)
        assert cancel not in worker.commands

        await asyncio.sleep(2.0)
        assert cancel in worker.commands

    run_script(script)


@in_virtual_time
async def test_keyed_job_whose_client_does_not_return_after_a_restart_is_cancelled(
    store: SlowStore,
) -> None:
    async with running_coordinator(store) as coordinator:
        await coordinator.join()
        kept = await coordinator.request(key="kept")
        short = await coordinator.request(
            key="short", limits=replace(LIMITS, queue=600.0, unattended=20.0)
        )

    async with running_coordinator(store) as coordinator:
        await asyncio.sleep(21.0)

        (cancelled,) = (await coordinator.history(short.job_id))[-1:]
        assert isinstance(cancelled, JobCancelled)
        assert kept.job_id in coordinator.hub.pool.jobs


@scripted(run_script)
async def test_disconnected_client_leaves_the_queue(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    first, second = await coordinator.request(), await coordinator.request()

    await second.disconnect()
    worker.complete()
    await run_pending()

    assert first.outcome is not None
    assert len(worker.runs) == 1
    assert await coordinator.store.open_jobs() == []


@scripted(run_script)
async def test_client_that_disconnects_before_acceptance_is_never_served(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    coordinator.store.writable.clear()
    client = await coordinator.request()

    await client.disconnect()
    coordinator.store.writable.set()
    await run_pending()

    # The lease may be in a commit by then, but only together with its end.
    assert [run.job_id for run in worker.runs] == worker.cancelled
    assert await coordinator.store.open_jobs() == []
    assert coordinator.hub.pool.jobs == {}


@scripted(run_script)
async def test_immediate_disconnect_leaves_no_state(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = Client(coordinator.hub, coordinator.job())
    await asyncio.sleep(0)

    client.task.cancel()
    await run_pending()

    assert [run.job_id for run in worker.runs] == worker.cancelled
    assert coordinator.hub.pool.jobs == {}


@scripted(run_script)
async def test_slot_stays_busy_without_cancellation(coordinator: Coordinator) -> None:
    worker = await coordinator.join(accepts=NO_CANCEL)
    client = await coordinator.request()
    await client.disconnect()
    waiting = await coordinator.request()
    assert len(worker.runs) == 1

    worker.emit(Completed(worker.runs[0].job_id, worker.runs[0].lease))
    await run_pending()
    worker.write("now you")
    worker.complete()
    await run_pending()

    assert waiting.text == "now you"


@scripted(run_script)
async def test_operator_can_cancel_open_jobs_only(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()

    assert coordinator.hub.cancel(client.job_id, "cancelled by an operator")
    await run_pending()

    assert isinstance(client.error, Cancelled)
    assert worker.cancelled == [client.job_id]
    assert not coordinator.hub.cancel(client.job_id, "again")


@scripted(run_script)
async def test_all_jobs_of_an_owner_can_be_cancelled(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    running = await coordinator.request(owner="al")
    waiting = await coordinator.request(owner="al", key="k")
    other = await coordinator.request(owner="bo")

    assert coordinator.hub.cancel_all_of("al", "the key was revoked") == 2
    await run_pending()
    worker.write("for bo")
    worker.complete()
    await run_pending()

    for client in (running, waiting):
        assert isinstance(client.error, Cancelled)
        assert str(client.error) == "the key was revoked"
    assert worker.cancelled == [running.job_id]
    assert other.text == "for bo"
    assert coordinator.hub.cancel_all_of("al", "again") == 0


@scripted(run_script)
async def test_a_job_that_is_not_accepted_yet_is_cancelled_with_its_owner(
    coordinator: Coordinator,
) -> None:
    hub = coordinator.hub
    await coordinator.join()
    async with hub.run_job(coordinator.job(owner="al"), early=True) as reader:
        assert hub.cancel_all_of("al", "the key was revoked") == 1
        with pytest.raises(Cancelled, match="the key was revoked"):
            await reader.outcome()


def test_disconnect_during_a_burst_leaks_no_slot() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2, accepts=NO_CANCEL)

        # During a commit, three clients submit: the third finds the queue
        # full, so the first two are leased.  At the same time the first
        # disconnects, and its worker cannot cancel.
        coordinator.store.writable.clear()
        await coordinator.join("another", "another model")
        clients = [Client(coordinator.hub, coordinator.job()) for _ in range(3)]
        await run_pending()
        clients[0].task.cancel()
        await run_pending()
        coordinator.store.writable.set()
        await run_pending()
        assert len(worker.runs) == 2
        for run in (0, 1):
            worker.complete(run=run)
        await run_pending()
        worker.complete()
        await run_pending()

        assert all(not each.leases for each in coordinator.hub.pool.workers.values())
        assert [client.outcome is not None for client in clients[1:]] == [True, True]

    run_script(script, queue_max=2)
