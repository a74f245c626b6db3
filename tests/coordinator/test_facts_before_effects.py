"""Facts are stored before their effects, and nothing goes on without a store."""

import asyncio

import pytest

from coordinator.hubs import Coordinator, ScriptedWorker, kinds, run_pending, run_script
from shoal.coordinator.bookkeeping import RECORD_WITHIN
from shoal.domain.errors import StoreError
from shoal.domain.facts import JobStarted
from shoal.domain.outcome import Outcome
from shoal.pool.inputs import AccountTopUp
from simulation.virtual import scripted


@scripted(run_script)
async def test_job_is_accepted_and_leased_after_it_is_stored(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    coordinator.store.writable.clear()
    client = await coordinator.request()
    await asyncio.sleep(20.0)
    assert not client.accepted
    assert worker.commands == []

    coordinator.store.writable.set()
    await run_pending()

    assert client.accepted
    assert len(worker.runs) == 1


@scripted(run_script)
async def test_end_is_not_delivered_before_it_is_stored(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("all of it")
    await run_pending()
    coordinator.store.writable.clear()

    worker.complete()
    await asyncio.sleep(20.0)
    assert client.text == "all of it"
    assert client.outcome is None
    coordinator.store.writable.set()
    await run_pending()

    assert client.outcome == Outcome("all of it")


@scripted(run_script)
async def test_text_does_not_wait_for_the_store(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    coordinator.store.writable.clear()

    worker.write("a", "b", "c")
    await run_pending()

    assert client.text == "abc"
    coordinator.store.writable.set()


@scripted(run_script)
async def test_start_of_a_job_is_stored_soon(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("a")
    await run_pending()
    before = kinds(await coordinator.history(client.job_id))

    await asyncio.sleep(2 * RECORD_WITHIN)

    assert JobStarted not in before
    assert kinds(await coordinator.history(client.job_id)) == [*before, JobStarted]


@scripted(run_script)
async def test_decision_for_a_lost_worker_applies_to_its_successor(
    coordinator: Coordinator,
) -> None:
    older = await coordinator.join("w")
    coordinator.store.writable.clear()
    client = await coordinator.request()  # its lease is being stored
    older.port.on_disconnect("connection reset")
    newer = ScriptedWorker(coordinator.hub, "w")

    coordinator.store.writable.set()
    await run_pending()
    newer.write("here")
    newer.complete()
    await run_pending()

    assert client.text == "here"
    assert [run.lease for run in newer.runs] == [2]


# A store that fails.


@scripted(run_script)
async def test_store_failure_ends_every_job_with_its_error(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    streaming = await coordinator.request()
    worker.write("some")
    await run_pending()
    waiting = await coordinator.request()
    coordinator.store.full = True

    submitting = await coordinator.request()
    await run_pending()

    for client in (streaming, waiting, submitting):
        assert isinstance(client.error, StoreError), client.error
    assert not submitting.accepted
    assert len(worker.runs) == 1
    assert coordinator.task.done()
    assert coordinator.hub.unavailable_reason == "shoal.db: disk I/O error"
    assert isinstance((await coordinator.request()).error, StoreError)


@scripted(run_script)
async def test_disconnect_before_a_store_failure_affects_no_others(
    coordinator: Coordinator,
) -> None:
    coordinator.store.writable.clear()
    leaving = asyncio.create_task(
        coordinator.hub.process(AccountTopUp("a", 1, "admin"))
    )
    staying = asyncio.create_task(
        coordinator.hub.process(AccountTopUp("b", 1, "admin"))
    )
    await run_pending()
    leaving.cancel()
    coordinator.store.full = True

    coordinator.store.writable.set()
    await run_pending()

    with pytest.raises(StoreError):
        await staying
    assert leaving.cancelled()
    assert coordinator.task.done()
    assert coordinator.hub.unavailable_reason == "shoal.db: disk I/O error"


@scripted(run_script)
async def test_events_after_a_store_failure_are_harmless(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    await coordinator.request()
    coordinator.store.full = True
    await coordinator.request()

    worker.write("text")
    worker.complete()
    worker.port.on_disconnect("connection reset")
    late = await coordinator.join("other")
    await asyncio.sleep(10_000.0)

    assert late.commands == []


@scripted(run_script)
async def test_coordinator_stops_after_a_store_failure(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    await coordinator.request()
    coordinator.store.full = True
    await coordinator.request()

    async with asyncio.timeout(1.0):
        await coordinator.hub.drain()
