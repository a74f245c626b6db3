"""Commits whose answers are lost, and hubs whose store another one has taken over."""

import asyncio

from coordinator.hubs import Coordinator, run_pending, run_script
from shoal.coordinator.store_health import RETRY_MAX
from shoal.domain.errors import Fenced
from shoal.domain.facts import JobCompleted
from shoal.pool.inputs import AccountTopUp
from shoal.protocols.seam.session import CloseCode
from simulation.virtual import scripted


@scripted(run_script)
async def test_a_batch_whose_answer_was_lost_counts_once(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    await coordinator.hub.process(AccountTopUp("user:al", 7, "admin"))
    client = await coordinator.request()
    worker.write("hello")

    coordinator.store.unanswered = True
    worker.complete()
    await run_pending()
    assert coordinator.hub.store_health.failing_for
    assert client.outcome is None
    coordinator.store.unanswered = False
    await asyncio.sleep(RETRY_MAX)

    assert client.outcome is not None
    story = await coordinator.store.history(client.job_id)
    assert sum(isinstance(each.fact, JobCompleted) for each in story) == 1
    opening = await coordinator.store.ledger.load()
    assert opening.head is not None
    assert opening.head.size == 1


@scripted(run_script)
async def test_a_hub_whose_store_was_taken_over_steps_down(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join()
    client = await coordinator.request()
    worker.write("hello")

    await coordinator.store.take_over()
    worker.complete()
    await run_pending()

    assert isinstance(client.error, Fenced)
    assert client.text == "hello"
    ((reason, code),) = worker.disconnections
    assert "another coordinator has taken over" in reason
    assert code == CloseCode.GOING_AWAY
    assert coordinator.task.done()
    (job,) = await coordinator.store.open_jobs()  # the other one has it
    assert job.job.id == client.job_id
