"""Groups of machines over hours: machines are lost, slow, paused, and come back.

No coordinator runs here: the machines carry out what placements order, at their pace,
and report it as real ones do.
"""

from dataclasses import dataclass, field, replace
from random import Random

from msgspec import structs

from shoal.domain.work import ModelAction, ModelOrder
from shoal.domain.worker import (
    LentShard,
    LoadableModel,
    MemoryLoan,
    ModelLayers,
    ModelLibrary,
)
from shoal.pool.models.groups import form_groups
from shoal.pool.models.machine import LoadedModel, Machine
from shoal.pool.models.orders import GROUP_PAUSE
from shoal.pool.models.placement import Demand, place

GB = 10**9
MODELS = tuple(
    LoadableModel(
        *(name, size * GB),
        context=4096,
        cache=1000,
        layers=ModelLayers(((size, GB),), last=GB // 2, states=1000, scores=1000),
    )
    for name, size in (("small", 12), ("large", 40), ("huge", 90))
)
MACHINES = 100
STEPS = 1200  # of about a second
CALM = 300  # steps at the end in which nothing happens to machines
LEFT_OUT = 60.0  # seconds that a lost machine is away at most
HANGS = 0.05  # of orders, which fail


@dataclass
class Station:
    """A machine that holds parts of models, or runs one with others."""

    machine: Machine
    doing: dict[str, tuple[float, ModelOrder]] = field(default_factory=dict)
    away_until: float = 0.0

    @property
    def loan(self) -> MemoryLoan:
        loan = self.machine.library.loan
        assert loan is not None
        return loan

    def report(self, **fields: object) -> None:
        loan = structs.replace(self.loan, **fields)
        library = structs.replace(self.machine.library, loan=loan)
        self.machine = replace(self.machine, library=library)


class Fleet:
    """The machines of a pool, and what happens to them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 1000.0
        self.loads = 0
        self.stations = {
            each.machine.id: each
            for each in (self._station(number) for number in range(MACHINES))
        }

    def _station(self, number: int) -> Station:
        files = MODELS if number % 10 == 0 else ()
        loan = MemoryLoan(
            "rpc", f"key {number}", self.random.choice((0, 8, 8, 16)) * GB
        )
        library = ModelLibrary(files, 10 * GB, self.random.choice((20, 100)), loan=loan)
        return Station(Machine(f"m{number:03}/*models", f"m{number:03}", library))

    @property
    def present(self) -> list[Station]:
        return [each for each in self.stations.values() if each.away_until <= self.now]

    def step(self, *, calm: bool) -> None:
        """Let a moment pass."""
        self.now += self.random.uniform(0.1, 2.0)
        for station in self.present:
            for name, (due, order) in [*station.doing.items()]:
                if due <= self.now:
                    del station.doing[name]
                    self._carry_out(station, order, calm=calm)
        if not calm and self.random.random() < 0.3:
            self._lose(self.random.choice(self.present))
        if not calm and self.random.random() < 0.05:
            paused = self.random.choice([*self.stations.values()])
            takes = not paused.machine.takes_orders
            paused.machine = replace(paused.machine, takes_orders=takes)
        self._end_broken_groups()
        if calm:
            for each in self.stations.values():
                each.machine = replace(each.machine, takes_orders=True)

    def order(self) -> dict[str, str]:
        """Give the orders of a placement; return what it says of models that wait."""
        machines = [
            replace(each.machine, ordered={n: o for n, (_, o) in each.doing.items()})
            for each in self.present
        ]
        loaded = {name for each in machines for name in each.loaded}
        demands = {
            each.name: Demand(0 if each.name in loaded else 1, 5.0) for each in MODELS
        }
        single = place(machines, demands, {}, self.now)
        placement = form_groups(machines, single, {}, self.now)
        for work, _ in placement.orders:
            station = self.stations[work.machine]
            assert work.name not in station.doing, "two orders about a model"
            takes = self.random.choice((0.05, 1.0, 20.0))
            station.doing[work.name] = self.now + takes, work
        return {**placement.pending, **placement.unplaced}

    def groups(self) -> list[ModelOrder]:
        return [each for station in self.present for each in station.loan.groups]

    def _carry_out(self, station: Station, order: ModelOrder, *, calm: bool) -> None:
        if not calm and self.random.random() < HANGS:
            self._note(station, order.name, "it failed")
            return
        loan = station.loan
        if order.action is ModelAction.LEND:
            shard = LentShard(order, ("host",), 1, "f")
            station.report(shards=(*loan.shards, shard))
        elif order.action is ModelAction.LOAD and self._held(order):
            loaded = LoadedModel(order.own_memory, self.now, self.now)
            names = {**station.machine.loaded, order.name: loaded}
            station.machine = replace(station.machine, loaded=names)
            station.report(groups=(*loan.groups, order))
            self.loads += 1
        elif order.action is ModelAction.LOAD:
            self._note(station, order.name, "a part was lost")
            return
        elif order.group:
            kept = [each for each in loan.shards if each.order.group != order.group]
            station.report(shards=tuple(kept))
            return
        self._note(station, order.name, "")

    def _note(self, station: Station, name: str, why: str) -> None:
        """Note the end of an order, as the pool does."""
        failed = {**station.machine.failed, name: (self.now + GROUP_PAUSE, why)}
        failed = {k: v for k, v in failed.items() if v[0] > self.now}
        station.machine = replace(station.machine, failed=failed)

    def _held(self, order: ModelOrder) -> bool:
        """Return whether all parts of a group are held, by machines that are there."""
        return all(
            (other := self.stations[shard.machine]).away_until <= self.now
            and any(each.order.group == order.group for each in other.loan.shards)
            for shard in order.shards[:-1]
        )

    def _lose(self, station: Station) -> None:
        station.away_until = self.now + self.random.uniform(1.0, LEFT_OUT)
        station.doing.clear()
        station.report(shards=(), groups=())
        station.machine = replace(station.machine, loaded={}, failed={})

    def _end_broken_groups(self) -> None:
        running = set()
        for station in self.present:
            for group in station.loan.groups:
                if self._held(group):
                    running.add(group.group)
                    continue
                kept = tuple(each for each in station.loan.groups if each is not group)
                names = {**station.machine.loaded}
                names.pop(group.name, None)
                station.report(groups=kept)
                station.machine = replace(station.machine, loaded=names)
        for station in self.present:
            shards = tuple(
                structs.replace(each, used=each.order.group in running)
                for each in station.loan.shards
            )
            station.report(shards=shards)


def test_no_model_has_two_runners_and_no_memory_is_lent_twice(seed: int) -> None:
    fleet = Fleet(Random(seed))

    for step in range(STEPS):
        fleet.step(calm=step > STEPS - CALM)
        fleet.order()
        names = [each.name for each in fleet.groups()]
        assert len(names) == len({*names}), "a model has two runners"
        for station in fleet.stations.values():
            loan = station.loan
            assert sum(each.order.own_memory for each in loan.shards) <= loan.memory

    running = fleet.groups()
    assert {each.name for each in running} == {"small", "large", "huge"}
    held = {shard.order.group for each in fleet.present for shard in each.loan.shards}
    assert held == {each.group for each in running}, "parts of other groups are left"
    assert fleet.loads > 10
