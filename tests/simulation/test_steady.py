"""A coordinator that runs for a day of virtual time holds what it did after an hour."""

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Iterator

import pytest

from shoal.peers.peer_models import ENDED_MAX
from shoal.pool.state import SESSIONS_MAX
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from simulation import virtual
from simulation.faults import FAULTS as ALL_FAULTS
from simulation.faults import Fleet, break_things
from simulation.faults import crash_the_coordinator as crash
from simulation.world import World

PROTOCOLS = [each for each in discover().values() if each.preferred]
HOUR = 3600.0
HOURS = 24
WORKERS = 4
QUESTIONS = 20  # an hour
FAULTS = 5  # an hour
KINDS = {fault: n for fault, n in ALL_FAULTS.items() if fault is not crash}
LAST = 120.0  # seconds at the end of an hour in which all comes to rest
CONTAINERS = (dict, list, set, deque)
KEPT = {"PoolState.sessions": SESSIONS_MAX, "PeerModels._ended": ENDED_MAX}
MORE = 20  # entries of a container: what a connection may have at one moment or another


def entries(root: object) -> Counter[str]:
    """Return the entries of all containers that belong to ``root``, by their place."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        place, each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, deque) and each.maxlen is not None:
            continue  # it is bounded
        if isinstance(each, CONTAINERS):
            found[place] += len(each)
            values = each.values() if isinstance(each, dict) else each
            todo += [(f"{place}[]", value) for value in values]
        elif type(each).__module__.startswith("shoal."):
            name = type(each).__name__
            todo += [(f"{name}.{part}", value) for part, value in _parts(each)]
    return found


def _parts(each: object) -> Iterator[tuple[str, object]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(each, name):
                yield name, getattr(each, name)


async def an_hour(world: World, fleet: Fleet) -> Counter[str]:
    """Let clients ask and faults happen for an hour; return what is held then."""
    began = world.clock.now()
    fleet.launch_dismissed()

    async def ask() -> None:
        await asyncio.sleep(world.random.uniform(0.0, HOUR - 2 * LAST))
        leaves = world.random.random() < 0.3
        await world.ask("small", patience=2.0 if leaves else None)

    await asyncio.gather(
        break_things(world, fleet, FAULTS, HOUR / 2, KINDS),
        *(asyncio.ensure_future(ask()) for _ in range(QUESTIONS)),
        return_exceptions=True,
    )
    await asyncio.sleep(max(0.0, began + HOUR - LAST - world.clock.now()))
    while world.hub.pool.jobs:  # noqa: ASYNC110  # nothing tells when there are none
        await asyncio.sleep(1.0)
    await asyncio.sleep(LAST)
    return entries(world.hub) + entries(world.calls) + entries(world.peers)


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_day_leaves_no_more_than_an_hour(
    protocol: AnyWireProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "END", (HOURS + 2) * HOUR)

    async def scenario() -> None:
        world = World(protocol, 1)
        await world.open()

        def work(number: int) -> Coroutine[None, None, None]:
            return world.work(f"w{number}", "small", continues=number % 2 > 0)

        fleet = Fleet(world.random, WORKERS, work)
        first = await an_hour(world, fleet)
        for _ in range(HOURS - 1):
            last = await an_hour(world, fleet)

        assert world.tally.whole > QUESTIONS * HOURS / 4
        more = {
            place: count
            for place, count in (last - first).items()
            if count > MORE + KEPT.get(place, 0)
        }
        assert more == {}
        await fleet.stop()
        await world.close()

    virtual.run(scenario())
