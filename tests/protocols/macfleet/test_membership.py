"""The registry of nodes, and what changes it."""

from dataclasses import replace

import pytest

from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.codec.hardware import UNKNOWN_PROFILE, HardwareProfile
from shoal.protocols.macfleet.election import membership_table
from shoal.protocols.macfleet.membership import (
    ADDRESSES_MAX,
    FAILED_AFTER,
    FORGOTTEN_AFTER,
    MISMATCHES_MAX,
    MISSES_MAX,
    FleetNode,
    FleetRegistry,
    NodeAddress,
    NodeState,
)

HERE, THERE = NodeAddress("192.0.2.1", 50051), NodeAddress("192.0.2.2", 50051)
SMALL = HardwareProfile(chip="small", gpu_cores=8, ram_gb=8.0, data_port=4000)
LARGE = HardwareProfile(chip="large", gpu_cores=40, ram_gb=64.0)
NODES_MAX = 100  # instead of 1024


def fleet_of(**nodes: HardwareProfile) -> FleetRegistry:
    """Return a fleet of this node, ``me``, and nodes that have answered."""
    fleet = FleetRegistry("me", lambda: SMALL)
    for number, (node_id, profile) in enumerate(nodes.items()):
        fleet.on_pong(node_id, NodeAddress(f"10.0.0.{number}", 1), profile, 0.0)
    return fleet


def node(fleet: FleetRegistry, node_id: str = "a") -> FleetNode:
    found = fleet.get(node_id)
    assert found is not None
    return found


def miss(fleet: FleetRegistry, times: int, now: float, node_id: str = "a") -> NodeState:
    for _ in range(times):
        fleet.on_missed_pong(node_id, now)
    return node(fleet, node_id).state


def test_a_node_that_answers_is_alive_with_its_profile() -> None:
    fleet = fleet_of(a=LARGE)

    assert node(fleet).state is NodeState.ALIVE
    assert node(fleet).profile == LARGE
    assert node(fleet).data_port == 2


def test_a_node_of_another_wire_version_is_logged_once_and_accepted() -> None:
    logged: list[str] = []
    fleet = FleetRegistry("me", lambda: SMALL, logged.append)
    newer = replace(LARGE, wire_version=2)

    fleet.on_pinged("a", "192.0.2.1", newer, 0.0)
    for now in (1.0, 2.0):
        fleet.on_pong("a", HERE, newer, now)

    assert logged == ["node 'a' has wire_version 2, and this node has 1"]
    assert node(fleet).profile == newer


def test_logged_versions_take_bounded_memory() -> None:
    logged: list[str] = []
    fleet = FleetRegistry("me", lambda: SMALL, logged.append)

    for number in range(MISMATCHES_MAX + 10):
        fleet.on_pool_version(f"n{number}", "1")

    assert len(logged) == MISMATCHES_MAX


def test_a_node_without_hardware_is_listed_with_a_remark() -> None:
    fleet = FleetRegistry("me", lambda: SMALL)
    fleet.on_announced("announced", [THERE], HardwareProfile(data_port=4000), 0.0)
    fleet.on_announced("new", [HERE], HardwareProfile(), 0.0)
    fleet.on_pong("announced", THERE, None, 1.0)
    fleet.on_pong("found", NodeAddress("192.0.2.3", 700), None, 1.0)
    fleet.on_pong("known", NodeAddress("192.0.2.4", 700), LARGE, 1.0)

    notes = {each.name: each.note for each in membership_table(fleet)}

    assert notes == {
        "me": "",
        "announced": "reported no hardware",
        "new": "",
        "found": "reported no hardware; port 701 is dialled",
        "known": "",
    }


def test_the_hardware_in_a_handshake_counts_if_pongs_have_none() -> None:
    fleet = fleet_of(known=LARGE)
    fleet.on_announced("a", [HERE], HardwareProfile(data_port=4000), 0.0)
    fleet.on_pong("a", HERE, None, 1.0)

    for node_id in ("a", "known", "stranger"):
        fleet.on_handshake(node_id, replace(SMALL, data_port=0))

    assert node(fleet).profile == SMALL  # with the announced port
    assert node(fleet, "known").profile == LARGE
    assert fleet.get("stranger") is None


def test_an_announced_port_is_the_transport_port() -> None:
    assert node(fleet_of(a=SMALL)).data_port == 4000


def test_a_pong_without_hardware_keeps_the_profile() -> None:
    fleet = fleet_of(a=SMALL)
    fleet.on_pong("a", HERE, None, 1.0)

    assert node(fleet).profile == SMALL
    assert node(fleet).address == HERE


def test_three_misses_make_a_node_suspected_and_ten_seconds_make_it_fail() -> None:
    fleet = fleet_of(a=LARGE)

    assert miss(fleet, MISSES_MAX - 1, 1.0) is NodeState.ALIVE
    assert miss(fleet, 1, 3.0) is NodeState.SUSPECTED
    fleet.expire(FAILED_AFTER)
    assert node(fleet).state is NodeState.SUSPECTED
    fleet.expire(FAILED_AFTER + 0.1)
    assert node(fleet).state is NodeState.FAILED
    assert node(fleet).since == FAILED_AFTER + 0.1
    assert fleet.has_failed("a")


@pytest.mark.parametrize("now", [4.0, 20.0], ids=["suspected", "failed"])
def test_one_pong_makes_a_node_alive_again(now: float) -> None:
    fleet = fleet_of(a=LARGE)
    miss(fleet, MISSES_MAX, now)
    fleet.on_pong("a", HERE, None, now + 1.0)

    assert node(fleet).state is NodeState.ALIVE
    assert node(fleet).since == now + 1.0
    assert miss(fleet, MISSES_MAX - 1, now + 2.0) is NodeState.ALIVE


def test_the_own_node_is_never_registered() -> None:
    fleet = fleet_of(me=LARGE)
    fleet.on_announced("me", [HERE], LARGE, 0.0)

    assert not fleet.nodes
    assert not fleet.has_failed("me")


def test_an_announced_node_is_not_a_member() -> None:
    fleet = fleet_of()
    fleet.on_announced("a", [HERE], LARGE, 0.0)

    assert node(fleet).state is NodeState.SIGHTED
    assert not fleet.members()
    assert miss(fleet, 100, 1.0) is NodeState.SIGHTED


def test_announcements_do_not_change_the_address_of_a_member() -> None:
    fleet = fleet_of(a=LARGE)
    fleet.on_announced("a", [HERE], SMALL, 1.0)

    assert node(fleet).addresses == (NodeAddress("10.0.0.0", 1),)
    assert node(fleet).profile == LARGE


def test_announcements_add_addresses_of_a_failed_node() -> None:
    fleet = fleet_of(a=LARGE)
    miss(fleet, MISSES_MAX, 20.0)
    fleet.on_announced("a", [HERE, THERE], SMALL, 21.0)

    tried = []
    for _ in range(3):
        tried.append(node(fleet).address)
        miss(fleet, 1, 22.0)
    assert tried == [NodeAddress("10.0.0.0", 1), HERE, THERE]
    assert node(fleet).profile == LARGE

    fleet.on_pong("a", THERE, None, 23.0)
    assert node(fleet).address == THERE


def test_number_of_addresses_is_bounded() -> None:
    fleet = fleet_of()
    for number in range(50):
        fleet.on_announced("a", [NodeAddress("10.1.1.1", number)], UNKNOWN_PROFILE, 0.0)

    assert len(node(fleet).addresses) == ADDRESSES_MAX


def test_a_node_replaced_at_its_address_has_failed() -> None:
    fleet = fleet_of(a=LARGE)
    fleet.on_pong("b", NodeAddress("10.0.0.0", 1), SMALL, 1.0)

    assert node(fleet).state is NodeState.FAILED
    assert node(fleet, "b").state is NodeState.ALIVE


def test_old_failed_nodes_are_forgotten_and_members_are_not() -> None:
    fleet = fleet_of(a=LARGE, b=LARGE)
    fleet.on_announced("c", [HERE], SMALL, 0.0)
    miss(fleet, MISSES_MAX, 20.0)

    fleet.expire(21.0 + FORGOTTEN_AFTER)

    assert [each.id for each in fleet.nodes] == ["b"]


def test_a_full_registry_evicts_nodes_that_are_not_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.membership.NODES_MAX", NODES_MAX)
    fleet = fleet_of(a=LARGE)
    for number in range(2 * NODES_MAX):
        fleet.on_announced(f"n{number}", [HERE], SMALL, float(number))

    assert len(fleet.nodes) == NODES_MAX
    assert fleet.get("a") is not None
    assert fleet.get("n0") is None

    for number in range(2 * NODES_MAX):
        fleet.on_pong(f"m{number}", NodeAddress("10.2.2.2", number), SMALL, 1.0)
    fleet.on_announced("late", [HERE], SMALL, 2.0)
    assert len(fleet.members()) == NODES_MAX
    assert fleet.get("late") is None


def test_members_are_ranked_and_the_strongest_leads() -> None:
    fleet = fleet_of(a=LARGE, b=LARGE, c=LARGE)
    fleet.on_announced("d", [HERE], LARGE, 0.0)
    miss(fleet, MISSES_MAX, 20.0, "c")

    rows = {each.name: each for each in membership_table(fleet)}

    assert {name: each.rank for name, each in rows.items()} == {
        "a": 0,
        "b": 1,
        "me": 2,
        "c": None,
        "d": None,
    }
    assert [name for name, each in rows.items() if each.coordinator] == ["b"]
    assert sum(each.weight for each in rows.values()) == pytest.approx(1.0)
    assert rows["me"].state == "here"
    assert rows["c"].state == "failed"
    assert rows["a"].address == "10.0.0.0:1"


def test_hardware_that_nodes_report_is_listed() -> None:
    fleet = fleet_of(a=LARGE, b=replace(UNKNOWN_PROFILE, data_port=4000))

    me, a, b = membership_table(fleet)

    assert a.hardware == Hardware(chip="large", gpu_cores=40, memory_gb=64.0, tier=0)
    assert b.hardware is None
    assert me.hardware == Hardware(chip="small", gpu_cores=8, memory_gb=8.0, tier=0)


def test_an_ipv6_address_is_bracketed() -> None:
    assert str(NodeAddress("fe80::1", 5)) == "[fe80::1]:5"
