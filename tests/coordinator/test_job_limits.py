"""Limits of the queue, of time, and of what a client leaves unread."""

import asyncio

import pytest

from coordinator.hubs import (
    CONTINUES,
    SHORT_LIMITS,
    Client,
    Coordinator,
    run_pending,
    run_script,
)
from shoal.coordinator.answer_reader import UNREAD_CEILING
from shoal.domain.errors import (
    Cancelled,
    NoFirstOutput,
    NoWorker,
    OutputStalled,
    QueueFull,
    TookTooLong,
)
from shoal.domain.vocabulary import AnswerChunk
from simulation.virtual import scripted


def test_burst_beyond_slots_and_queue_is_rejected() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2)

        clients = [Client(coordinator.hub, coordinator.job()) for _ in range(7)]
        await run_pending()

        refused = [isinstance(client.error, QueueFull) for client in clients]
        assert refused == [False] * 5 + [True] * 2
        assert len(worker.runs) == 2
        assert len(await coordinator.store.open_jobs()) == 5
        worker.complete(run=0)
        await run_pending()
        assert (await coordinator.request()).accepted

    run_script(script, queue_max=3)


def test_rejected_jobs_leave_no_state() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        for _ in range(3):
            await coordinator.request()

        refused = await coordinator.request()
        await run_pending()

        assert isinstance(refused.error, QueueFull)
        assert str(refused.error) == "2 jobs are waiting already"
        assert (
            len(await coordinator.store.open_jobs())
            == len(coordinator.hub.pool.jobs)
            == 3
        )

    run_script(script, queue_max=2)


@scripted(run_script)
async def test_expired_job_lists_the_reasons(coordinator: Coordinator) -> None:
    await coordinator.join()
    await coordinator.request()
    client = await coordinator.request(limits=SHORT_LIMITS)
    await asyncio.sleep(9.0)
    assert client.error is None

    await asyncio.sleep(2.0)

    assert isinstance(client.error, NoWorker)
    assert "1 worker has it but is full" in str(client.error)


@scripted(run_script)
async def test_worker_without_first_output_is_cancelled(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request(limits=SHORT_LIMITS)
    await asyncio.sleep(19.0)
    assert client.error is None

    await asyncio.sleep(2.0)

    assert isinstance(client.error, NoFirstOutput)
    assert worker.cancelled == [client.job_id]


@scripted(run_script)
async def test_silence_is_limited_and_each_text_resets_it(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request(limits=SHORT_LIMITS)
    for _ in range(4):
        worker.write("x")
        await asyncio.sleep(4.5)
    assert client.error is None

    await asyncio.sleep(1.0)

    assert isinstance(client.error, OutputStalled)
    assert "waiting for more output" in str(client.error)


@scripted(run_script)
async def test_endless_answer_is_cut_at_the_total_limit(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request(limits=SHORT_LIMITS)
    for _ in range(61):
        worker.write("x")
        await asyncio.sleep(1.0)

    assert isinstance(client.error, TookTooLong)
    assert "running in all" in str(client.error)
    assert worker.cancelled == [client.job_id]


@scripted(run_script)
async def test_silence_limit_restarts_for_the_next_worker(
    coordinator: Coordinator,
) -> None:
    first = await coordinator.join("a")
    client = await coordinator.request(limits=SHORT_LIMITS)
    first.write("Hello, ")
    second = await coordinator.join("b", features=CONTINUES)
    await asyncio.sleep(4.5)
    coordinator.store.writable.clear()
    first.port.on_disconnect("connection reset")  # and the commit is slow
    await asyncio.sleep(1.0)
    coordinator.store.writable.set()
    await run_pending()

    assert client.error is None
    second.write("world")
    second.complete()
    await run_pending()

    assert client.text == "Hello, world"


@scripted(run_script)
async def test_slow_reader_is_disconnected_and_the_others_continue(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    quick = await coordinator.request()
    with coordinator.hub.observe_job(quick.job_id) as slow:
        assert slow is not None
        for _ in range(9):
            worker.write("x" * (UNREAD_CEILING // 8))
            await run_pending()
        with pytest.raises(Cancelled, match="reads too slowly"):
            await slow.outcome()
    worker.complete()
    await run_pending()

    assert len(quick.text) == 9 * (UNREAD_CEILING // 8)
    assert quick.outcome is not None
    assert worker.cancelled == []


@scripted(run_script)
async def test_onlooker_reads_everything_and_keeps_no_job_running(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("Hello, ")
    await run_pending()

    with coordinator.hub.observe_job(client.job_id) as reader:
        assert reader is not None
        assert await reader.read() == ["Hello, "]
        await client.disconnect()
        with pytest.raises(Cancelled, match="the client left"):
            await reader.outcome()

    assert worker.cancelled == [client.job_id]
    with coordinator.hub.observe_job(client.job_id) as reader:
        assert reader is None


@scripted(run_script)
async def test_client_that_does_not_read_is_disconnected(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    async with coordinator.hub.run_job(coordinator.job()) as reader:
        await run_pending()
        run = worker.runs[0]
        piece = "x" * (UNREAD_CEILING // 8)
        for _ in range(9):
            worker.emit(AnswerChunk(run.job_id, run.lease, [piece]))
        await run_pending()

        with pytest.raises(Cancelled, match="reads too slowly"):
            await reader.outcome()

    assert worker.cancelled == [run.job_id]
