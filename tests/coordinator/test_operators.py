"""Operators' orders about workers, as the hub carries them out."""

import logging
from collections.abc import Awaitable, Callable

import pytest

from coordinator.hubs import (
    CONTINUES,
    Coordinator,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.domain.errors import NoWorker
from shoal.domain.facts import JobRequeued, WorkerDismissed
from shoal.domain.job import TimeLimits
from shoal.domain.vocabulary import Dismiss, RunJob
from shoal.domain.worker import Suspension
from shoal.pool.inputs import (
    HubInput,
    WorkerApproval,
    WorkerResumption,
    WorkerSuspension,
)
from simulation import virtual
from simulation.virtual import scripted

_, PAUSED, DRAINING, REMOVED = Suspension
KEY = "8a" * 32
DEAF: frozenset[type] = frozenset({RunJob})


async def order(coordinator: Coordinator, how: Suspension, name: str = "w") -> None:
    await process(coordinator, WorkerSuspension(f"wire:{name}", how, "al"))


async def process(coordinator: Coordinator, hub_input: HubInput) -> None:
    await coordinator.hub.process(hub_input)
    await run_pending()


@scripted(run_script)
async def test_paused_worker_keeps_its_job_and_gets_none(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    first = await coordinator.request()

    await order(coordinator, PAUSED)
    second = await coordinator.request()
    worker.write("hi", run=0)
    worker.complete(run=0)
    await run_pending()

    assert first.text == "hi"
    assert len(worker.runs) == 1
    assert worker.commands == worker.runs
    await process(coordinator, WorkerResumption("wire:w", "al"))
    worker.complete()
    await run_pending()
    assert second.outcome is not None


@scripted(run_script)
async def test_job_that_waits_for_a_paused_worker_is_told_why(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    await order(coordinator, PAUSED)

    client = await coordinator.request(limits=TimeLimits(queue=0.01))

    assert isinstance(client.error, NoWorker)
    assert "paused by an operator (1 worker)" in str(client.error)


@scripted(run_script)
async def test_drained_worker_stays_and_gets_jobs_after_a_resume(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    first = await coordinator.request()

    await order(coordinator, DRAINING)
    worker.complete(run=0)
    second = await coordinator.request()

    assert first.outcome is not None
    assert worker.commands == worker.runs
    assert len(worker.runs) == 1
    assert not worker.disconnections
    await process(coordinator, WorkerResumption("wire:w", "al"))
    worker.complete()
    await run_pending()
    assert second.outcome is not None


@pytest.mark.parametrize("accepts", [None, DEAF])
def test_removed_worker_is_told_why_where_its_wire_can_say_so(
    accepts: frozenset[type] | None,
) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await (
            coordinator.join() if accepts is None else coordinator.join(accepts=accepts)
        )

        await order(coordinator, REMOVED)

        if accepts is None:
            (dismissal,) = worker.commands
            assert isinstance(dismissal, Dismiss)
            assert dismissal.reason.startswith("removed by an operator")
            assert not dismissal.replaced
        else:
            ((reason, _),) = worker.disconnections
            assert reason.startswith("removed by an operator")
        worker.port.on_disconnect("left")
        await run_pending()
        assert not coordinator.hub.pool.workers

    run_script(script)


@scripted(run_script)
async def test_answer_of_a_removed_worker_continues_at_another(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("from the ")
    await run_pending()
    other = await coordinator.join("other", features=CONTINUES)

    await order(coordinator, REMOVED)

    assert worker.cancelled == [client.job_id]
    assert isinstance(worker.commands[-1], Dismiss)
    worker.write("late")  # on the way already
    other.write("other")
    other.complete()
    await run_pending()
    assert client.text == "from the other"
    history = await coordinator.history(client.job_id)
    (requeued,) = [each for each in history if isinstance(each, JobRequeued)]
    assert requeued.handed_over


@scripted(run_script)
async def test_drain_hands_jobs_over_at_its_limit(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    await process(coordinator, WorkerSuspension("wire:w", DRAINING, "al", 1.0))
    other = await coordinator.join("other")
    assert not other.runs

    for _ in range(20):
        await run_pending()

    assert worker.cancelled == [client.job_id]
    assert not any(isinstance(each, Dismiss) for each in worker.commands)
    other.complete()
    await run_pending()
    assert client.outcome is not None


@scripted(run_script)
async def test_removed_worker_that_comes_back_is_dismissed_until_it_is_resumed(
    coordinator: Coordinator,
) -> None:
    facts: list[object] = []
    coordinator.hub.subscribe(facts.extend)
    await order(coordinator, REMOVED)

    worker = await coordinator.join()

    assert [type(each) for each in worker.commands] == [Dismiss]
    assert WorkerDismissed in map(type, facts)
    worker.port.on_disconnect("left")
    await process(coordinator, WorkerResumption("wire:w", "al"))
    again = await coordinator.join()
    await coordinator.request()
    assert len(again.runs) == 1


Script = Callable[[Coordinator], Awaitable[None]]


def test_orders_survive_a_restart() -> None:
    async def before(coordinator: Coordinator) -> None:
        await order(coordinator, PAUSED)
        await order(coordinator, REMOVED, "other")
        await order(coordinator, PAUSED, "third")
        await process(coordinator, WorkerResumption("wire:third", "al"))

    async def after(coordinator: Coordinator) -> None:
        paused = await coordinator.join()
        removed = await coordinator.join("other")
        await coordinator.request()

        assert not paused.runs
        assert [type(each) for each in removed.commands] == [Dismiss]
        third = await coordinator.join("third")
        assert len(third.runs) == 1

    async def scenario() -> None:
        store = SlowStore()
        await store.open()
        for script in (before, after):
            async with running_coordinator(store) as coordinator:
                await script(coordinator)
        await store.close()

    virtual.run(scenario())


def test_pending_worker_is_logged_and_gets_the_job_once_it_is_approved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running_coordinator(approve_nodes=True) as coordinator:
            worker = await coordinator.join()
            client = await coordinator.request()
            assert not worker.runs

            await process(coordinator, WorkerApproval("wire:w", "al"))

            worker.complete()
            await run_pending()
            assert client.outcome is not None

    with caplog.at_level(logging.INFO, "shoal.coordinator"):
        virtual.run(scenario())

    assert "pending worker='wire:w': see `shoal nodes approve --help`" in caplog.text


def test_approvals_survive_a_restart() -> None:
    async def before(coordinator: Coordinator) -> None:
        await coordinator.join(public_key=KEY, proven=True)
        await process(coordinator, WorkerApproval("wire:w", "al"))
        await process(coordinator, WorkerApproval("wire:later", "al"))
        await coordinator.join("removed")
        await process(coordinator, WorkerApproval("wire:removed", "al"))
        await order(coordinator, REMOVED, "removed")
        await process(coordinator, WorkerResumption("wire:removed", "al"))

    async def after(coordinator: Coordinator) -> None:
        await coordinator.join("renamed", public_key=KEY, proven=True)
        await coordinator.join("w")
        await coordinator.join("later")
        await coordinator.join("removed")
        workers = coordinator.hub.pool.workers.values()
        assert [each.id for each in workers if each.suspension is None] == [
            "wire:renamed",
            "wire:later",
        ]

    async def scenario() -> None:
        store = SlowStore()
        await store.open()
        for script in (before, after, after):
            async with running_coordinator(store, approve_nodes=True) as coordinator:
                await script(coordinator)
        await store.close()

    virtual.run(scenario())
