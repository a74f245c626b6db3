"""Coordinators that take over from each other on one database, dead or not."""

import pytest

from harness.profiles import some_long
from shoal.protocols.seam.protocol import AnyWireProtocol
from simulation import pauses
from simulation.faults import OF_NODES, WITH_TAKEOVERS, lose_the_database
from simulation.test_simulation import PROTOCOLS, live_through
from simulation.world import World

one_short = pytest.mark.parametrize(
    "protocol",
    some_long(PROTOCOLS, short=1),
    ids=[protocol.name for protocol in PROTOCOLS],
)


GATE = 2.0  # seconds for clients to come back


async def check_laws(world: World) -> None:
    """Check what must hold over all coordinators of a world."""
    assert world.tally.wrong == []
    assert set(await world.ends()) <= {1}
    assert set((await world.done_by_key()).values()) <= {1}
    assert world.hub.books.total() == 0
    assert await world.store.balance() == 0
    assert await world.store.log_problems() == []
    accounts = (await world.store.ledger.load()).accounts
    assert not any(
        each.balance for name, each in accounts.items() if name.startswith("job:")
    )


@one_short
def test_every_job_ends_once_though_coordinators_take_over(
    protocol: AnyWireProtocol, seed: int
) -> None:
    async def scenario() -> None:
        world = await live_through(
            *(protocol, seed),
            workers=20,
            jobs=150,
            faults=30,
            kinds=WITH_TAKEOVERS,
            price=7,
            hedge_after=2.0 if seed % 2 else None,
        )

        await check_laws(world)
        assert world.tally.whole > 30
        assert world.store.faults.unanswered > 0
        assert world.hub.epoch > 2
        await world.close()

    pauses.run(scenario())


@one_short
def test_answers_go_on_at_another_coordinator(
    protocol: AnyWireProtocol, seed: int
) -> None:
    async def scenario() -> None:
        world = await live_through(
            *(protocol, seed),
            workers=20,
            jobs=150,
            faults=30,
            kinds=WITH_TAKEOVERS,
            price=7,
            hedge_after=2.0 if seed % 2 else None,
            await_clients=GATE,
        )

        await check_laws(world)
        assert world.tally.whole > 75
        assert world.tally.survived > 0
        await world.close()

    pauses.run(scenario())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "faults" in metafunc.fixturenames:
        # With --every, 10,000 takeovers over all seeds.
        every = metafunc.config.getoption("--every")
        metafunc.parametrize("faults", [450 if every else 60])


@one_short
def test_three_nodes_take_over_from_each_other(
    protocol: AnyWireProtocol, seed: int, faults: int
) -> None:
    """By the rule of the lease, again and again."""

    async def scenario() -> None:
        world = await live_through(
            *(protocol, seed),
            workers=20,
            jobs=100,
            faults=faults,
            kinds=OF_NODES,
            price=7,
            await_clients=GATE,
            busy=2.0 * faults,
            nodes=3,
        )

        await check_laws(world)
        assert world.hub.epoch > 0.2 * faults
        assert world.tally.whole > 50
        await world.close()

    pauses.run(scenario())


@pytest.mark.long
def test_three_nodes_have_a_thousand_workers() -> None:
    async def scenario() -> None:
        world = await live_through(
            *(PROTOCOLS[0], 1),
            workers=1_000,
            jobs=2_000,
            faults=20,
            kinds=OF_NODES,
            price=7,
            await_clients=GATE,
            busy=120.0,
            nodes=3,
        )

        await check_laws(world)
        assert world.hub.epoch > 6
        assert world.tally.whole > 1_800
        assert world.tally.survived > 100
        assert world.tally.past_the_hub > 1_000
        await world.close()

    pauses.run(scenario())


def test_nobody_takes_over_because_the_database_was_away(seed: int) -> None:
    async def scenario() -> None:
        world = await live_through(
            *(PROTOCOLS[0], seed),
            workers=5,
            jobs=50,
            faults=10,
            kinds={lose_the_database: 1},
            await_clients=GATE,
            nodes=3,
        )

        await check_laws(world)
        assert world.hub.epoch == 1
        assert world.tally.whole > 20
        await world.close()

    pauses.run(scenario())
