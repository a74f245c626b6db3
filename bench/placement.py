"""Placements of models: their speed, and what they are worth.

*Speed*: 200 machines, 500 models, each with files on one to four machines.  A decision
is the answer for one model that requests wait for: the machine that loads it, what that
machine unloads first, or why none can have it.  *All at once*: nothing is loaded, and
one call decides about 500 models.  *Fetching*: machines also copy files, so each may
have any model.  *One change*: some 400 models are loaded, and one more is waited for.
CPU time is of this thread.

*Worth*: four hours of requests, one a second, with the demand of Zipf's law, whose
order drifts (tests/simulation/model_fleet.py).  *LRU*: each model has one machine,
which evicts what was least recently used.  *Oracle*: knows the requests of the next
hour, and evicts on any machine what is not needed for longest.  Each round has other
machines and requests; the first third of the time is not counted.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

from msgspec import structs

from report import Goal, Results
from shoal.domain.work import ModelAction
from shoal.pool.models.machine import LoadedModel, Machine, PlacementRules
from shoal.pool.models.placement import Demand, Placement, place

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation.model_fleet import (
    HOUR,
    Fleet,
    Placing,
    Policy,
    Request,
    Station,
    least_recently_used,
    make_machines,
    make_requests,
    oracle,
)

ROUNDS = 5
MACHINES, MODELS = 200, 500
HOURS = 4.0
NOW = 10_000.0
NEXT = "model-0"
TIMES = 20

ALL = "all at once: decisions a second"
FETCHING = "all at once, fetching: decisions a second"
ONE = "one change: calls a second"
PLACED, LRU, ORACLE = "placed", "LRU", "oracle"
WAITED = "requests that wait for a load: %"
P99 = "p99 of waits: s"
MEAN = "mean wait: s"
LOADS = "loads for 1000 requests"


def _row(policy: str, what: str) -> str:
    return f"{policy}: {what}"


GOALS = [
    Goal(ALL, at_least=10_000),
    Goal(FETCHING),
    Goal(ONE),
    *(
        Goal(_row(PLACED, what), _row(policy, what), at_most=most)
        for what, policy, most in (
            (WAITED, LRU, 0.8),
            (WAITED, ORACLE, 1.3),
            (P99, LRU, 1.0),
            (MEAN, LRU, 0.8),
            (LOADS, LRU, 0.85),
        )
    ),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for seed in range(rounds):
        _measure_speed(results, make_machines(Random(seed), MACHINES, MODELS))
        for policy in (PLACED, LRU, ORACLE):
            _measure_worth(results, policy, seed)
    return results


def _measure_speed(results: Results, machines: Sequence[Machine]) -> None:
    waits = {f"model-{n}": Demand(1, float(n)) for n in range(MODELS)}
    placement, seconds = _timed(lambda: place(machines, waits, {}, NOW))
    results[ALL].append(MODELS / seconds)

    fetching = [
        replace(each, library=structs.replace(each.library, fetches=True))
        for each in machines
    ]
    _, seconds = _timed(lambda: place(fetching, waits, {}, NOW))
    results[FETCHING].append(MODELS / seconds)

    demands = {name: Demand() for name in waits} | {NEXT: Demand(1, 1.0)}
    busy = _after(machines, placement)
    _, seconds = _timed(lambda: place(busy, demands, {}, NOW))
    results[ONE].append(1 / seconds)


def _after(machines: Sequence[Machine], placement: Placement) -> list[Machine]:
    """Return the machines once they have loaded what was placed, but one model."""
    loaded: dict[str, dict[str, LoadedModel]] = {each.id: {} for each in machines}
    for order, _ in placement.orders:
        if order.action is ModelAction.LOAD and order.name != NEXT:
            model = LoadedModel(0, NOW - 500, NOW - 100)
            loaded[order.machine][order.name] = model
    return [replace(each, loaded=loaded[each.id]) for each in machines]


def _timed(act: Callable[[], Placement]) -> tuple[Placement, float]:
    """Return a result, and the seconds that it takes."""
    placement = act()  # what is cached for as long as libraries do not change
    began = time.thread_time()
    for _ in range(TIMES):
        act()
    return placement, (time.thread_time() - began) / TIMES


def _measure_worth(results: Results, name: str, seed: int) -> None:
    random = Random(seed)
    stations = [Station(each) for each in make_machines(random, MACHINES, MODELS)]
    requests = make_requests(random, MODELS, HOURS, 1.0)
    fleet = Fleet(
        {each.machine.id: each for each in stations},
        _policy(name, stations, requests),
        measured_after=HOURS * HOUR / 3,
    )
    fleet.run(requests)
    waits, number = sorted(fleet.waits), len(fleet.waits)
    results[_row(name, WAITED)].append(100 * fleet.cold / number)
    results[_row(name, P99)].append(waits[int(0.99 * number)])
    results[_row(name, MEAN)].append(sum(waits) / number)
    results[_row(name, LOADS)].append(1000 * fleet.loads / number)


def _policy(
    name: str, stations: Sequence[Station], requests: Sequence[Request]
) -> Policy:
    if name == LRU:
        return least_recently_used(stations)
    if name == ORACLE:
        return oracle(stations, requests)
    return Placing({}, PlacementRules(idle=inf))  # as the others, which unload nothing
