"""Placements over hours of virtual time: beside other policies, and under faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

import pytest

from shoal.domain.facts import DeploymentSet
from shoal.pool.models.machine import PlacementRules
from simulation.model_fleet import (
    HOUR,
    SLOTS,
    Evicting,
    Fleet,
    Placing,
    Request,
    Station,
    least_recently_used,
    make_machines,
    make_requests,
    oracle,
)

MACHINES, MODELS = 200, 500
KEPT = PlacementRules(idle=inf)  # as the other policies do
FAULTS = 40
AWAY = 300.0  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What requests met, once the first third of the time was over."""

    cold: float  # share whose model was loaded nowhere
    loads: float  # for each request
    mean: float  # seconds of wait
    p99: float


@pytest.fixture
def hours(request: pytest.FixtureRequest) -> float:
    return 8.0 if request.config.getoption("every") else 1.0


def outcome(
    policy: Callable[[Sequence[Station], Sequence[Request]], Placing | Evicting],
    hours: float,
    seed: int,
) -> Outcome:
    random = Random(seed)
    stations = [Station(each) for each in make_machines(random, MACHINES, MODELS)]
    requests = make_requests(random, MODELS, hours, 1.0)
    fleet = Fleet(
        {each.machine.id: each for each in stations},
        policy(stations, requests),
        measured_after=hours * HOUR / 3,
    )
    fleet.run(requests)
    assert not fleet.waiting
    waits, number = sorted(fleet.waits), len(fleet.waits)
    return Outcome(
        fleet.cold / number,
        fleet.loads / number,
        sum(waits) / number,
        waits[int(0.99 * number)],
    )


def test_placement_is_better_than_machines_by_themselves(
    hours: float, seed: int
) -> None:
    placed = outcome(lambda stations, requests: Placing({}, KEPT), hours, seed)
    alone = outcome(
        lambda stations, requests: least_recently_used(stations), hours, seed
    )
    best = outcome(oracle, hours, seed)

    print(f"\nplaced: {placed}\nleast recently used: {alone}\noracle: {best}")
    assert placed.cold < 0.8 * alone.cold
    assert placed.loads < 0.85 * alone.loads
    assert placed.mean < 0.8 * alone.mean
    assert placed.p99 < alone.p99
    assert placed.cold < 1.3 * best.cold


def test_steady_demand_causes_no_load_and_no_unload(seed: int) -> None:
    machines = make_machines(Random(seed), MACHINES, MODELS)
    stations = {each.id: Station(each) for each in machines}
    names: list[str] = []  # at most one for every other machine, which has room for it
    for station in [*stations.values()][::2]:
        fitting = (
            each.name
            for each in station.machine.library.models
            if station.need(each.name) <= station.machine.library.memory
        )
        names += [each for each in fitting if each not in names][:1]
    requests = [Request(n / 2, names[n % len(names)], 5.0) for n in range(4800)]

    fleet = Fleet(stations, Placing({}, PlacementRules()), measured_after=1200.0)
    fleet.run(requests, rest=0.0)

    assert fleet.loads == fleet.unloads == fleet.cold == 0


def test_pinned_models_return_after_faults(seed: int) -> None:
    """The fleet itself asserts that no memory is taken twice, and no copy in use."""
    random = Random(seed)
    machines = make_machines(random, 40, 100)
    stations = {each.id: Station(each) for each in machines}
    small = [each.name for each in machines[0].library.models]
    deployments = {
        name: DeploymentSet(name, 1, "al", pinned=True) for name in small[:2]
    }
    for number in range(90, 100):
        name = f"model-{number}"
        deployments[name] = DeploymentSet(
            name, 0, "al", most=3, idle=600.0, slots=SLOTS
        )
    placing = Placing(deployments, PlacementRules())
    fleet = Fleet(stations, placing)
    requests = make_requests(random, 100, 1.0, 0.5)
    for _ in range(FAULTS):
        station = random.choice(list(stations.values()))
        at = random.uniform(0.0, HOUR)
        fault = random.choice([fleet.lose, fleet.pause])
        fleet.at(at, partial(fault, station, AWAY))

    fleet.run(requests)

    assert fleet.waiting.keys() == placing.unplaced.keys()
    for name, why in placing.unplaced.items():
        assert "are kept for" in why, name  # by pinned models
    for name in small[:2]:
        assert fleet.copies(name)
