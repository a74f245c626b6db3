"""Asking twice under one idempotency key does the work once."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    Client,
    Coordinator,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator.answer_reader import UNREAD_CEILING
from shoal.coordinator.open_answers import check_same_request
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
from shoal.domain.job import Job, JobTerms, TimeLimits, Webhook
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Failed
from shoal.domain.work import JSON, Chat
from shoal.store.sqlite.database import SqliteStore
from simulation.virtual import in_virtual_time, scripted


async def submissions(coordinator: Coordinator) -> int:
    """Count all accepted jobs."""
    jobs = [await coordinator.history(JobId(f"job{number}")) for number in range(20)]
    return sum(isinstance(fact, JobSubmitted) for story in jobs for fact in story)


@scripted(run_script)
async def test_second_client_attaches_to_the_running_job(
    coordinator: Coordinator,
) -> None:
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


@scripted(run_script)
async def test_completed_job_is_answered_again_without_a_worker(
    coordinator: Coordinator,
) -> None:
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


@pytest.mark.parametrize("done", [True, False])
@in_virtual_time
async def test_key_survives_a_restart(done: bool, store: SlowStore) -> None:
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


@scripted(run_script)
async def test_concurrent_clients_create_one_job(coordinator: Coordinator) -> None:
    worker = await coordinator.join(slots=9)

    clients = [Client(coordinator.hub, coordinator.job(key="k")) for _ in range(5)]
    await run_pending()
    worker.write("one for all")
    worker.complete()
    await run_pending()

    assert len({client.job_id for client in clients}) == 1
    assert [client.text for client in clients] == ["one for all"] * 5
    assert len(worker.runs) == 1


def test_concurrent_clients_are_rejected_together() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()

        clients = [Client(coordinator.hub, coordinator.job(key="k")) for _ in range(3)]
        await run_pending()

        assert [type(client.error) for client in clients] == [QueueFull] * 3
        assert coordinator.hub.pool.jobs == {}

    run_script(script, queue_max=0)


def test_request_whose_tools_were_left_out_is_the_same_with_them() -> None:
    tools: JSON = [{"type": "function", "function": {"name": "f"}}]
    asked = Job(
        JobId("a"), Chat("m", (), options={"tools": tools}), idempotency_key="k"
    )
    relieved = replace(asked, work=Chat("m", ()))

    with pytest.raises(KeyReused):
        check_same_request(asked, relieved)
    check_same_request(asked, replace(relieved, terms=JobTerms(left_out=("tools",))))


def test_request_with_another_webhook_is_another() -> None:
    asked = Job(JobId("a"), Chat("m", ()), idempotency_key="k")
    hook = Webhook("https://example.org/hook", "0123456789abcdef")

    with pytest.raises(KeyReused):
        check_same_request(asked, replace(asked, terms=JobTerms(webhook=hook)))


def test_request_with_another_payment_is_another() -> None:
    asked = Job(
        JobId("a"),
        Chat("m", ()),
        idempotency_key="k",
        terms=JobTerms(payment_ref="tx1"),
    )
    other = replace(asked, terms=JobTerms(payment_ref="tx2"))
    unnamed = replace(asked, terms=JobTerms())
    settled = replace(asked, terms=JobTerms(payment_ref="0x1", settled=True))

    check_same_request(replace(asked, id=JobId("b")), asked)
    check_same_request(asked, settled)
    for one in (other, unnamed):
        with pytest.raises(KeyReused):
            check_same_request(one, asked)


@pytest.mark.parametrize("when", ["open", "done", "restarted"])
@in_virtual_time
async def test_key_identifies_one_request_only(when: str, store: SlowStore) -> None:
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


@scripted(run_script)
async def test_keys_are_scoped_to_their_owner(coordinator: Coordinator) -> None:
    worker = await coordinator.join(slots=2)

    al = await coordinator.request(key="k", owner="al", prompt="one")
    bo = await coordinator.request(key="k", owner="bo", prompt="other")

    assert bo.error is None
    assert al.job_id != bo.job_id
    assert len(worker.runs) == 2


@scripted(run_script)
async def test_failed_job_can_be_requested_again(coordinator: Coordinator) -> None:
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


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_unfinished_job_can_be_requested_again(end: str) -> None:
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


@scripted(run_script)
async def test_rejected_request_frees_its_key(coordinator: Coordinator) -> None:
    refused = await coordinator.request(key="k")
    assert isinstance(refused.error, UnknownModel)

    await coordinator.join()
    again = await coordinator.request(key="k", prompt="another request even")

    assert again.accepted


@pytest.mark.parametrize("when", ["unaccepted", "waiting", "streaming"])
def test_job_continues_when_its_client_disconnects(when: str) -> None:
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


@scripted(run_script)
async def test_other_client_continues_when_one_disconnects(
    coordinator: Coordinator,
) -> None:
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


@scripted(run_script)
async def test_keyed_job_continues_without_a_fast_reader(
    coordinator: Coordinator,
) -> None:
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


@scripted(run_script)
async def test_store_failure_reaches_the_client(coordinator: Coordinator) -> None:
    await coordinator.join()
    coordinator.store.full = True

    clients = [
        await coordinator.request(key="k"),
        await coordinator.request(key="k"),
    ]

    assert all(isinstance(client.error, StoreError) for client in clients)


async def test_request_from_the_store_compares_equal(tmp_path: Path) -> None:
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


# Restarts with several open jobs are in tests/simulation.


@in_virtual_time
async def test_queue_time_counts_from_the_job(
    store: SlowStore,
) -> None:
    limits = TimeLimits(queue=10.0)
    async with running_coordinator(store) as coordinator:
        await coordinator.join(slots=0)
        await coordinator.request(key="k", limits=limits)
    async with running_coordinator(store) as coordinator:
        await asyncio.sleep(RESTART_GRACE)
        late = await coordinator.request(key="k", limits=limits)
        await asyncio.sleep(11.0)

        assert isinstance(late.error, NoWorker)
