"""``pool.jobs`` at a complete coordinator, with a worker of Dispatch."""

import asyncio
from pathlib import Path

import pytest

from gateway.providers import provider
from gateway.serving import KEY, serving
from shoal import AsyncPool, Pool
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.protocols.dispatch import Config

WIRES = {"dispatch": Config(open=True)}
CLASSIFY = {"task_type": "classify", "input": "great"}


async def test_job_is_priced_submitted_and_awaited(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, wires=WIRES) as running,
        provider(running) as worker,
        AsyncPool(running.url, KEY) as pool,
    ):
        quote = await pool.jobs.quote("TASK")
        job_id = await pool.jobs.submit(CLASSIFY, user="ada", type="TASK")
        assigned = await worker.job()
        before = await pool.jobs.show(job_id)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(pool.jobs.wait(job_id))
            await worker.complete(job_id, {"sentiment": "positive"})
        done = waiting.result()
        (listed,) = await pool.jobs.recent(5)

    assert (quote.price, quote.policy_resolved) == ("$0.001", "CHEAP")
    assert assigned["payload"] == CLASSIFY
    assert (assigned["policy"], assigned["user_id"]) == ("CHEAP", "ada")
    assert (before.status, before.is_open, before.result) == ("assigned", True, None)
    assert (done.status, done.result) == ("completed", {"sentiment": "positive"})
    assert done.receipt["verified"] is True
    assert (listed.id, listed.result) == (job_id, None)


async def test_blocking_pool_has_the_same_methods(tmp_path: Path) -> None:
    def operate(url: str) -> list[str]:
        with Pool(url, KEY) as pool:
            jobs = pool.jobs
            job_id = jobs.submit({"prompt": "hi"}, user="ada", policy="FAST")
            assert jobs.quote().policy_resolved == "FAST"
            assert [each.id for each in jobs.recent()] == [job_id]
            states = [jobs.show(job_id).status, jobs.cancel(job_id).status]
            return [*states, jobs.wait(job_id).status]

    async with serving(tmp_path, wires=WIRES) as running:
        states = await asyncio.to_thread(operate, running.url)

    assert states == ["pending", "failed", "failed"]


async def test_refusals_have_the_reason(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, wires=WIRES) as running,
        AsyncPool(running.url, KEY) as pool,
    ):
        with pytest.raises(InvalidRequest, match="no_trusted_worker"):
            await pool.jobs.submit({"prompt": "a"}, user="ada", privacy="PRIVATE")
        with pytest.raises(InvalidRequest, match="Missing required fields"):
            await pool.jobs.submit(None, user="ada")
        with pytest.raises(NotFound, match="Job not found"):
            await pool.jobs.show("none")
