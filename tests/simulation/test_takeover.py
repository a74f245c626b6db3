"""Killing the worker at any piece of an answer leaves the same text."""

import asyncio

import pytest

from harness.profiles import some_long
from shoal.domain.facts import JobCompleted, JobLeased
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from simulation import virtual
from simulation.engine import answer_to
from simulation.world import World

PROTOCOLS = [each for each in discover().values() if each.preferred]
PROMPT = "a long story"
PIECES = 200


async def answer_with_a_kill(
    protocol: AnyWireProtocol, index: int, *, continues: bool
) -> None:
    """Kill the first worker once ``index`` pieces have come, let the other go on."""
    world = World(protocol, index, refusals=0.0)
    await world.open()
    workers = {
        name: asyncio.create_task(world.work(name, "m", continues=continues))
        for name in ("first", "second")
    }
    await asyncio.sleep(1.0)
    text, killed = "", False
    # Chance does no harm where the next worker goes on; else the answer is repeated.
    temperature = 1.0 if continues else 0.0
    chat = Chat("m", ({"role": "user", "content": PROMPT},), temperature=temperature)
    job = Job(JobId("job"), chat)

    async with world.hub.run_job(job) as reader:
        while pieces := await reader.read():
            text += "".join(map(str, pieces))
            if not killed and text.count("é") >= index:
                killed = True
                await kill_the_one_at_work(world, workers, reader.job_id)
        outcome = await reader.outcome()

    assert text == outcome.text == "".join(answer_to(PROMPT))
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == len(text)
    story = [each.fact for each in await world.store.history(reader.job_id)]
    assert sum(isinstance(fact, JobCompleted) for fact in story) == 1
    leases = [fact.worker_id for fact in story if isinstance(fact, JobLeased)]
    assert len(leases) >= 2
    assert leases[0] != leases[-1]
    for task in workers.values():
        task.cancel()
    await asyncio.gather(*workers.values(), return_exceptions=True)
    await world.close()


async def kill_the_one_at_work(
    world: World, workers: dict[str, asyncio.Task[None]], job_id: JobId
) -> None:
    holder = world.hub.pool.jobs[job_id].worker_id
    assert holder is not None
    name = holder.partition(":")[2].partition("/")[0]
    workers[name].cancel()
    await asyncio.gather(workers[name], return_exceptions=True)


@pytest.mark.parametrize("step", some_long([31, 1], short=1), ids=["some", "all"])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("continues", [True, False], ids=["continues", "starts over"])
def test_an_answer_survives_a_kill_at_every_piece(
    protocol: AnyWireProtocol, continues: bool, step: int
) -> None:
    # One short of the end, for after the last piece there is nothing to take over.
    for index in range(1, PIECES, step):
        virtual.run(answer_with_a_kill(protocol, index, continues=continues))
