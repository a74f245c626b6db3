"""The whole pool under made-up faults: every job ends once, and nothing sticks."""

import asyncio
from collections.abc import Coroutine, Mapping
from operator import attrgetter

import pytest

from harness.profiles import some_long
from shoal.domain.facts import JobHedged
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from simulation import virtual
from simulation.faults import (
    FAULTS,
    WITH_FULL_DISKS,
    Fault,
    Fleet,
    break_things,
    end_orders,
    give_orders,
)
from simulation.standbys import Standbys
from simulation.virtual import in_virtual_time
from simulation.world import World

# On other wires a failure may be text, and a job cannot always be told from its repeat.
PROTOCOLS = [each for each in discover().values() if each.preferred]
MODELS = ("small", "large")

# What depends little on the wire; all wires: test_every_job_ends_exactly_once.
one_short = pytest.mark.parametrize(
    "protocol",
    some_long(PROTOCOLS, short=1),
    ids=[protocol.name for protocol in PROTOCOLS],
)


def fleet_of(world: World, count: int) -> Fleet:
    """Start workers, every other one with the other model."""

    def work(number: int) -> Coroutine[None, None, None]:
        model = MODELS[number % len(MODELS)]
        return world.work(f"w{number}", model, continues=number % 3 > 0)

    return Fleet(world.random, count, work)


async def live_through(
    protocol: AnyWireProtocol,
    seed: int,
    *,
    workers: int,
    jobs: int,
    faults: int,
    stalls: float = 0.0,
    hedge_after: float | None = None,
    orders: int = 0,
    kinds: Mapping[Fault, int] = FAULTS,
    price: int = 0,
    await_clients: float = 0.0,
    busy: float = 60.0,
    nodes: int = 0,
) -> World:
    """Let clients ask ``jobs`` questions while ``faults`` faults happen.

    All of that happens in ``busy`` seconds.  If coordinators ``await_clients``, most of
    these stay at their fronts.  So many other ``nodes`` stand by, if there are any.

    ``stalls`` is the share of jobs at which a worker is silent for long, and operators
    give so many ``orders`` about workers, which they have to approve then.
    """
    world = World(
        *(protocol, seed),
        stalls=stalls,
        hedge_after=hedge_after,
        price=price,
        approve_nodes=orders > 0,
        await_clients=await_clients,
    )
    await world.open()
    fleet = fleet_of(world, workers)
    await asyncio.sleep(1.0)
    standbys = Standbys(world, nodes) if nodes else None

    async def ask_one() -> None:
        await asyncio.sleep(world.random.uniform(0.0, busy))
        model = world.random.choice(MODELS)
        if world.random.random() < 0.1:
            await world.insist(model)
            return
        if await_clients and world.random.random() < 0.8:
            await world.stay(model)
            return
        leaves = world.random.random() < 0.1
        patience = world.random.uniform(0.0, 5.0) if leaves else None
        await world.ask(model, patience=patience)

    ended = await asyncio.gather(
        break_things(world, fleet, faults, busy, kinds),
        give_orders(world, fleet, orders, busy),
        *(asyncio.ensure_future(ask_one()) for _ in range(jobs)),
        return_exceptions=True,
    )
    for each in ended:
        if isinstance(each, Exception):  # clients are cut off by a crash, no more
            raise each
    if orders:
        await end_orders(world, fleet)
    await asyncio.sleep(200.0)  # for the last lost worker to be noticed and replaced
    await world.settle()
    assert await world.store.open_jobs() == []
    for worker in world.hub.pool.workers.values():
        assert worker.leases == {}, f"{worker.id} holds a slot for nothing"
    assert len(world.hub.pool.workers) == workers
    await fleet.stop()
    if standbys is not None:
        standbys.stop()
    return world


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@in_virtual_time
async def test_every_job_ends_exactly_once(
    protocol: AnyWireProtocol, seed: int
) -> None:
    world = await live_through(
        protocol,
        seed,
        workers=20,
        jobs=150,
        faults=25,
        stalls=0.05,
        hedge_after=2.0 if seed % 2 else None,
    )

    assert world.tally.wrong == []
    assert set(await world.ends()) <= {1}
    assert set((await world.done_by_key()).values()) <= {1}
    assert world.tally.whole > 75
    hedged = sum(isinstance(f, JobHedged) for s in await world.facts() for f in s)
    assert (hedged > 0) == (seed % 2 == 1)
    await world.close()


@one_short
@in_virtual_time
async def test_every_job_ends_once_while_operators_suspend_workers(
    protocol: AnyWireProtocol, seed: int
) -> None:
    world = await live_through(
        *(protocol, seed),
        workers=20,
        jobs=150,
        faults=15,
        hedge_after=2.0 if seed % 2 else None,
        orders=40,
    )

    assert world.tally.wrong == []
    assert set(await world.ends()) <= {1}
    assert set((await world.done_by_key()).values()) <= {1}
    assert world.tally.whole > 75
    pool = world.hub.pool
    assert [*pool.suspensions] == []
    assert pool.leaving == {}
    assert not any(worker.suspension for worker in pool.workers.values())
    await world.close()


@one_short
@in_virtual_time
async def test_every_job_ends_once_though_the_disk_is_full_at_times(
    protocol: AnyWireProtocol, seed: int
) -> None:
    world = await live_through(
        *(protocol, seed),
        workers=20,
        jobs=150,
        faults=30,
        kinds=WITH_FULL_DISKS,
        price=7,
    )

    assert world.tally.wrong == []
    assert world.store.faults.failures > 0
    assert set(await world.ends()) <= {1}
    assert set((await world.done_by_key()).values()) <= {1}
    assert world.tally.whole > 5
    assert world.hub.books.total() == 0
    stored = (await world.store.ledger.load()).accounts
    assert {name: each.balance for name, each in stored.items() if each.balance} == {
        name: balance
        for name in world.hub.books.account_names()
        if (balance := world.hub.books.balance(name))
    }
    assert all(not name.startswith("job:") for name in stored if stored[name].balance)
    await world.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wire" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        protocols = PROTOCOLS if every else PROTOCOLS[:1]
        metafunc.parametrize("wire", protocols, ids=attrgetter("name"))


@pytest.mark.long
@in_virtual_time
async def test_thousand_workers_and_ten_thousand_jobs(
    wire: AnyWireProtocol,
) -> None:
    world = await live_through(wire, 1, workers=1_000, jobs=10_000, faults=100)

    assert world.tally.wrong == []
    assert await world.ends() == {1: len(world.accepted)}
    assert set((await world.done_by_key()).values()) == {1}
    assert world.tally.whole > 8_000
    await world.close()


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=attrgetter("name"))
def test_a_second_worker_cuts_the_slow_tail(protocol: AnyWireProtocol) -> None:
    async def waits(hedge_after: float | None) -> list[float]:
        """Return how long clients waited for the first piece, the longest first."""
        world = World(protocol, 3, refusals=0.0, stalls=0.05, hedge_after=hedge_after)
        await world.open()
        fleet = fleet_of(world, 20)
        await asyncio.sleep(1.0)
        found: list[float] = []

        async def ask_one() -> None:
            await asyncio.sleep(world.random.uniform(0.0, 300.0))
            found.append(await world.first_piece(MODELS[0]))

        await asyncio.gather(*(ask_one() for _ in range(200)))
        await world.settle()
        await fleet.stop()
        await world.close()
        return sorted(found, reverse=True)

    plain = virtual.run(waits(None))
    hedged = virtual.run(waits(2.0))

    # In one of twenty answers the worker is silent for up to a minute; two in a row
    # are rare.
    assert plain[2] > 30.0
    assert hedged[2] < 5.0


@one_short
def test_a_seed_tells_the_same_story_twice(protocol: AnyWireProtocol) -> None:
    async def scenario() -> object:
        world = await live_through(
            protocol, 7, workers=10, jobs=60, faults=20, stalls=0.1, hedge_after=2.0
        )
        stories = await world.facts()
        await world.close()
        return world.tally, stories

    assert virtual.run(scenario()) == virtual.run(scenario())
