"""A coordinator is lost, and its workers go on with what they run at the next one."""

import asyncio
from collections.abc import Coroutine

import pytest

from harness.profiles import some_long
from shoal.domain.facts import JobLeased
from shoal.protocols import discover
from simulation import pauses
from simulation.faults import Fleet, take_over
from simulation.test_simulation import MODELS, fleet_of
from simulation.test_two_coordinators import GATE, check_laws
from simulation.world import World

OWN = discover()["shoal"]
FAULTS = ("killed", "doubled")


async def lose_coordinators(world: World, fault: str, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(world.random.uniform(2.0, 6.0))
        if fault == "killed":
            await world.crash()
            await asyncio.sleep(world.random.uniform(0.0, 3.0))
        await take_over(world)


async def ask(world: World, kind: str) -> None:
    await asyncio.sleep(world.random.uniform(0.0, 12.0))
    model = world.random.choice(MODELS)
    await (world.stay(model) if kind == "fronts" else world.insist(model))


async def lose_with_jobs(fault: str, kind: str, seed: int) -> None:
    """Lose coordinators while clients at fronts wait, or such that ask again."""
    gate = GATE if kind == "fronts" else 0.0
    world = World(OWN, seed, refusals=0.0, await_clients=gate, price=7)
    await world.open()
    fleet: Fleet = fleet_of(world, 8)
    await asyncio.sleep(1.0)
    clients = [asyncio.create_task(ask(world, kind)) for _ in range(60)]

    await lose_coordinators(world, fault, 3)
    await asyncio.gather(*clients)
    await world.settle()

    await check_laws(world)
    assert world.tally.whole + world.tally.ended_badly == 60 * (1 + (kind != "fronts"))
    # What fails at one engine is tried at another.
    twice = {each for each, runs in world.runs.items() if runs > 1}
    again = [each for each in twice if "poison" not in each]
    assert again == []
    resumed = [
        fact
        for story in await world.facts()
        for fact in story
        if isinstance(fact, JobLeased) and fact.resumes
    ]
    assert len(resumed) > 3
    for worker in world.hub.pool.workers.values():
        assert worker.leases == {}
    await fleet.stop()
    await world.close()


@pytest.mark.parametrize("kind", ["fronts", "keys"])
@pytest.mark.parametrize("fault", some_long([*FAULTS], short=1))
def test_nothing_runs_twice_though_coordinators_are_lost(
    fault: str, kind: str, seed: int
) -> None:
    pauses.run(lose_with_jobs(fault, kind, seed))


async def cut_wires(world: World, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(world.random.uniform(1.0, 3.0))
        if (wire := world.any_wire()) is not None:
            wire.cut()


async def cut_connections(seed: int) -> None:
    """Cut connections of workers that can neither continue nor repeat an answer."""
    world = World(OWN, seed, refusals=0.0, price=7)
    world.temperature = 1.0
    await world.open()

    def work(number: int) -> Coroutine[None, None, None]:
        return world.work(f"w{number}", MODELS[0], continues=False)

    fleet = Fleet(world.random, 6, work)
    await asyncio.sleep(1.0)
    asked = [asyncio.create_task(world.ask(MODELS[0])) for _ in range(60)]
    await cut_wires(world, 6)
    await asyncio.gather(*asked)
    await world.settle()

    await check_laws(world)
    failed = [prompt for prompt in world.runs if "poison" in prompt]
    assert world.tally.ended_badly == len(failed)
    assert world.tally.whole == 60 - len(failed)
    await fleet.stop()
    await world.close()


def test_answers_go_on_though_connections_break(seed: int) -> None:
    pauses.run(cut_connections(seed))
