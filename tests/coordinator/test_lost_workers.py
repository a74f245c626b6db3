"""Losing a worker costs a client nothing that can be had from another one."""

import asyncio

import pytest

from coordinator.hubs import (
    CONTINUES,
    DEAF,
    NO_CANCEL,
    NOTHING,
    TOOL_CALL,
    Coordinator,
    ScriptedWorker,
    run_pending,
    run_script,
)
from shoal.domain.errors import TimedOut, WorkerLost
from shoal.domain.facts import LateResult
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Dismiss
from shoal.domain.work import Chat, Feature
from shoal.pool.lifecycle import JobState
from simulation.virtual import scripted


@pytest.mark.parametrize(
    ("features", "beginning"), [(CONTINUES, "Hello, "), (NOTHING, "")]
)
def test_other_worker_continues_after_a_loss(
    features: frozenset[Feature], beginning: str
) -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        first.write("Hello, ")
        await run_pending()
        second = await coordinator.join("b", features=features)

        first.port.on_disconnect("connection reset")
        await run_pending()
        assert second.runs[0].continues == beginning
        rest = "Hello, world"[len(beginning) :]
        second.write(*rest)
        second.complete()
        await run_pending()

        assert client.text == "Hello, world"
        assert client.outcome == Outcome("Hello, world")

    run_script(script)


@scripted(run_script)
async def test_different_answer_after_a_loss_is_an_error_and_cancelled(
    coordinator: Coordinator,
) -> None:
    first = await coordinator.join("a")
    client = await coordinator.request()
    first.write("Hello")
    await run_pending()
    first.port.on_disconnect("connection reset")
    second = await coordinator.join("b")

    second.write("Good day")
    await run_pending()

    assert isinstance(client.error, WorkerLost)
    assert client.text == "Hello"
    assert second.cancelled == [client.job_id]


@scripted(run_script)
async def test_shorter_answer_after_a_loss_is_an_error(
    coordinator: Coordinator,
) -> None:
    first = await coordinator.join("a")
    client = await coordinator.request()
    first.write("Hello")
    await run_pending()
    first.port.on_disconnect("connection reset")
    second = await coordinator.join("b")

    second.write("Hell")
    second.complete()
    await run_pending()

    assert isinstance(client.error, WorkerLost)
    assert client.outcome is None


@scripted(run_script)
async def test_lost_structured_answer_is_an_error(coordinator: Coordinator) -> None:
    first = await coordinator.join("a")
    client = await coordinator.request()
    first.write("Hm. ", TOOL_CALL)
    await run_pending()
    second = await coordinator.join("b", features=CONTINUES, accepts=NO_CANCEL)

    first.port.on_disconnect("connection reset")
    await run_pending()

    assert isinstance(client.error, WorkerLost)
    assert "more than text" in str(client.error)
    # It never got the job, so its slot is free although it cannot cancel.
    assert second.commands == []
    (in_pool,) = coordinator.hub.pool.workers.values()
    assert in_pool.free_slots == 1


def sampled(coordinator: Coordinator) -> Job:
    chat = Chat("m", ({"role": "user", "content": "hi"},), temperature=0.8)
    return Job(coordinator.hub.new_id(), chat)


@scripted(run_script)
async def test_sampled_answer_that_nobody_continues_ends_at_once(
    coordinator: Coordinator,
) -> None:
    first = await coordinator.join("a")
    async with coordinator.hub.run_job(sampled(coordinator)) as reader:
        await run_pending()
        first.write("Hello, ")
        assert await reader.read() == ["Hello, "]
        second = await coordinator.join("b")

        first.port.on_disconnect("connection reset")

        assert await reader.read() == []
        with pytest.raises(WorkerLost, match="no other worker can continue it"):
            await reader.outcome()
        assert second.commands == []


@scripted(run_script)
async def test_sampled_answer_waits_for_a_busy_worker_that_continues(
    coordinator: Coordinator,
) -> None:
    busy = await coordinator.join("busy", features=CONTINUES)
    other = await coordinator.request()
    first = await coordinator.join("a")
    async with coordinator.hub.run_job(sampled(coordinator)) as reader:
        await run_pending()
        first.write("Hello, ")
        assert await reader.read() == ["Hello, "]
        plain = await coordinator.join("plain")
        first.port.on_disconnect("connection reset")
        await run_pending()
        assert plain.commands == []

        busy.complete()
        await run_pending()

        assert other.outcome is not None
        assert busy.runs[-1].continues == "Hello, "
        busy.write("world")
        busy.complete()
        assert await reader.read() == ["world"]


@scripted(run_script)
async def test_lost_unread_answer_restarts(coordinator: Coordinator) -> None:
    first = await coordinator.join("a")
    async with coordinator.hub.run_job(coordinator.job()) as reader:
        whole = asyncio.create_task(reader.outcome())
        await run_pending()
        first.write("Hm. ", TOOL_CALL)
        await run_pending()
        second = await coordinator.join("b", features=CONTINUES)

        first.port.on_disconnect("connection reset")
        await run_pending()
        assert second.runs[0].continues == ""
        second.write("Something else.")
        second.complete()

        assert await whole == Outcome("Something else.")


@scripted(run_script)
async def test_structured_work_is_never_continued(coordinator: Coordinator) -> None:
    can = CONTINUES | {Feature.TOOLS}
    first = await coordinator.join("a", features=can)
    messages = ({"role": "user", "content": "hi"},)
    chat = Chat(
        "m",
        messages,
        temperature=0.0,
        options={"tools": [{"type": "function", "function": {"name": "f"}}]},
    )
    async with coordinator.hub.run_job(Job(coordinator.hub.new_id(), chat)) as reader:
        await run_pending()
        first.write("Let me see")
        assert await reader.read() == ["Let me see"]
        second = await coordinator.join("b", features=can)

        first.port.on_disconnect("connection reset")
        await run_pending()
        assert second.runs[0].continues == ""
        second.write("Let me see.")
        second.complete()

        assert await reader.read() == ["."]


@scripted(run_script)
async def test_job_that_loses_three_workers_is_given_up(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join("w0")
    client = await coordinator.request()

    for number in range(1, 4):
        worker.port.on_disconnect("killed")
        worker = await coordinator.join(f"w{number}")

    assert isinstance(client.error, WorkerLost)
    assert str(client.error) == "lost 3 workers, the last one: killed"
    assert worker.runs == []


@scripted(run_script)
async def test_newer_connection_replaces_the_older(coordinator: Coordinator) -> None:
    older = await coordinator.join("w")
    client = await coordinator.request()
    older.write("from the ")
    await run_pending()

    newer = await coordinator.join("w", features=CONTINUES)
    older.complete()  # it does not know yet
    older.port.on_disconnect("dismissed")
    await run_pending()
    assert client.outcome is None
    newer.write("newer")
    newer.complete()
    await run_pending()

    assert older.commands[-1] == Dismiss(
        "replaced by a newer connection", replaced=True
    )
    assert client.text == "from the newer"
    assert len(coordinator.hub.pool.workers) == 1


@scripted(run_script)
async def test_older_connection_without_dismissal_is_disconnected(
    coordinator: Coordinator,
) -> None:
    older = await coordinator.join("w", accepts=DEAF)

    await coordinator.join("w", accepts=DEAF)

    ((reason, _),) = older.disconnections
    assert reason == "replaced by a newer connection"


@scripted(run_script)
async def test_worker_that_joins_and_leaves_at_once_leaves_no_state(
    coordinator: Coordinator,
) -> None:
    for _ in range(5):
        member = ScriptedWorker(coordinator.hub, "w")
        member.port.on_disconnect("flapping")
    await run_pending()
    last = await coordinator.join("w")
    client = await coordinator.request()

    assert list(coordinator.hub.pool.workers) == ["wire:w"]
    assert [run.job_id for run in last.runs] == [client.job_id]


@scripted(run_script)
async def test_result_of_an_ended_lease_is_recorded_and_not_delivered(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(accepts=NO_CANCEL)
    limits = TimeLimits(first_output=5.0)
    client = await coordinator.request(limits=limits)
    await asyncio.sleep(6.0)
    assert isinstance(client.error, TimedOut)

    worker.write("too late")
    worker.complete()
    await run_pending()

    story = await coordinator.history(client.job_id)
    assert isinstance(story[-1], LateResult)
    assert client.text == ""
    stored = await coordinator.store.job(client.job_id)
    assert stored is not None
    assert (stored.state, stored.outcome) == (JobState.EXPIRED, None)
