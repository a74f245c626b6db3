"""Calls that run while their coordinator or a connection is lost are not run again."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from shoal.domain.facts import JobLeased
from shoal.protocols import discover
from shoal.worker.blob_cache import BlobCache
from simulation import pauses
from simulation.faults import Fleet, take_over
from simulation.functions import Made, SimCaller, squared
from simulation.test_calls import TOKEN, Clients, worker_of
from simulation.test_returning_workers import cut_wires
from simulation.world import World

OWN = discover()["shoal"]
CALLS = 150


@pytest.fixture
def blobs() -> Iterator[BlobCache]:
    """Where large arguments would be."""
    blobs = BlobCache()
    yield blobs
    asyncio.run(blobs.close())


async def kill_coordinators(world: World) -> None:
    for _ in range(4):
        await asyncio.sleep(world.random.uniform(3.0, 12.0))
        await world.crash()
        await asyncio.sleep(world.random.uniform(0.0, 2.0))
        await take_over(world)


async def cut_connections(world: World) -> None:
    await cut_wires(world, 20)


async def lose(
    fault: Callable[[World], Awaitable[None]], seed: int, blobs: BlobCache
) -> None:
    """Lose what ``fault`` does while calls run, and are asked for again."""
    world = World(OWN, seed, token=TOKEN)
    await world.open()
    made = Made()
    clients = Clients(world, made)
    callers: dict[int, SimCaller] = {}
    fleet = Fleet(
        world.random, 6, lambda number: worker_of(world, callers, made, blobs, number)
    )
    await asyncio.sleep(1.0)
    for caller in callers.values():
        caller.refuses = 0.0
    placed = [clients.place() for _ in range(CALLS)]
    insisted = [clients.insist() for _ in range(CALLS)]

    await asyncio.gather(fault(world), *placed, *insisted)
    await world.settle()
    await asyncio.sleep(20.0)  # for streams that nobody wants to end

    assert made.wrong == []
    # A call that has failed is made again for a client that asks again.
    twice = [number for number, times in Counter(made.begun).items() if times > 1]
    assert [number for number in twice if squared(number) is not None] == []
    assert clients.lost == 0
    world.accepted.update(dict.fromkeys(clients.accepted))
    assert await world.ends() == {1: len(clients.accepted)}
    resumed = [
        fact
        for story in await world.facts()
        for fact in story
        if isinstance(fact, JobLeased) and fact.resumes
    ]
    assert resumed or fault is cut_connections  # whose streams go on, unrecorded
    for worker in world.hub.pool.workers.values():
        assert worker.leases == {}
    assert {n: each.busy for n, each in callers.items() if each.busy} == {}
    await fleet.stop()
    await world.close()


@pytest.mark.parametrize("fault", [kill_coordinators, cut_connections])
def test_no_call_runs_twice(
    fault: Callable[[World], Awaitable[None]], seed: int, blobs: BlobCache
) -> None:
    pauses.run(lose(fault, seed, blobs))
