"""Groups of machines that run a model: from the demand to the load, and back."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import ModelAction, ModelOrder
from shoal.domain.worker import (
    LentShard,
    LoadableModel,
    MeasuredLink,
    MemoryLoan,
    ModelLayers,
    ModelLibrary,
)
from shoal.pool.models.groups import form_groups, plan_group
from shoal.pool.models.machine import LoadedModel, Machine
from shoal.pool.models.placement import Demand, Placement, place, with_orders
from shoal.pool.models.split import ModelSplit

NOW = 100_000.0
GB = 10**9
RPC = "ggml-rpc 8.0.0"
BIG = LoadableModel(
    *("big", 10 * GB), cache=1, layers=ModelLayers(((10, GB),), last=GB // 10)
)
WAITED = {"big": Demand(waiting=1, waited=1.0)}


def machine(
    name: str,
    lends: float = 0,
    memory: float = 4,
    models: tuple[LoadableModel, ...] = (),
    protocol: str = RPC,
    runners: tuple[str, ...] = (),
    **fields: Any,
) -> Machine:
    loan = MemoryLoan(protocol, f"key of {name}", int(lends * GB), runners)
    library = ModelLibrary(models, int(memory * GB), 100.0, loan=loan)
    return Machine(f"shoal:{name}/*models", name, library, **fields)


ANNA = machine("anna", models=(BIG,))
BEN = machine("ben", 5)
CLEO = machine("cleo", 5)


def placed(
    *machines: Machine, deployed: DeploymentSet | None = None, now: float = NOW
) -> Placement:
    deployments = {deployed.name: deployed} if deployed else {}
    single = place(machines, WAITED, deployments, now)
    return form_groups(machines, single, deployments, now)


def works(placement: Placement) -> list[ModelOrder]:
    return [each.work for each in placement.orders]


def carried_out(machine: Machine, *, used: bool = False) -> Machine:
    """Return a machine that has lent, or loaded or freed, what it was told."""
    loan = machine.library.loan
    assert loan is not None
    shards, groups, loaded = [*loan.shards], [*loan.groups], {**machine.loaded}
    for order in machine.ordered.values():
        match order.action:
            case ModelAction.LEND:
                lent = LentShard(order, (f"{machine.name}.lan",), 4711, "f" * 64, used)
                shards.append(lent)
            case ModelAction.LOAD:
                groups.append(order)
                loaded[order.name] = LoadedModel(order.own_memory, NOW, NOW)
            case ModelAction.UNLOAD:
                shards = [each for each in shards if each.order.group != order.group]
    loan = structs.replace(loan, shards=tuple(shards), groups=tuple(groups))
    library = structs.replace(machine.library, loan=loan)
    return replace(machine, library=library, loaded=loaded, ordered={})


def told(machines: tuple[Machine, ...], placement: Placement) -> tuple[Machine, ...]:
    """Return machines that have carried out all orders."""
    return tuple(map(carried_out, with_orders(machines, placement.orders)))


def used(machine: Machine) -> Machine:
    """Return a machine whose shards the runner is connected to."""
    loan = machine.library.loan
    assert loan is not None
    shards = tuple(structs.replace(each, used=True) for each in loan.shards)
    library = structs.replace(
        machine.library, loan=structs.replace(loan, shards=shards)
    )
    return replace(machine, library=library)


def test_group_is_formed_in_two_steps() -> None:
    machines = ANNA, BEN, CLEO

    first = placed(*machines)

    lent = works(first)
    assert [(each.action, each.machine) for each in lent] == [
        (ModelAction.LEND, BEN.id),
        (ModelAction.LEND, CLEO.id),
    ]
    assert {each.group for each in lent} == {"big@100000000"}
    assert {each.runner for each in lent} == {"key of anna"}
    shards = lent[0].shards
    assert [each.layers for each in shards] == [4, 3, 3]
    assert not first.unplaced
    assert first.pending["big"].startswith("is being split over ben (4.0 GB)")

    done = {"big": (NOW + 5, "")}  # as the pool notes the end of an order
    anna, ben, cleo = told(machines, first)
    soon = placed(anna, replace(BEN, failed=done), replace(cleo, failed=done))
    assert not soon.orders
    assert soon.pending == {"big": "is being split: waits for ben"}
    second = placed(anna, replace(ben, failed=done), cleo, now=NOW + 1)

    (load,) = works(second)
    assert (load.action, load.machine) == (ModelAction.LOAD, ANNA.id)
    assert [each.hosts for each in load.shards] == [("ben.lan",), ("cleo.lan",), ()]
    assert load.group == lent[0].group

    running = tuple(map(used, told(told(machines, first), second)))
    third = placed(*running, now=NOW + 2)

    assert not third.orders
    assert not third.pending
    assert running[0].loaded["big"].memory == shards[-1].memory


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ((), False),
        ((structs.replace(BIG, size=9 * GB),), False),
        ((structs.replace(BIG, digest="sha256:other"),), False),
        ((structs.replace(BIG, digest="sha256:it"),), True),
        ((BIG,), True),  # it has not been hashed
    ],
    ids=["none", "other size", "other contents", "same contents", "unknown contents"],
)
def test_lenders_copy_what_another_machine_has_too(
    others: tuple[LoadableModel, ...], found: bool
) -> None:
    known = structs.replace(BIG, digest="sha256:it")
    anna = machine("anna", models=(known,))

    orders = works(placed(anna, BEN, machine("cleo", 5, memory=1, models=others)))

    assert [each.has_copies for each in orders] == [found, found]
    assert {each.digest for each in orders} == {"sha256:it"}
    assert [[*each.own_layers] for each in orders] == [[3, 4, 5, 6], [7, 8, 9]]


def test_nothing_more_is_ordered_while_a_group_forms() -> None:
    machines = ANNA, BEN, CLEO
    first = placed(*machines)

    again = placed(*with_orders(machines, first.orders))

    assert not again.orders
    assert again.pending == {"big": "is being split: waits for ben, cleo"}


def test_group_that_lost_a_machine_is_freed_and_formed_again() -> None:
    dora = machine("dora", 5)
    machines = ANNA, BEN, CLEO, dora
    first = placed(*machines)
    anna, ben, _, dora = told(machines, first)

    lost = placed(anna, ben, dora)  # cleo is gone

    (freed,) = works(lost)
    assert (freed.action, freed.machine) == (ModelAction.UNLOAD, BEN.id)
    assert freed.group == works(first)[0].group
    assert lost.pending == {"big": "waits until ben freed its parts"}
    after = told((anna, ben, dora), lost)
    again = works(placed(*after, now=NOW + 1))
    assert {each.machine for each in again} == {BEN.id, dora.id}
    assert {each.group for each in again} == {"big@100001000"}


def test_part_is_kept_while_its_runner_is_connected() -> None:
    """A runner may be about to reconnect to a coordinator that was restarted."""
    machines = ANNA, BEN, CLEO
    _, ben, cleo = told(machines, placed(*machines))

    assert not placed(used(ben), used(cleo)).orders
    assert [each.action for each in works(placed(ben, cleo))] == [
        ModelAction.UNLOAD,
        ModelAction.UNLOAD,
    ]


def test_one_machine_is_enough_where_the_model_fits() -> None:
    large = machine("large", memory=20, models=(BIG,))

    (load,) = works(placed(ANNA, BEN, CLEO, large))

    assert (load.machine, load.shards) == (large.id, ())


def test_only_machines_that_understand_each_other_form_a_group() -> None:
    other = machine("other", 50, protocol="ggml-rpc 9.0.0")
    closed = machine("closed", 50, runners=("key of somebody",))
    opened = machine("opened", 9, runners=("key of anna",))

    assert not placed(ANNA, other, closed).orders
    lent = works(placed(ANNA, other, closed, opened))
    assert [each.machine for each in lent] == [opened.id]


def away(machine: Machine, seconds: float, **others: float) -> Machine:
    """Return a machine that is as far from the coordinator, and from others."""
    library = machine.library
    assert library.loan is not None
    known = tuple(
        MeasuredLink(f"shoal:{name}/*models", each) for name, each in others.items()
    )
    loan = structs.replace(library.loan, round_trip=seconds, links=known)
    return replace(machine, library=structs.replace(library, loan=loan))


def seconds_of(*machines: Machine) -> float:
    found = plan_group(machines, "big", (), NOW)
    assert isinstance(found, ModelSplit), found
    return found.seconds


def test_way_over_the_coordinator_counts_until_one_is_measured() -> None:
    near = seconds_of(ANNA, BEN, CLEO)
    ben, cleo = away(BEN, 0.01), away(CLEO, 0.04)

    assumed = seconds_of(away(ANNA, 0.02), ben, cleo)
    assert assumed == pytest.approx(near + 0.03 + 0.06)

    measured = seconds_of(away(ANNA, 0.02, ben=0.001), ben, cleo)
    assert measured == pytest.approx(near + 0.001 + 0.06)


def test_measured_rate_is_part_of_the_plan() -> None:
    loan = ANNA.library.loan
    assert loan is not None
    links = tuple(MeasuredLink(each.id, 0.0, 1e9) for each in (BEN, CLEO))
    library = structs.replace(ANNA.library, loan=structs.replace(loan, links=links))

    found = plan_group((replace(ANNA, library=library), BEN, CLEO), "big", (), NOW)

    assert isinstance(found, ModelSplit)
    assert found.load_seconds == 7.0  # layers of a GB


def test_only_a_measured_way_is_too_long() -> None:
    ben, cleo = away(BEN, 5.0), away(CLEO, 5.0)
    assert placed(ANNA, ben, cleo).orders

    waiting = placed(away(ANNA, 5.0, ben=0.3), ben, cleo)
    assert not waiting.orders
    assert waiting.pending["big"].endswith("ben is 0.3 s away")


def test_requests_wait_while_the_machines_that_lend_have_too_little() -> None:
    """One that was lost may come back."""
    placement = placed(ANNA, BEN)

    assert not placement.unplaced
    assert placement.pending == {
        "big": "fits on no machine (needs 11.0 GB: anna has 4.0 GB), and needs 10.1 "
        "GB: anna has 3.6 GB, those that lend have 4.5 GB (ben 4.5 GB)"
    }


def test_requests_fail_where_none_lends() -> None:
    placement = placed(ANNA, machine("dora", 0))

    assert not placement.pending
    assert placement.unplaced == {"big": "needs 11.0 GB: anna has 4.0 GB"}


def test_group_is_of_the_machines_that_a_deployment_names() -> None:
    deployed = DeploymentSet("big", 1, "al", on=("anna", "ben"))
    large = machine("large", 20)

    assert not placed(ANNA, BEN, large, deployed=deployed).orders
    for on in (("anna", "large"), ("large",)):  # the latter lends to one with the file
        wide = structs.replace(deployed, on=on)
        machines = ANNA, BEN, large
        lent = placed(*machines, deployed=wide)
        assert [each.machine for each in works(lent)] == [large.id]
        loaded = placed(*told(machines, lent), deployed=wide, now=NOW + 1)
        running = told(told(machines, lent), loaded)
        assert not placed(*map(used, running), deployed=wide, now=NOW + 2).orders


def test_runner_unloads_what_it_does_not_use() -> None:
    small = LoadableModel("small", 2 * GB, cache=1)
    old = LoadedModel(3 * GB, NOW - 5000, NOW - 400, context=4096, slots=1)
    full = machine("anna", models=(BIG, small), loaded={"small": old})
    ben = machine("ben", 8)

    first = placed(full, ben)

    (unload,) = works(first)
    assert (unload.action, unload.name) == (ModelAction.UNLOAD, "small")
    assert unload.room_for == "big"
    waiting = placed(*with_orders((full, ben), first.orders))
    assert not waiting.orders
    assert waiting.pending == {"big": "waits until anna has room for a part"}


def test_runner_has_one_model_of_those_that_exclude_each_other() -> None:
    """There is memory for both; the other is unloaded, if it is not busy."""
    small = LoadableModel("small", GB // 100)
    deployments = {
        name: DeploymentSet(name, each, "al", exclusive_group="one")
        for name, each in (("big", 1), ("small", 0))
    }
    anna = machine("anna", models=(BIG, small))

    def formed(*machines: Machine, now: float = NOW) -> Placement:
        single = place(machines, WAITED, deployments, now)
        return form_groups(machines, single, deployments, now)

    for busy in (False, True):
        loaded = LoadedModel(small.size, NOW - 900, NOW - 900, busy)
        occupied = replace(anna, loaded={"small": loaded})
        found = [
            (each.action, each.name) for each in works(formed(occupied, BEN, CLEO))
        ]
        assert found == ([] if busy else [(ModelAction.UNLOAD, "small")])

    machines = told((anna, BEN, CLEO), formed(anna, BEN, CLEO))
    assert machines[1].library.loan is not None
    taken = replace(machines[0], loaded={"small": LoadedModel(small.size, NOW, NOW)})
    later = formed(taken, *machines[1:], now=NOW + 200)
    assert {each.action for each in works(later)} == {ModelAction.UNLOAD}
    later = formed(*machines, now=NOW + 200)
    assert [each.action for each in works(later)] == [ModelAction.LOAD]


def test_failed_runner_is_asked_again_later() -> None:
    failed = replace(ANNA, failed={"big": (NOW + 5, "ben: connection refused")})

    placement = placed(failed, BEN, CLEO)

    assert not placement.orders
    assert "anna failed to run it (ben: connection refused)" in placement.pending["big"]
    assert placed(failed, BEN, CLEO, now=NOW + 6).orders
