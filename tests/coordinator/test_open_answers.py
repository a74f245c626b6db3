"""Asking twice under one idempotency key does the work once."""

import asyncio
from pathlib import Path

import pytest

from coordinator.hubs import (
    Client,
    Coordinator,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator.answer_reader import UNREAD_CEILING
from shoal.coordinator.recovery import RESTART_GRACE
from shoal.domain.errors import (
    Cancelled,
    JobError,
    KeyReused,
    NoWorker,
    QueueFull,
    StoreError,
    UnknownModel,
)
from shoal.domain.facts import JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Failed
from shoal.domain.work import JSON, Chat
from shoal.store.sqlite.store import SqliteStore
from simulation import virtual


async def submissions(coordinator: Coordinator) -> int:
    """Count the jobs that were ever accepted."""
    jobs = [await coordinator.history(JobId(f"job{number}")) for number in range(20)]
    return sum(isinstance(fact, JobSubmitted) for story in jobs for fact in story)


def test_second_asker_is_given_the_running_job_with_all_its_text() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        first = await coordinator.request(key="k")
        worker.write("Hello, ")
        await run_pending()

        second = await coordinator.request(key="k")
        await run_pending()
        assert second.text == "Hello, "
        worker.write("world")
        worker.complete()
        await run_pending()

        assert first.job_id == second.job_id
        assert first.text == second.text == "Hello, world"
        assert first.outcome == second.outcome == Outcome("Hello, world")
        assert len(worker.runs) == 1

    run_script(script)


def test_job_that_was_done_is_answered_again_without_a_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        first = await coordinator.request(key="k")
        worker.write("once")
        worker.complete()
        await run_pending()
        worker.port.on_disconnect("switched off")
        await run_pending()

        second = await coordinator.request(key="k")

        assert (second.text, second.outcome) == ("once", Outcome("once"))
        assert second.job_id == first.job_id
        assert await submissions(coordinator) == 1

    run_script(script)


@pytest.mark.parametrize("done", [True, False])
def test_key_is_known_after_a_restart(done: bool, store: SlowStore) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            worker = await coordinator.join()
            first = await coordinator.request(key="k")
            worker.write("half" if not done else "whole")
            if done:
                worker.complete()
            await run_pending()

        async with running_coordinator(store) as coordinator:
            second = await coordinator.request(key="k")
            if not done:
                worker = await coordinator.join()
                worker.write("whole")
                worker.complete()
                await run_pending()

            assert second.outcome == Outcome("whole")
            assert second.job_id == first.job_id
            assert await submissions(coordinator) == 1

    virtual.run(scenario())


def test_two_askers_at_the_same_moment_make_one_job() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=9)

        askers = [Client(coordinator.hub, coordinator.job(key="k")) for _ in range(5)]
        await run_pending()
        worker.write("one for all")
        worker.complete()
        await run_pending()

        assert len({asker.job_id for asker in askers}) == 1
        assert [asker.text for asker in askers] == ["one for all"] * 5
        assert len(worker.runs) == 1

    run_script(script)


def test_askers_at_the_same_moment_are_refused_together() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()

        askers = [Client(coordinator.hub, coordinator.job(key="k")) for _ in range(3)]
        await run_pending()

        assert [type(asker.error) for asker in askers] == [QueueFull] * 3
        assert coordinator.hub.pool.jobs == {}

    run_script(script, queue_max=0)


@pytest.mark.parametrize("when", ["open", "done", "restarted"])
def test_key_stands_for_one_request_only(when: str, store: SlowStore) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            worker = await coordinator.join()
            await coordinator.request(key="k", prompt="one")
            if when != "open":
                worker.complete()
                await run_pending()
            if when != "restarted":
                other = await coordinator.request(key="k", prompt="other")
        if when == "restarted":
            async with running_coordinator(store) as coordinator:
                other = await coordinator.request(key="k", prompt="other")

        assert isinstance(other.error, KeyReused)
        assert "send a new key with a new request" in str(other.error)

    virtual.run(scenario())


def test_keys_belong_to_their_owners() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2)

        al = await coordinator.request(key="k", owner="al", prompt="one")
        bo = await coordinator.request(key="k", owner="bo", prompt="other")

        assert bo.error is None
        assert al.job_id != bo.job_id
        assert len(worker.runs) == 2

    run_script(script)


def test_job_that_failed_may_be_asked_for_again() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        first = await coordinator.request(key="k")
        run = worker.runs[0]
        worker.emit(Failed(run.job_id, run.lease, "out of memory"))
        await run_pending()
        assert isinstance(first.error, JobError)

        second = await coordinator.request(key="k")
        worker.write("better")
        worker.complete()
        await run_pending()
        third = await coordinator.request(key="k")

        assert second.outcome == third.outcome == Outcome("better")
        assert second.job_id == third.job_id != first.job_id

    run_script(script)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_job_that_came_to_nothing_may_be_asked_for_again(end: str) -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join(slots=0)
        first = await coordinator.request(key="k", limits=TimeLimits(queue=5.0))
        if end == "cancelled":
            coordinator.hub.cancel(first.job_id, "an operator")
        await asyncio.sleep(6.0)
        assert isinstance(first.error, Cancelled if end == "cancelled" else NoWorker)

        second = await coordinator.request(key="k")

        assert second.accepted
        assert second.job_id != first.job_id

    run_script(script)


def test_refused_request_leaves_its_key_free() -> None:
    async def script(coordinator: Coordinator) -> None:
        refused = await coordinator.request(key="k")
        assert isinstance(refused.error, UnknownModel)

        await coordinator.join()
        again = await coordinator.request(key="k", prompt="another request even")

        assert again.accepted

    run_script(script)


@pytest.mark.parametrize("when", ["unaccepted", "waiting", "streaming"])
def test_job_goes_on_when_its_client_leaves(when: str) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=0 if when == "waiting" else 1)
        if when == "unaccepted":
            coordinator.store.writable.clear()
        client = await coordinator.request(key="k")
        if when == "streaming":
            worker.write("begun, ")
            await run_pending()

        await client.disconnect()
        coordinator.store.writable.set()
        if when == "waiting":
            worker = await coordinator.join("other")
        await run_pending()
        worker.write("done")
        worker.complete()
        await run_pending()
        again = await coordinator.request(key="k")

        begun = "begun, " if when == "streaming" else ""
        assert again.outcome == Outcome(begun + "done")
        assert worker.cancelled == []

    run_script(script)


def test_one_of_two_clients_leaves_and_the_other_reads_on() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        first, second = (
            await coordinator.request(key="k"),
            await coordinator.request(key="k"),
        )

        await first.disconnect()
        worker.write("still here")
        worker.complete()
        await run_pending()

        assert second.outcome == Outcome("still here")

    run_script(script)


def test_job_goes_on_when_nobody_reads_it_fast_enough() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        async with coordinator.hub.run_job(coordinator.job(key="k")) as reader:
            await run_pending()
            for _ in range(9):
                worker.write("x" * (UNREAD_CEILING // 8))
            await run_pending()
            with pytest.raises(Cancelled, match="reads too slowly"):
                await reader.outcome()
        worker.complete()
        await run_pending()

        again = await coordinator.request(key="k")

        assert len(again.text) == 9 * (UNREAD_CEILING // 8)
        assert worker.cancelled == []

    run_script(script)


def test_asker_is_told_of_a_store_that_fails() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        coordinator.store.full = True

        askers = [
            await coordinator.request(key="k"),
            await coordinator.request(key="k"),
        ]

        assert all(isinstance(asker.error, StoreError) for asker in askers)

    run_script(script)


async def test_same_request_from_the_disk_is_the_same(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    nested: JSON = [{"type": "text", "text": "é"}, {"n": [1, 2.5, None, True]}]
    chat = Chat("m", ({"role": "user", "content": nested},), 5, 1, {"stop": ["."]})
    job = Job(JobId("j"), chat, owner="al", idempotency_key="k")

    await store.append([JobSubmitted(job)], 1.0)
    stored = await store.by_idempotency_key("al", "k")
    await store.close()

    assert stored is not None
    assert stored.job.work == chat


# Restarts with more than one job under way are in tests/simulation.


def test_time_in_the_queue_is_that_of_the_job_and_not_of_the_asker(
    store: SlowStore,
) -> None:
    async def scenario() -> None:
        limits = TimeLimits(queue=10.0)
        async with running_coordinator(store) as coordinator:
            await coordinator.join(slots=0)
            await coordinator.request(key="k", limits=limits)
        async with running_coordinator(store) as coordinator:
            await asyncio.sleep(RESTART_GRACE)
            late = await coordinator.request(key="k", limits=limits)
            await asyncio.sleep(11.0)

            assert isinstance(late.error, NoWorker)

    virtual.run(scenario())
