"""Machines that load models as requests need them, in virtual time.

No coordinator runs here: requests arrive, a policy orders machines to load and unload,
and each copy of a model runs a few requests at a time.  Another policy meets the very
same requests.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf
from random import Random
from typing import Protocol
from zlib import crc32

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import ModelAction, ModelOrder
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.pool.models.machine import LoadedModel, Machine, PlacementRules
from shoal.pool.models.placement import Demand, place

GB = 10**9
HOUR = 3600.0
MEMORY = (6, 8, 8, 12, 16, 24, 48)  # GB, that owners lend
BANDWIDTH = (50.0, 100.0, 400.0, 900.0)  # GB a second
SIZES = (0.5, 1, 2, 4, 5, 5, 8, 9, 14, 20, 40)  # GB
COPIES_MAX = 4  # machines with the files of a model
DISK = 2 * GB  # bytes a second, that a machine loads
START = 2.0  # seconds to load a model, and those that the disk takes
UNLOAD = 0.5  # seconds
SLOTS = 4
DRIFT = 600.0  # seconds after which some models change places in the order of demand
DRIFTING = 25  # pairs


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a model: when it arrives, and how long it runs."""

    at: float
    model: str
    seconds: float


def make_machines(random: Random, machines: int, models: int) -> list[Machine]:
    """Return machines with files of models, each on one that can load it at least."""
    memory = [random.choice(MEMORY) * GB for _ in range(machines)]
    files: list[list[LoadableModel]] = [[] for _ in range(machines)]
    for number in range(models):
        size = int(random.choice(SIZES) * GB)
        model = LoadableModel(f"model-{number}", size, context=32768, cache=50_000)
        need = model.memory(4096, SLOTS)
        able = [place for place, each in enumerate(memory) if each >= need]
        for having in random.sample(
            able, min(len(able), random.randint(1, COPIES_MAX))
        ):
            files[having].append(model)
    return [
        Machine(
            f"shoal:m{number}/*models",
            f"m{number}",
            ModelLibrary(
                tuple(files[number]),
                memory[number],
                random.choice(BANDWIDTH),
                slots=SLOTS,
            ),
        )
        for number in range(machines)
    ]


def make_requests(
    random: Random, models: int, hours: float, rate: float
) -> list[Request]:
    """Return requests with the demand of Zipf's law, whose order drifts."""
    names = [f"model-{number}" for number in range(models)]
    random.shuffle(names)
    weights = list(accumulate(1 / rank for rank in range(1, models + 1)))
    requests = []
    now, drift = 0.0, DRIFT
    while (now := now + random.expovariate(rate)) < hours * HOUR:
        if now > drift:
            drift += DRIFT
            for _ in range(DRIFTING):
                one, other = random.sample(range(models), 2)
                names[one], names[other] = names[other], names[one]
        (model,) = random.choices(names, cum_weights=weights)
        requests.append(Request(now, model, random.uniform(2.0, 20.0)))
    return requests


@dataclass(slots=True)
class Copy:
    """A loaded model."""

    memory: int
    since: float
    used: float
    running: int = 0


@dataclass(slots=True)
class Station:
    """A machine, what it has loaded, and its orders under way."""

    machine: Machine
    loaded: dict[str, Copy] = field(default_factory=dict)
    ordered: dict[str, ModelOrder] = field(default_factory=dict)
    takes_orders: bool = True
    absent: bool = False
    life: int = 0  # counts how often it was lost

    @property
    def used(self) -> int:
        """The memory that is taken, by loads under way too."""
        loading = sum(
            self.need(name)
            for name, order in self.ordered.items()
            if order.action is ModelAction.LOAD
        )
        return loading + sum(each.memory for each in self.loaded.values())

    @property
    def coming(self) -> int:
        """The memory of models that are being unloaded."""
        return sum(
            self.loaded[name].memory
            for name, order in self.ordered.items()
            if order.action is ModelAction.UNLOAD
        )

    def model(self, name: str) -> LoadableModel:
        """Return a model of its library."""
        model = self.machine.library.find(name)
        assert model is not None
        return model

    def need(self, name: str) -> int:
        """Return the memory that a model takes here."""
        library = self.machine.library
        return self.model(name).memory(library.context, library.slots)

    def idle(self) -> list[str]:
        """Return the models that may be unloaded."""
        return [
            name
            for name, each in self.loaded.items()
            if not each.running and name not in self.ordered
        ]

    def seen(self) -> Machine:
        """Return the machine as the coordinator sees it."""
        loaded = {
            name: LoadedModel(each.memory, each.since, each.used, each.running > 0)
            for name, each in self.loaded.items()
        }
        machine = self.machine
        return Machine(
            machine.id,
            machine.name,
            machine.library,
            loaded,
            dict(self.ordered),
            self.takes_orders,
        )


class Policy(Protocol):
    """Decides what is loaded where."""

    def decide(self, fleet: "Fleet") -> float:
        """Give orders, and return when to decide again at the latest."""


@dataclass(slots=True)
class Fleet:
    """The machines, and the requests that wait or run."""

    stations: dict[str, Station]
    policy: Policy
    now: float = 0.0
    waiting: dict[str, deque[Request]] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)  # seconds, of each that started
    cold: int = 0  # requests whose model was loaded nowhere
    measured_after: float = 0.0  # no earlier request, load or unload is counted
    loads: int = 0
    unloads: int = 0
    changed: set[str] = field(default_factory=set)  # machines, since the last decision
    _copies: dict[str, dict[str, Station]] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _again: float = inf

    def run(self, requests: Sequence[Request], rest: float = HOUR) -> None:
        """Let requests arrive, and go on for a while, or until nothing happens."""
        self.changed |= self.stations.keys()
        self._decide()
        for request in requests:
            self.at(request.at, partial(self._arrive, request))
        last = requests[-1].at + rest
        while self._events and self._events[0][0] <= last:
            self.now, _, act = heappop(self._events)
            act()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        heappush(self._events, (when, next(self._numbers), act))

    def copies(self, name: str) -> list[Station]:
        """Return the machines that run requests for a model."""
        holders = self._copies.get(name, {}).values()
        return [each for each in holders if each.takes_orders]

    def _arrive(self, request: Request) -> None:
        if self.now >= self.measured_after:
            self.cold += not self.copies(request.model)
        self.waiting.setdefault(request.model, deque()).append(request)
        self._start(request.model)
        if request.model in self.waiting:
            self._decide()

    def _start(self, name: str) -> None:
        """Start what waits for a model, where most slots are free."""
        holders = self.copies(name) if name in self.waiting else []
        while holders and name in self.waiting:
            station = min(holders, key=lambda each: each.loaded[name].running)
            copy = station.loaded[name]
            if copy.running == SLOTS:
                return
            request = self.waiting[name].popleft()
            if not self.waiting[name]:
                del self.waiting[name]
            copy.running += 1
            copy.used = self.now
            self.changed.add(station.machine.id)
            if request.at >= self.measured_after:
                self.waits.append(self.now - request.at)
            self.at(
                self.now + request.seconds, partial(self._end, station, copy, request)
            )

    def _end(self, station: Station, copy: Copy, request: Request) -> None:
        copy.running -= 1
        copy.used = self.now
        self.changed.add(station.machine.id)
        if station.loaded.get(request.model) is copy:
            self._start(request.model)
        if self.waiting:
            self._decide()

    def _decide(self) -> None:
        again = self.policy.decide(self)
        if again < inf and again != self._again:
            self.at(again, self._on_timer)
        self._again = again

    def _on_timer(self) -> None:
        if self.now >= self._again:  # else another timer has come in its place
            self._decide()

    def order(self, station: Station, work: ModelOrder) -> None:
        """Let a machine load or unload a model."""
        name, life = work.name, station.life
        assert name not in station.ordered
        assert not station.absent
        station.ordered[name] = work
        self.changed.add(station.machine.id)
        if work.action is ModelAction.UNLOAD:
            assert not station.loaded[name].running
            del self._copies[name][station.machine.id]
            self.unloads += self.now >= self.measured_after
            self.at(self.now + UNLOAD, partial(self._unloaded, station, name, life))
            return
        assert station.used <= station.machine.library.memory
        self.loads += self.now >= self.measured_after
        ready = self.now + START + station.model(name).size / DISK
        self.at(ready, partial(self._loaded, station, name, life))

    def _loaded(self, station: Station, name: str, life: int) -> None:
        if station.life != life:
            return
        del station.ordered[name]
        station.loaded[name] = Copy(station.need(name), self.now, self.now)
        self._copies.setdefault(name, {})[station.machine.id] = station
        self.changed.add(station.machine.id)
        self._start(name)
        self._decide()

    def _unloaded(self, station: Station, name: str, life: int) -> None:
        if station.life != life:
            return
        del station.ordered[name], station.loaded[name]
        self.changed.add(station.machine.id)
        self._decide()

    def lose(self, station: Station, seconds: float) -> None:
        """Lose a machine with all that it has loaded, for a while."""
        station.life += 1
        station.loaded.clear()
        station.ordered.clear()
        station.absent = True
        for each in self._copies.values():
            each.pop(station.machine.id, None)
        self._on_change(station)
        self.at(self.now + seconds, partial(self._return, station))

    def _return(self, station: Station) -> None:
        station.absent = False
        self._on_change(station)

    def pause(self, station: Station, seconds: float) -> None:
        """Let a machine take no orders for a while."""
        station.takes_orders = False
        self._on_change(station)
        self.at(self.now + seconds, partial(self._resume, station))

    def _resume(self, station: Station) -> None:
        station.takes_orders = True
        self._on_change(station)

    def _on_change(self, station: Station) -> None:
        self.changed.add(station.machine.id)
        for name in [*self.waiting]:
            self._start(name)
        self._decide()


@dataclass(slots=True)
class Placing:
    """The policy of the pool."""

    deployments: Mapping[str, DeploymentSet]
    rules: PlacementRules
    unplaced: Mapping[str, str] = field(default_factory=dict)
    _machines: dict[str, Machine] = field(default_factory=dict)

    def decide(self, fleet: Fleet) -> float:
        for name in fleet.changed:
            station = fleet.stations[name]
            if station.absent:
                self._machines.pop(name, None)
            else:
                self._machines[name] = station.seen()
        fleet.changed.clear()
        demands = {
            name: Demand(len(requests), fleet.now - requests[0].at)
            for name, requests in fleet.waiting.items()
        }
        machines = [*self._machines.values()]
        placement = place(machines, demands, self.deployments, fleet.now, self.rules)
        self.unplaced = placement.unplaced
        for work, _ in placement.orders:
            fleet.order(fleet.stations[work.machine], work)
        return placement.again


@dataclass(slots=True)
class Evicting:
    """A policy that loads what is waited for, and evicts what has the least value."""

    homes: Callable[[str], Sequence[Station]]
    """The machines that may load a model."""

    value: Callable[[Fleet, Station, str], float]
    """Of what a machine has loaded."""

    _promised: dict[str, Station] = field(default_factory=dict)

    def decide(self, fleet: Fleet) -> float:
        for name in fleet.waiting:
            homes = self.homes(name)
            if not any(name in each.loaded or name in each.ordered for each in homes):
                self._load(fleet, name, homes)
        return inf

    def _load(self, fleet: Fleet, name: str, homes: Sequence[Station]) -> None:
        station = self._promised.get(name)
        if station is None:
            choices = [
                (min((value for value, _ in victims), default=inf), place, victims)
                for place, each in enumerate(homes)
                if (victims := self._victims(fleet, each, name)) is not None
            ]
            if not choices:
                return
            _, place, victims = min(choices, key=lambda each: (-each[0], each[1]))
            station = self._promised[name] = homes[place]
            for _, victim in victims:
                fleet.order(station, _work(ModelAction.UNLOAD, victim, station))
        if station.need(name) <= station.machine.library.memory - station.used:
            del self._promised[name]
            fleet.order(station, _work(ModelAction.LOAD, name, station))

    def _victims(
        self, fleet: Fleet, station: Station, name: str
    ) -> list[tuple[float, str]] | None:
        """Return what to evict for a model, with negated values; None: too little."""
        free = station.machine.library.memory - station.used + station.coming
        for other, where in self._promised.items():
            if where is station:
                free -= station.need(other)
        shortage = station.need(name) - free
        idle = sorted(
            (self.value(fleet, station, each), each) for each in station.idle()
        )
        victims = []
        for value, victim in idle:
            if shortage > 0:
                victims.append((-value, victim))
                shortage -= station.loaded[victim].memory
        return None if shortage > 0 else victims


def _work(action: ModelAction, name: str, station: Station) -> ModelOrder:
    return ModelOrder(action, name, station.machine.id)


def least_recently_used(stations: Sequence[Station]) -> Evicting:
    """Return a policy by which each model is loaded on one machine only."""
    homes: dict[str, list[Station]] = {}
    for station in sorted(stations, key=lambda each: -each.machine.library.memory):
        for model in station.machine.library.models:
            homes.setdefault(model.name, []).append(station)
    home = {
        name: [each[crc32(name.encode()) % len(each)]]
        for name, having in homes.items()
        if (each := [s for s in having if s.need(name) <= s.machine.library.memory])
    }
    return Evicting(
        home.__getitem__, lambda fleet, station, name: station.loaded[name].used
    )


def oracle(stations: Sequence[Station], requests: Sequence[Request]) -> Evicting:
    """Return a policy that knows the next hour's requests (Bélády's algorithm, 1966).

    It evicts, on any machine with the files, what is not requested for longest.
    """
    times: dict[str, list[float]] = {}
    for request in requests:
        times.setdefault(request.model, []).append(request.at)
    homes: dict[str, list[Station]] = {}
    for station in stations:
        for model in station.machine.library.models:
            if station.need(model.name) <= station.machine.library.memory:
                homes.setdefault(model.name, []).append(station)

    def value(fleet: Fleet, station: Station, name: str) -> float:
        place = bisect_left(times.get(name, []), fleet.now)
        after = (
            times[name][place] - fleet.now if place < len(times.get(name, [])) else inf
        )
        if name in fleet.waiting:
            after = 0.0
        if after > HOUR:  # which it does not know
            return station.loaded[name].used - fleet.now - HOUR
        return -after

    return Evicting(homes.__getitem__, value)
