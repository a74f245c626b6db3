"""Laws of placements, for any machines, demand and deployments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import ModelAction, ModelOrder
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.pool.models.machine import LoadedModel, Machine, PlacementRules, Room
from shoal.pool.models.placement import Demand, Placement, place, with_orders

NOW = 10_000.0
RULES = PlacementRules()
NAMES = tuple("abcdefgh")
GB = 10**9


@dataclass(frozen=True)
class Situation:
    """What a placement is made from."""

    machines: Sequence[Machine]
    demands: Mapping[str, Demand]
    deployments: Mapping[str, DeploymentSet]

    def place(self) -> Placement:
        return place(self.machines, self.demands, self.deployments, NOW, RULES)

    def after(self, placement: Placement) -> "Situation":
        return replace(self, machines=with_orders(self.machines, placement.orders))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    random = Random(draw(st.integers(0, 2**32)))
    sizes = {name: random.choice([1, 2, 3, 5, 8]) * GB for name in NAMES}
    machines = [
        _machine(random, f"m{number}", sizes)
        for number in range(draw(st.integers(1, 6)))
    ]
    demands = {
        name: Demand(
            random.choice([0, 0, 1, 5]), random.uniform(0, 60), random.random()
        )
        for name in random.sample(NAMES, draw(st.integers(0, len(NAMES))))
    }
    deployments = {
        name: DeploymentSet(
            name,
            random.choice([0, 1, 2, 3]),
            "al",
            most=random.choice([0, 0, 3]),
            on=tuple(each.name for each in machines if random.random() < 0.5)
            if random.random() < 0.3
            else (),
            pinned=random.random() < 0.5,
            idle=random.choice([None, 100.0, 600.0]),
            context=random.choice([0, 0, 2048, 8192]),
            slots=random.choice([0, 0, 2]),
            exclusive_group=random.choice(["", "gpu"]),
        )
        for name in random.sample(NAMES, draw(st.integers(0, 4)))
    }
    return Situation(machines, demands, deployments)


def _machine(random: Random, name: str, sizes: Mapping[str, int]) -> Machine:
    files = random.sample(NAMES, random.randint(0, len(NAMES)))
    library = ModelLibrary(
        tuple(
            LoadableModel(each, sizes[each], context=32768, cache=100_000)
            for each in files
        ),
        random.choice([0, 4, 8, 8, 16]) * GB,
        random.choice([0.0, 50.0, 400.0]),
        fetches=random.random() < 0.3,
    )
    loaded: dict[str, LoadedModel] = {}
    ordered: dict[str, ModelOrder] = {}
    machine = Machine(f"{name}/*models", name, library)
    for each in random.sample(NAMES, len(NAMES)):
        known = library.find(each)
        memory = known.memory(4096, 1) if known else 10**9
        since = NOW - random.choice([10, 100, 1000, 5000])
        used = since + random.random() * (NOW - since)
        model = LoadedModel(memory, since, used, random.random() < 0.3, 4096, 1)
        if random.random() < 0.4:
            trial = replace(machine, loaded={**loaded, each: model})
            if _room(trial).free >= 0:
                loaded[each] = model
                machine = trial
        if random.random() < 0.2:
            unloads = each in loaded and known
            if each in loaded and not unloads:
                continue
            action = ModelAction.UNLOAD if unloads else ModelAction.LOAD
            if action is ModelAction.LOAD and not known:
                continue
            room_for = random.choice(["", *NAMES]) if unloads else ""
            order = ModelOrder(action, each, machine.id, room_for=room_for)
            trial = replace(machine, ordered={**ordered, each: order})
            if _room(trial).free >= 0:
                ordered[each] = order
                machine = trial
    failed = {
        each: (NOW + random.choice([-5, 5]), "out of memory") for each in NAMES[:2]
    }
    return replace(
        machine,
        failed=failed if random.random() < 0.3 else {},
        takes_orders=random.random() < 0.8,
    )


def _room(machine: Machine) -> Room:
    return Room(machine, (), lambda name: None, NOW, RULES)


def _largest(machines: Sequence[Machine], name: str) -> LoadableModel | None:
    found = [each.library.find(name) for each in machines]
    return max(
        (each for each in found if each), key=lambda each: each.size, default=None
    )


@given(situations())
def test_a_machine_loads_no_two_models_of_a_group(situation: Situation) -> None:
    grouped = {
        name: structs.replace(each, replicas=each.replicas + 1, exclusive_group="gpu")
        for name, each in situation.deployments.items()
    }
    placement = replace(situation, deployments=grouped).place()
    orders = [each.work for each in placement.orders]

    for order in orders:
        if order.action is not ModelAction.LOAD or order.name not in grouped:
            continue
        (machine,) = (each for each in situation.machines if each.id == order.machine)
        beside = machine.loaded.keys() | machine.ordered.keys()
        beside |= {each.name for each in orders if each.machine == order.machine}
        assert (beside & grouped.keys()) == {order.name}


def test_model_that_the_library_lacks_takes_none_of_its_memory() -> None:
    library = ModelLibrary((LoadableModel("a", GB),), 10 * GB)
    loaded = LoadedModel(0, 0.0, 0.0, context=4096, slots=4)

    assert _room(Machine("m", "m", library, {"of a server": loaded})).free == 10 * GB
    assert _room(Machine("m", "m", library, {"a": loaded})).free < 10 * GB


@given(situations())
def test_orders_never_need_more_memory_than_a_machine_has(situation: Situation) -> None:
    orders = [each.work for each in situation.place().orders]

    after = situation.after(situation.place())
    for machine in after.machines:
        if any(
            order.machine == machine.id and order.action is ModelAction.LOAD
            for order in orders
        ):
            room = Room(
                machine, (), lambda name: _largest(after.machines, name), NOW, RULES
            )
            assert room.free >= 0


@given(situations())
def test_busy_young_pinned_and_awaited_models_are_not_unloaded(
    situation: Situation,
) -> None:
    machines = {each.id: each for each in situation.machines}
    unloads = [
        order
        for order, _ in situation.place().orders
        if order.action is ModelAction.UNLOAD
    ]

    for order in unloads:
        machine = machines[order.machine]
        loaded = machine.loaded[order.name]
        assert machine.takes_orders
        assert not loaded.busy
        assert NOW - loaded.since >= RULES.stays
        assert not situation.demands.get(order.name, Demand()).waiting
        assert machine.library.find(order.name) is not None
    for name, deployment in situation.deployments.items():
        if deployment.pinned and any(order.name == name for order in unloads):
            before = _replicas(situation, deployment)
            gone = {order.machine for order in unloads if order.name == name}
            assert len(before - gone) >= min(len(before), _least(deployment))


def _least(deployment: DeploymentSet) -> int:
    return max(deployment.replicas, int(deployment.most > 0))


def _replicas(situation: Situation, deployment: DeploymentSet) -> set[str]:
    """Return the machines with a replica as it is asked for."""
    return {
        each.id
        for each in situation.machines
        if each.takes_orders
        and (not deployment.on or each.name in deployment.on)
        and _has(each, deployment)
    }


def _has(machine: Machine, deployment: DeploymentSet) -> bool:
    order = machine.ordered.get(deployment.name)
    if order is not None and order.action is ModelAction.UNLOAD:
        return False
    loaded = machine.loaded.get(deployment.name)
    if loaded is None:
        return order is not None
    return loaded.context >= deployment.context and loaded.slots >= deployment.slots


@given(situations())
def test_second_placement_adds_nothing_to_orders_under_way(
    situation: Situation,
) -> None:
    first = situation.place()

    second = situation.after(first).place()

    assert second.orders == ()
    assert situation.place() == first  # the same each time


@given(situations())
def test_each_machine_has_one_order_for_a_model(situation: Situation) -> None:
    orders = [each.work for each in situation.place().orders]

    pairs = [(order.machine, order.name) for order in orders]
    assert len(set(pairs)) == len(pairs)
    for machine in situation.machines:
        assert not {(machine.id, name) for name in machine.ordered} & set(pairs)
        if not machine.takes_orders:
            assert machine.id not in {order.machine for order in orders}


@given(situations())
def test_loads_are_where_files_and_operators_allow_them(situation: Situation) -> None:
    machines = {each.id: each for each in situation.machines}
    for order, _ in situation.place().orders:
        machine = machines[order.machine]
        deployment = situation.deployments.get(order.name)
        if order.action is not ModelAction.LOAD:
            continue
        assert machine.library.find(order.name) or (
            machine.library.fetches and _largest(situation.machines, order.name)
        )
        assert machine.failed.get(order.name, (0.0, ""))[0] <= NOW
        if deployment is not None:
            assert not deployment.on or machine.name in deployment.on
            asked = (deployment.context, deployment.slots)
            assert (order.context, order.slots) == asked


@given(situations())
def test_awaited_model_is_loaded_or_a_reason_given(situation: Situation) -> None:
    placement = situation.place()
    after = situation.after(placement)

    for name, demand in situation.demands.items():
        available = any(
            each.takes_orders and (name in each.loaded or (name in each.ordered))
            for each in after.machines
        )
        if demand.waiting and not available:
            assert name in placement.unplaced or name in placement.pending
        if name in placement.unplaced:
            assert not any(
                order.name == name and order.action is ModelAction.LOAD
                for order, _ in placement.orders
            )


@given(situations())
def test_pinned_model_is_there_if_a_machine_fits_it(situation: Situation) -> None:
    placement = situation.place()
    after = situation.after(placement)

    for name, deployment in situation.deployments.items():
        having = _replicas(after, deployment) | {
            each.id
            for each in after.machines
            if any(order.room_for == name for order in each.ordered.values())
        }
        if not deployment.pinned or len(having) >= _least(deployment):
            continue
        reason = placement.pending.get(name) or placement.unplaced[name]
        if reason.startswith("waits until"):
            continue
        for machine in after.machines:
            waits = any(
                each.action is ModelAction.UNLOAD for each in machine.ordered.values()
            )
            if waits or not _may_get(situation, machine, deployment):
                continue
            room = Room(
                machine,
                {each for each, d in situation.demands.items() if d.waiting},
                lambda name: _largest(situation.machines, name),
                NOW,
                RULES,
                pinned=_pinned(situation),
            )
            need = room.need(name, deployment.context, deployment.slots)
            keep = sum(
                room.taken(each, loaded)
                for each, loaded in machine.loaded.items()
                if each not in room.unloading and not room.may_unload(each, loaded)
            )
            others = sum(
                room.need(each, *_settings(situation, machine, each))
                for each in room.loading | _pinned(situation) - {name}
                if each not in machine.loaded
            )
            assert need > room.capacity - keep - others


def _may_get(situation: Situation, machine: Machine, deployment: DeploymentSet) -> bool:
    name = deployment.name
    return (
        machine.takes_orders
        and name not in machine.ordered
        and name not in machine.loaded
        and machine.failed.get(name, (0.0, ""))[0] <= NOW
        and (not deployment.on or machine.name in deployment.on)
        and (
            machine.library.find(name) is not None
            or (
                machine.library.fetches
                and _largest(situation.machines, name) is not None
            )
        )
    )


def _pinned(situation: Situation) -> set[str]:
    return {each.name for each in situation.deployments.values() if each.pinned}


def _settings(situation: Situation, machine: Machine, name: str) -> tuple[int, int]:
    """Return the context and slots with which a machine loads, or would load, it."""
    asked = machine.ordered.get(name) or situation.deployments.get(name)
    return (asked.context, asked.slots) if asked else (0, 0)
