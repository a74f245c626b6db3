"""Jobs whose work is written to the store before they are submitted."""

import asyncio
import random

import pytest

from coordinator.hubs import Client, Coordinator, run_pending, run_script
from shoal.domain.errors import QueueFull
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from simulation.virtual import scripted

PART_SIZE = 4 << 10  # bytes, instead of 256 KiB
PARTS = 3
TURNS = 30  # of the loop: more than a submission takes
PROMPT = random.Random(0).randbytes(PARTS * PART_SIZE // 2 - 1000).hex()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.store.codec.PART_SIZE", PART_SIZE)
    monkeypatch.setattr("shoal.store.sql.work_parts.WRITTEN_AT_ONCE", PART_SIZE)


async def used_parts(coordinator: Coordinator) -> int:
    """Return the number of stored parts, once those that are not used are deleted."""
    await coordinator.store.prune(0.0)
    return await parts(coordinator)


async def parts(coordinator: Coordinator) -> int:
    query = "SELECT count(*) FROM work_parts"
    ((count,),) = await coordinator.store.database.read(
        lambda sql: sql.execute(query).fetchall()
    )
    return int(count)


def large(coordinator: Coordinator, key: str = "") -> Job:
    return coordinator.job(prompt=PROMPT, key=key)


@scripted(run_script)
async def test_large_job_is_stored_and_run(coordinator: Coordinator) -> None:
    worker = await coordinator.join()
    job = large(coordinator)
    client = Client(coordinator.hub, job)
    await asyncio.sleep(1.0)
    worker.write("answer")
    worker.complete()
    await run_pending()

    assert client.outcome == Outcome("answer")
    assert worker.runs[0].work == job.work
    stored = await coordinator.store.job(job.id)
    assert stored is not None
    assert stored.job == job
    assert await used_parts(coordinator) == PARTS


def test_large_job_that_finds_no_room_is_not_written() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()

        client = Client(coordinator.hub, large(coordinator))
        await asyncio.sleep(1.0)

        assert isinstance(client.error, QueueFull)
        assert await parts(coordinator) == 0

    run_script(script, queue_max=0)


def test_large_job_that_is_refused_later_leaves_nothing() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        await coordinator.request()  # keeps the worker busy

        clients = [Client(coordinator.hub, large(coordinator)) for _ in range(2)]
        await asyncio.sleep(1.0)

        assert sorted(client.accepted for client in clients) == [False, True]
        (error,) = (client.error for client in clients if client.error is not None)
        assert isinstance(error, QueueFull)
        assert await used_parts(coordinator) == PARTS

    run_script(script, queue_max=1)


@scripted(run_script)
async def test_concurrent_large_requests_of_one_key_are_one_job(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(slots=9)

    clients = [Client(coordinator.hub, large(coordinator, "k")) for _ in range(3)]
    await asyncio.sleep(1.0)
    worker.write("one for all")
    worker.complete()
    await run_pending()

    assert [client.text for client in clients] == ["one for all"] * 3
    assert len({client.job_id for client in clients}) == 1
    assert len(worker.runs) == 1
    assert await used_parts(coordinator) == PARTS
    again = Client(coordinator.hub, large(coordinator, "k"))
    await asyncio.sleep(1.0)
    assert again.text == "one for all"
    assert await used_parts(coordinator) == PARTS


@scripted(run_script)
async def test_client_that_leaves_at_any_time_leaves_nothing_behind(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    jobs: list[JobId] = []
    for turns in range(TURNS):
        job = large(coordinator)
        client = Client(coordinator.hub, job)
        for _ in range(turns):
            await asyncio.sleep(0.0)
        await client.disconnect()
        await asyncio.sleep(1.0)

        assert coordinator.hub.pool.jobs == {}
        if await coordinator.store.summary(job.id) is not None:
            jobs.append(job.id)
        assert await used_parts(coordinator) == PARTS * len(jobs)

    assert 0 < len(jobs) < TURNS
    for job_id in jobs:
        stored = await coordinator.store.job(job_id)
        assert stored is not None
        assert stored.job.work.text == PROMPT
