"""A store that cannot be written for a while: nothing is lost, and nothing accepted."""

import asyncio

import pytest

from coordinator.hubs import (
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator import mailbox
from shoal.coordinator.hub import NOT_ACCEPTED, QUIET_MAX
from shoal.coordinator.store_health import RETRY_MAX
from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    JobCancelled,
    JobCompleted,
    JobLeased,
    JobRequeued,
    JobSubmitted,
)
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import Completed
from shoal.pool.inputs import AccountTopUp
from shoal.protocols.seam.session import CloseCode
from shoal.store.port import JobFilter
from simulation.virtual import in_virtual_time, scripted


async def fill(coordinator: Coordinator) -> None:
    """Let the next write fail, and make one."""
    coordinator.store.no_space = True
    await coordinator.join("the last straw", "another model")
    assert coordinator.hub.unavailable_reason == "disk is full"


async def heal(coordinator: Coordinator) -> None:
    coordinator.store.no_space = False
    await asyncio.sleep(RETRY_MAX + 1.0)
    assert coordinator.hub.unavailable_reason is None


def refused(client: Client) -> bool:
    error = client.error
    return isinstance(error, StoreError) and error.temporary and not client.accepted


@scripted(run_script)
async def test_new_jobs_are_refused_until_there_is_space(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    await fill(coordinator)

    clients = [await coordinator.request(key="k") for _ in range(3)]
    assert all(map(refused, clients))
    await heal(coordinator)
    assert (await coordinator.store.recent(JobFilter(), 10)).jobs == []
    again = await coordinator.request(key="k")
    worker.write("text")
    worker.complete()
    await run_pending()

    assert again.text == "text"
    assert len(worker.runs) == 1


@scripted(run_script)
async def test_the_job_that_could_not_be_stored_is_refused_and_cancelled(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    coordinator.store.no_space = True

    first = await coordinator.request(key="k")
    second = await coordinator.request(key="k")
    assert refused(first)
    assert refused(second)
    assert worker.runs == []
    await heal(coordinator)

    (job,) = (await coordinator.store.recent(JobFilter(), 10)).jobs
    submitted, leased, cancelled = await coordinator.history(job.id)
    assert isinstance(submitted, JobSubmitted)
    assert isinstance(leased, JobLeased)
    assert cancelled == JobCancelled(job.id, NOT_ACCEPTED)
    assert worker.cancelled == [job.id]
    assert not coordinator.hub.pool.jobs
    again = await coordinator.request(key="k")
    worker.complete()
    await run_pending()
    assert again.outcome is not None


@scripted(run_script)
async def test_a_result_waits_for_space_and_reaches_its_client(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    await fill(coordinator)

    worker.write("so", "me ", "text")
    worker.complete()
    await asyncio.sleep(5.0)
    assert client.text == "some text"
    assert client.outcome is None
    await heal(coordinator)

    assert client.outcome is not None
    assert client.outcome.text == "some text"
    *_, completed = await coordinator.history(client.job_id)
    assert isinstance(completed, JobCompleted)
    assert len(await coordinator.store.ledger.receipts_of(client.job_id)) == 1
    assert not coordinator.hub.pool.jobs


@in_virtual_time
async def test_a_job_whose_result_a_stop_cannot_store_runs_again(
    store: SlowStore,
) -> None:
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        client = await coordinator.request()
        await fill(coordinator)
        worker.write("lost")
        worker.complete()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await coordinator.hub.drain()
        assert client.outcome is None
    store.no_space = False

    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        worker.write("anew")
        worker.complete()
        await run_pending()

        assert [run.job_id for run in worker.runs] == [client.job_id]
        history = await coordinator.history(client.job_id)
        assert sum(isinstance(fact, JobCompleted) for fact in history) == 1
        assert len(await store.ledger.receipts_of(client.job_id)) == 1


@scripted(run_script)
async def test_a_quiet_client_is_sent_away_and_its_result_kept(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join("w", slots=2)
    quiet = await coordinator.request(key="k")
    worker.write("text")
    streaming = await coordinator.request()
    await fill(coordinator)
    worker.complete(run=0)

    for _ in range(round(2 * QUIET_MAX)):
        await asyncio.sleep(1.0)
        worker.write(".", run=1)
    assert isinstance(quiet.error, StoreError)
    assert streaming.error is None
    worker.complete()
    await heal(coordinator)

    assert streaming.outcome is not None
    again = await coordinator.request(key="k")
    assert again.text == "text"
    assert len(worker.runs) == 2


@scripted(run_script)
async def test_a_worker_that_is_lost_meanwhile_is_replaced(
    coordinator: Coordinator,
) -> None:
    lost = await coordinator.join("lost")
    client = await coordinator.request()
    await fill(coordinator)

    lost.port.on_disconnect("connection reset")
    other = await coordinator.join("other")
    assert other.runs == []
    await heal(coordinator)
    other.write("text")
    other.complete()
    await run_pending()

    assert client.text == "text"
    history = await coordinator.history(client.job_id)
    assert sum(isinstance(fact, JobRequeued) for fact in history) == 1


@scripted(run_script)
async def test_an_order_has_no_effect_unless_it_was_decided_before(
    coordinator: Coordinator,
) -> None:
    hub = coordinator.hub
    coordinator.store.no_space = True
    decided = asyncio.create_task(hub.process(AccountTopUp("user:a", 1, "admin")))
    await run_pending()

    with pytest.raises(StoreError, match="full"):
        await hub.process(AccountTopUp("user:a", 10, "admin"))
    with pytest.raises(StoreError, match="full"):
        await hub.cancel_now(JobId("none"), "operator")
    assert not decided.done()
    await heal(coordinator)

    await decided
    assert hub.books.balance("user:a") == 1


@scripted(run_script)
async def test_an_order_that_waits_for_its_batch_is_refused(
    coordinator: Coordinator,
) -> None:
    hub, store = coordinator.hub, coordinator.store
    store.writable.clear()
    joining = await coordinator.join()
    waiting = asyncio.create_task(hub.process(AccountTopUp("user:a", 1, "admin")))
    submitting = await coordinator.request()
    await run_pending()
    store.no_space = True

    store.writable.set()
    await run_pending()

    with pytest.raises(StoreError, match="full"):
        await waiting
    assert refused(submitting)
    await heal(coordinator)
    assert hub.books.balance("user:a") == 0
    assert joining.runs == []


def test_a_worker_that_sends_without_end_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "HELD_PER_WORKER_MAX", 10)

    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        await coordinator.request()
        await fill(coordinator)

        run = worker.runs[0]
        worker.emit(*[Completed(run.job_id, run.lease)] * 20)

        assert {code for _, code in worker.disconnections} == {
            CloseCode.TRY_AGAIN_LATER
        }
        worker.port.on_disconnect("closed here")
        await heal(coordinator)
        assert [*coordinator.hub.pool.workers] == ["wire:the last straw"]
        assert not coordinator.hub.pool.jobs

    run_script(script)


def test_workers_that_come_and_go_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "HELD_MAX", 10)

    async def script(coordinator: Coordinator) -> None:
        await fill(coordinator)

        for number in range(20):
            worker = ScriptedWorker(coordinator.hub, f"w{number}")
            worker.port.on_disconnect("connection reset")

        assert worker.disconnections
        await heal(coordinator)
        assert [*coordinator.hub.pool.workers] == ["wire:the last straw"]

    run_script(script)


@scripted(run_script)
async def test_a_store_that_turns_out_to_be_damaged_ends_everything(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    client = await coordinator.request()
    await fill(coordinator)

    coordinator.store.full = True
    await asyncio.sleep(RETRY_MAX)

    assert isinstance(client.error, StoreError)
    assert not client.error.temporary
    assert coordinator.hub.store_health.is_broken
    assert coordinator.task.done()
