"""Which models are loaded and unloaded where, rule by rule."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from msgspec import structs

from shoal.domain.facts import DeploymentSet, JobCompleted, JobFailed
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from shoal.domain.work import HubModel, ModelAction, ModelOrder
from shoal.domain.worker import Hardware, LoadableModel, ModelLibrary
from shoal.pool.models.machine import (
    LoadedModel,
    Machine,
    MachineKind,
    PlacementRules,
    kind_of,
)
from shoal.pool.models.orders import OpenOrders
from shoal.pool.models.placement import Demand, Order, Placement, place, with_orders

NOW = 100_000.0
GB = 10**9
RULES = PlacementRules()
WAITED = {"a": Demand(waiting=1, waited=1.0)}
LOAD, UNLOAD = ModelAction.LOAD, ModelAction.UNLOAD


def machine(
    name: str = "anna",
    memory: float = 8,
    files: str = "abc",
    loaded: Mapping[str, LoadedModel] | None = None,
    *,
    bandwidth: float = 100.0,
    fetches: bool = False,
    **fields: Any,
) -> Machine:
    """Return a machine with room for ``memory / 4`` models."""
    models = tuple(LoadableModel(each, 4 * GB, cache=1) for each in files)
    size = int(memory * 1.2 * GB)  # with what a model needs beside its size
    library = ModelLibrary(models, size, bandwidth, fetches=fetches)
    return Machine(f"shoal:{name}/*models", name, library, loaded or {}, **fields)


def loaded(
    unused: float = 1000.0, *, age: float = 5000.0, busy: bool = False
) -> LoadedModel:
    memory = 4 * GB + 400_000_000 + 4096
    return LoadedModel(memory, NOW - age, NOW - unused, busy, 4096, 1)


def deployment(name: str = "a", replicas: int = 1, **fields: Any) -> DeploymentSet:
    return DeploymentSet(name, replicas, "al", **fields)


def placed(
    *machines: Machine,
    demands: Mapping[str, Demand] | None = None,
    deployed: DeploymentSet | None = None,
    rules: PlacementRules = RULES,
) -> Placement:
    deployments = {deployed.name: deployed} if deployed else {}
    return place(machines, demands or {}, deployments, NOW, rules)


def shown(placement: Placement) -> list[str]:
    """Return the orders in short, such as ``load a on anna``."""
    return [
        f"{work.action.value} {work.name} on {work.machine[6:].partition('/')[0]}"
        for work, _ in placement.orders
    ]


def order(action: ModelAction, name: str, room_for: str = "") -> dict[str, ModelOrder]:
    return {name: ModelOrder(action, name, "", room_for=room_for)}


def test_awaited_model_is_loaded_on_a_machine_that_has_its_files() -> None:
    placement = placed(
        machine("anna", files="b"), machine("ben", files="a"), demands=WAITED
    )

    assert placement.orders == (
        Order(ModelOrder(LOAD, "a", "shoal:ben/*models"), "1 request waits for it"),
    )
    assert not placement.unplaced
    assert not placement.pending


def test_loaded_model_is_not_loaded_again_for_those_that_wait() -> None:
    waits = {"a": Demand(waiting=9, waited=99.0)}

    assert not placed(
        machine(loaded={"a": loaded()}), machine("ben"), demands=waits
    ).orders
    assert not placed(
        machine(ordered=order(LOAD, "a")), machine("ben"), demands=waits
    ).orders


HUB = HubModel("org/a-GGUF", "a.gguf", "a" * 40, 4 * GB)


def test_order_to_copy_names_where_the_files_came_from() -> None:
    library = ModelLibrary((LoadableModel("a", 4 * GB, hub=HUB),), 5 * GB)
    anna = Machine("shoal:anna/*models", "anna", library, takes_orders=False)
    ben = machine("ben", files="", fetches=True)

    (ordered,) = placed(anna, ben, demands=WAITED).orders

    assert ordered.work == ModelOrder(LOAD, "a", ben.id, hub=HUB)


def test_deployment_from_the_hub_needs_no_machine_with_the_files() -> None:
    deployed = deployment(hub=HUB)
    small = machine("anna", memory=2, files="", fetches=True)
    ben = machine("ben", files="", fetches=True)

    assert [each.work.hub for each in placed(small, ben, deployed=deployed).orders] == [
        HUB
    ]
    assert shown(placed(small, ben, deployed=deployed)) == ["load a on ben"]
    assert "needs 6.0 GB" in placed(small, deployed=deployed).unplaced["a"]
    assert "no machine" in placed(machine(files=""), deployed=deployed).unplaced["a"]


PREFERS = PlacementRules(preference=(MachineKind.GPU, MachineKind.MAC))


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"kind": MachineKind.MAC}, {"kind": MachineKind.GPU}),
        ({"kind": MachineKind.CPU}, {"kind": MachineKind.MAC}),
        ({}, {"kind": MachineKind.MAC}),  # of an unknown kind
        ({"kind": MachineKind.GPU}, {"kind": MachineKind.GPU, "bandwidth": 2000.0}),
        ({"kind": MachineKind.CPU}, {"bandwidth": 2000.0}),
        # What is loaded elsewhere is not unloaded for it.
        (
            {"kind": MachineKind.GPU, "memory": 4, "loaded": {"b": loaded()}},
            {"kind": MachineKind.CPU},
        ),
    ],
)
def test_the_operator_prefers_kinds_of_machines(
    worse: dict[str, Any], better: dict[str, Any]
) -> None:
    machines = (
        machine("anna", **{"bandwidth": 1000.0, **worse}),
        machine("ben", **{"bandwidth": 100.0, **better}),
    )

    assert shown(placed(*machines, demands=WAITED, rules=PREFERS)) == ["load a on ben"]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("cuda", MachineKind.GPU),
        ("vulkan", MachineKind.GPU),
        ("metal", MachineKind.MAC),
        ("cpu", MachineKind.CPU),
        ("", None),
    ],
)
def test_hardware_says_of_which_kind_a_machine_is(
    backend: str, kind: MachineKind | None
) -> None:
    assert kind_of(Hardware(gpu_backend=backend)) is kind
    assert kind_of(None) is None


def grouped(*names: str, replicas: int = 1) -> dict[str, DeploymentSet]:
    return {each: deployment(each, replicas, exclusive_group="gpu") for each in names}


def shown_group(
    *machines: Machine, demands: Mapping[str, Demand] | None = None
) -> tuple[list[str], Mapping[str, str]]:
    placement = place(machines, demands or {}, grouped("a", "b"), NOW)
    return shown(placement), placement.pending


def test_models_of_a_group_exclude_each_other_on_a_machine() -> None:
    # There is memory for both.
    orders, pending = shown_group(machine(memory=16))
    assert orders == ["load a on anna"]
    assert "anna has a of the same group" in pending["b"]

    assert sorted(shown_group(machine(memory=16), machine("ben"))[0]) == [
        "load a on anna",
        "load b on ben",
    ]


def test_a_request_has_another_model_of_the_group_unloaded() -> None:
    full = machine(memory=16, loaded={"b": loaded()})

    assert shown_group(full, demands=WAITED)[0] == ["unload b on anna"]
    unloads = replace(full, ordered=order(UNLOAD, "b", "a"))
    assert shown_group(unloads, demands=WAITED)[0] == []
    gone = replace(full, loaded={})
    assert shown_group(gone, demands=WAITED)[0] == ["load a on anna"]

    busy = machine(memory=16, loaded={"b": loaded(busy=True)})
    assert shown_group(busy, demands=WAITED)[0] == []


def test_a_group_does_not_concern_others() -> None:
    waits = {"c": Demand(waiting=1, waited=1.0)}
    orders, _ = shown_group(
        machine(memory=16, loaded={"a": loaded(), "b": loaded()}), demands=waits
    )
    assert orders == ["load c on anna"]


def test_memory_is_free_once_the_order_to_unload_has_ended() -> None:
    # The machine offers the model no longer, and still unloads it.
    unloads = machine(memory=4, ordered=order(UNLOAD, "b"))

    assert not placed(unloads, demands=WAITED).orders
    assert shown(placed(replace(unloads, ordered={}), demands=WAITED)) == [
        "load a on anna"
    ]


def test_model_that_nobody_waits_for_is_not_loaded() -> None:
    assert not placed(machine(), demands={"a": Demand(busy=1.0)}).orders


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"bandwidth": 50.0}, {"bandwidth": 60.0}),
        ({"files": "b", "fetches": True}, {"bandwidth": 1.0}),
        ({"memory": 4, "loaded": {"b": loaded()}}, {"bandwidth": 1.0}),
        (
            {"memory": 4, "loaded": {"b": loaded(100.0)}},
            {"memory": 4, "loaded": {"b": loaded(1000.0)}, "bandwidth": 1.0},
        ),
        ({"ordered": order(LOAD, "b")}, {"bandwidth": 60.0}),
        ({"loaded": {"b": loaded(busy=True)}}, {"bandwidth": 60.0}),
        ({"failed": {"a": (NOW + 1, "")}}, {"bandwidth": 1.0}),
        ({"takes_orders": False}, {"bandwidth": 1.0}),
    ],
    ids=[
        "faster",
        "has files",
        "has room",
        "evicts what was unused for longer",
        "loads none",
        "is idle",
        "has not failed",
        "takes orders",
    ],
)
def test_best_machine(worse: dict[str, Any], better: dict[str, Any]) -> None:
    machines = [machine("anna", **worse), machine("ben", **better)]

    assert shown(placed(*machines, demands=WAITED))[0].endswith("on ben")
    assert shown(placed(*reversed(machines), demands=WAITED))[0].endswith("on ben")


def test_machine_that_failed_is_asked_again_later() -> None:
    failed = {"a": (NOW + 5, "out of memory")}

    placement = placed(machine(failed=failed), demands=WAITED)

    assert not placement.orders
    assert placement.unplaced == {
        "a": "needs 4.4 GB: anna failed to load it (out of memory)"
    }
    assert placement.again == NOW + 5
    later = place([machine(failed=failed)], WAITED, {}, NOW + 5)
    assert shown(later) == ["load a on anna"]


def test_a_failed_load_is_tried_again_with_more_room() -> None:
    anna = machine(loaded={"b": loaded()})
    assert shown(placed(anna, demands=WAITED)) == ["load a on anna"]

    doubted = replace(anna, doubts={"a": 1})
    assert shown(placed(doubted, demands=WAITED)) == ["unload b on anna"]
    # What fits an empty machine is tried there however often it failed.
    small = machine(memory=4, doubts={"a": 99})
    assert shown(placed(small, demands=WAITED)) == ["load a on anna"]


def test_longest_wait_goes_first() -> None:
    demands = {"a": Demand(1, 1.0), "b": Demand(1, 2.0)}

    placement = placed(machine(memory=4), demands=demands)

    assert shown(placement) == ["load b on anna"]
    assert set(placement.pending) == {"a"}


def test_model_evicts_what_was_unused_for_longest() -> None:
    full = machine(loaded={"b": loaded(500.0), "c": loaded(400.0)})

    placement = placed(full, demands=WAITED)

    assert placement.orders == (
        Order(
            ModelOrder(UNLOAD, "b", full.id, room_for="a"),
            "makes room for a: 1 request waits for it",
        ),
    )
    assert placement.pending == {"a": "waits until anna has unloaded b"}


def test_model_is_loaded_once_the_evicted_one_is_gone() -> None:
    full = machine(memory=4, loaded={"b": loaded()})
    first = placed(full, demands=WAITED)
    (unloading,) = with_orders([full], first.orders)

    assert not placed(unloading, demands=WAITED).orders
    gone = replace(unloading, loaded={}, ordered={})
    assert shown(placed(gone, demands=WAITED)) == ["load a on anna"]


def test_memory_that_is_freed_is_kept_for_its_model() -> None:
    unloading = machine(
        memory=4, loaded={"b": loaded()}, ordered=order(UNLOAD, "b", "a")
    )
    demands = {"a": Demand(1, 1.0), "c": Demand(1, 50.0)}

    placement = placed(unloading, machine("ben", 4, "ac"), demands=demands)

    assert shown(placement) == ["load c on ben"]


def test_no_more_is_evicted_than_needed() -> None:
    small = LoadedModel(GB, NOW - 5000, NOW - 1500)
    large = loaded(1000.0)
    full = machine(memory=5, files="abc", loaded={"b": small, "c": large})

    assert shown(placed(full, demands=WAITED)) == ["unload c on anna"]


@pytest.mark.parametrize(
    "kept",
    [loaded(busy=True), loaded(50.0, age=RULES.stays - 1)],
    ids=["busy", "young"],
)
def test_model_in_use_is_not_evicted(kept: LoadedModel) -> None:
    placement = placed(machine(memory=4, loaded={"b": kept}), demands=WAITED)

    assert not placement.orders
    assert placement.pending == {
        "a": "needs 4.4 GB: anna has 4.8 GB, of which 4.4 GB are in use by b"
    }
    assert not placement.unplaced


def test_placement_says_when_a_young_model_may_go() -> None:
    young = machine(memory=4, loaded={"b": loaded(50.0, age=RULES.stays - 7)})

    assert placed(young, demands=WAITED).again == NOW + 7


def test_model_that_others_wait_for_is_not_evicted() -> None:
    demands = {"a": Demand(1, 50.0), "b": Demand(1, 1.0)}

    assert not placed(machine(memory=4, loaded={"b": loaded()}), demands=demands).orders


def test_model_without_files_cannot_be_unloaded() -> None:
    foreign = machine(memory=4, files="a", loaded={"x": loaded()})

    placement = placed(foreign, demands=WAITED)

    assert not placement.orders
    assert placement.unplaced == {
        "a": "needs 4.4 GB: anna has 4.8 GB, of which 4.4 GB are kept for x"
    }


def test_model_that_fits_nowhere_is_refused_with_numbers() -> None:
    placement = placed(machine(memory=2), machine("ben", 3), demands=WAITED)

    assert placement.unplaced == {"a": "needs 4.4 GB: anna has 2.4 GB; ben has 3.6 GB"}


def test_model_without_files_anywhere_is_refused() -> None:
    machines = [machine(files="b"), machine("ben", files="", fetches=True)]

    assert placed(*machines, demands=WAITED).unplaced == {
        "a": "no machine has its files"
    }


def test_model_on_a_machine_that_takes_no_orders_waits() -> None:
    placement = placed(machine(takes_orders=False), demands=WAITED)

    assert placement.pending == {"a": "needs 4.4 GB: anna takes no jobs now"}


def test_only_machines_that_fetch_load_what_others_have() -> None:
    small = machine("ben", 2, files="a")

    assert not placed(small, machine(files=""), demands=WAITED).orders
    fetching = machine(files="", fetches=True)
    assert shown(placed(small, fetching, demands=WAITED)) == ["load a on anna"]


def test_machine_of_unknown_memory_has_one_model_at_a_time() -> None:
    unknown = machine(memory=0)
    assert shown(placed(unknown, demands=WAITED)) == ["load a on anna"]

    full = replace(unknown, loaded={"b": loaded()})
    assert shown(placed(full, demands=WAITED)) == ["unload b on anna"]
    busy = replace(unknown, loaded={"b": loaded(busy=True)})
    assert placed(busy, demands=WAITED).pending == {
        "a": "anna has room for one model, and it is in use by b"
    }


@pytest.mark.parametrize("memory", [0, 4])
def test_models_of_other_servers_take_no_memory_of_the_library(memory: int) -> None:
    served = {"x": replace(loaded(), memory=0)}

    placement = placed(machine(memory=memory, loaded=served), demands=WAITED)

    assert shown(placement) == ["load a on anna"]


def test_loads_under_way_take_memory() -> None:
    one = machine(memory=4, ordered=order(LOAD, "b"))

    assert not placed(one, demands=WAITED).orders


def test_draining_machine_keeps_its_models_which_are_loaded_elsewhere() -> None:
    draining = machine(loaded={"a": loaded(1e4)}, takes_orders=False)

    placement = placed(draining, machine("ben"), deployed=deployment())

    assert shown(placement) == ["load a on ben"]


def test_replicas_are_on_distinct_machines() -> None:
    machines = [machine(memory=40), machine("ben"), machine("carl")]

    placement = placed(*machines, deployed=deployment(replicas=2))

    assert sorted(shown(placement)) == ["load a on anna", "load a on ben"]
    assert placement.orders[0].reason == "deployed: 0 of 2 replicas"


@pytest.mark.parametrize("name", ["ben", "shoal:ben", "shoal:ben/*models"])
def test_deployment_is_on_the_machines_that_it_names(name: str) -> None:
    machines = [machine(), machine("ben", bandwidth=1.0)]

    placement = placed(*machines, deployed=deployment(on=(name,)), demands=WAITED)

    assert shown(placement) == ["load a on ben"]


def test_replica_that_cannot_be_placed_does_not_fail_requests() -> None:
    one = machine(loaded={"a": loaded()})

    placement = placed(one, machine("ben", 2), deployed=deployment(replicas=2))

    assert not placement.unplaced
    assert placement.pending == {"a": "needs 4.4 GB: ben has 2.4 GB"}


def test_deployment_gives_context_and_slots() -> None:
    ((load, _),) = placed(machine(), deployed=deployment(context=8192, slots=2)).orders

    assert (load.context, load.slots) == (8192, 2)


def test_context_of_a_deployment_counts_in_memory() -> None:
    large = deployment(context=2 * GB)

    assert not placed(machine(memory=4), deployed=large).orders
    assert placed(machine(memory=8), deployed=large).orders


def test_model_is_loaded_again_with_more_context() -> None:
    short = machine(loaded={"a": loaded(10.0)})
    asked = deployment(context=8192)

    first = placed(short, deployed=asked)
    assert shown(first) == ["unload a on anna"]
    (unloading,) = with_orders([short], first.orders)
    assert not placed(unloading, deployed=asked).orders
    gone = replace(unloading, loaded={}, ordered={})
    assert shown(placed(gone, deployed=asked)) == ["load a on anna"]
    elsewhere = placed(short, machine("ben"), deployed=asked)
    assert shown(elsewhere) == ["load a on ben"]


def test_pinned_model_is_not_evicted() -> None:
    pinned = deployment("b", pinned=True)

    placement = placed(
        machine(memory=4, loaded={"b": loaded()}), deployed=pinned, demands=WAITED
    )

    assert not placement.orders
    assert placement.unplaced == {
        "a": "needs 4.4 GB: anna has 4.8 GB, of which 4.4 GB are kept for b"
    }


def test_pinned_model_evicts_what_was_just_used() -> None:
    full = machine(memory=4, loaded={"b": loaded(1.0)})

    assert shown(placed(full, deployed=deployment(pinned=True))) == ["unload b on anna"]


def test_deployed_model_evicts_only_what_was_long_unused() -> None:
    quiet = machine(memory=4, loaded={"b": loaded(RULES.quiet)})
    used = machine(memory=4, loaded={"b": loaded(RULES.quiet - 9)})

    assert shown(placed(quiet, deployed=deployment())) == ["unload b on anna"]
    placement = placed(used, deployed=deployment())
    assert not placement.orders
    assert placement.again == NOW + 9


def test_deployed_model_is_evicted_last() -> None:
    full = machine(loaded={"b": loaded(9000.0), "c": loaded(400.0)})
    deployed = deployment("b")

    assert shown(placed(full, deployed=deployed, demands=WAITED)) == [
        "unload c on anna"
    ]
    only = machine(memory=4, loaded={"b": loaded(1500.0)})
    assert shown(placed(only, deployed=deployed, demands=WAITED)) == [
        "unload b on anna"
    ]


def test_pinned_models_that_fit_fewest_machines_are_placed_first() -> None:
    deployments = {
        "a": deployment("a", pinned=True),
        "b": deployment("b", pinned=True, on=("anna",)),
    }
    machines = [machine(memory=4), machine("ben", 4, bandwidth=1.0)]

    placement = place(machines, {}, deployments, NOW)

    assert shown(placement) == ["load b on anna", "load a on ben"]


AUTO: dict[str, Any] = {"replicas": 0, "most": 2}


def test_automatic_deployment_has_a_replica_without_demand() -> None:
    placement = placed(machine(), machine("ben"), deployed=deployment(**AUTO))

    assert shown(placement) == ["load a on anna"]


@pytest.mark.parametrize(
    ("demand", "grows"),
    [
        (Demand(3, RULES.growth_wait), True),
        (Demand(3, RULES.growth_wait - 1), False),
        (Demand(busy=RULES.growth_busy), True),
        (Demand(busy=RULES.growth_busy - 0.01), False),
    ],
    ids=["waits", "waits less", "busy", "less busy"],
)
def test_automatic_deployment_grows_by_demand(demand: Demand, grows: bool) -> None:
    machines = [machine(loaded={"a": loaded()}), machine("ben")]

    placement = placed(*machines, deployed=deployment(**AUTO), demands={"a": demand})

    assert shown(placement) == (["load a on ben"] if grows else [])
    if demand.waiting and not grows:
        assert placement.again == NOW + 1


def test_automatic_deployment_grows_one_replica_at_a_time() -> None:
    demands = {"a": Demand(9, 99.0)}
    deployed = deployment(replicas=0, most=3)
    old = machine(loaded={"a": loaded()})
    loading = machine("ben", ordered=order(LOAD, "a"))
    new = machine("ben", loaded={"a": loaded(1.0, age=RULES.settles - 2)})
    third = machine("carl")

    assert not placed(old, loading, third, deployed=deployed, demands=demands).orders
    placement = placed(old, new, third, deployed=deployed, demands=demands)
    assert not placement.orders
    assert placement.again == NOW + 2


def test_automatic_deployment_grows_to_the_most() -> None:
    machines = [
        machine(loaded={"a": loaded()}),
        machine("ben", loaded={"a": loaded()}),
        machine("carl"),
    ]

    placement = placed(
        *machines, deployed=deployment(**AUTO), demands={"a": Demand(9, 99.0)}
    )

    assert not placement.orders


def test_idle_replica_above_the_least_is_unloaded() -> None:
    machines = [
        machine(loaded={"a": loaded(700.0)}),
        machine("ben", loaded={"a": loaded(650.0)}),
    ]
    deployed = deployment(**AUTO, idle=600.0)

    assert shown(placed(*machines, deployed=deployed)) == ["unload a on anna"]
    assert not placed(*machines, deployed=deployment(**AUTO)).orders  # no limit


def test_idle_replica_stays_if_the_others_would_be_too_busy() -> None:
    machines = [
        machine(loaded={"a": loaded(700.0)}),
        machine("ben", loaded={"a": loaded(1.0, busy=True)}),
    ]
    deployed = deployment(**AUTO, idle=600.0)
    busy = {"a": Demand(busy=0.5)}

    assert not placed(*machines, deployed=deployed, demands=busy).orders
    calm = {"a": Demand(busy=RULES.shrink_busy / 2)}
    assert shown(placed(*machines, deployed=deployed, demands=calm)) == [
        "unload a on anna"
    ]


def test_model_without_a_deployment_is_unloaded_when_idle() -> None:
    idle = machine(loaded={"a": loaded(RULES.idle)})

    placement = placed(idle)

    assert placement.orders[0].reason == "unused for 30 minutes"
    assert shown(placement) == ["unload a on anna"]
    assert not placed(idle, rules=PlacementRules(idle=inf)).orders
    assert not placed(idle, demands=WAITED).orders
    soon = placed(machine(loaded={"a": loaded(RULES.idle - 3)}))
    assert not soon.orders
    assert soon.again == NOW + 3


def test_model_of_the_start_is_unloaded_only_for_others() -> None:
    stays = (LoadableModel("a", 4 * GB, cache=1, stays=True),)
    idle = machine(memory=4, files="ab", loaded={"a": loaded(NOW)})
    others = idle.library.models[1:]
    idle = replace(idle, library=structs.replace(idle.library, models=stays + others))

    assert not placed(idle).orders
    for_others = placed(idle, demands={"b": Demand(waiting=1, waited=1.0)})
    assert shown(for_others)[0] == "unload a on anna"


def test_model_of_a_deployment_that_ended_is_unloaded_when_idle() -> None:
    moved = deployment(on=("ben",))
    machines = [
        machine(loaded={"a": loaded(9000.0)}),
        machine("ben", loaded={"a": loaded(9000.0)}),
    ]

    assert shown(placed(*machines, deployed=moved)) == ["unload a on anna"]


def test_two_models_that_do_not_both_fit_take_turns() -> None:
    """Each stays for a while, whoever waits."""
    one = machine(memory=4, files="ab")
    stays: list[float] = []
    present = ""
    since = last = 0.0
    for second in range(600):
        now = NOW + second
        has = {present: LoadedModel(4 * GB, since, last)} if present else {}
        demands = {each: Demand(1, now - last) for each in "ab" if each != present}
        for work, _ in place([replace(one, loaded=has)], demands, {}, now).orders:
            if work.action is LOAD:
                present, since = work.name, now
            else:
                stays.append(now - since)
                present = ""
        last = now

    assert stays
    assert set(stays) == {RULES.stays}


def test_failed_loads_are_counted_until_one_succeeds() -> None:
    orders = OpenOrders()
    order_ = ModelOrder(LOAD, "a", "m")
    job = Job(JobId("x"), order_)

    for count in (1, 2, 3):
        orders.open(job)
        orders.end(job, JobFailed(job.id, "out of memory"), NOW)
        assert orders.doubts("m") == {"a": count}
    orders.open(job)
    orders.end(job, JobCompleted(job.id, LeaseNumber(1), Outcome("")), NOW)

    assert orders.doubts("m") == {}
