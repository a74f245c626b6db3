"""Rounds of pings under a simulated clock."""

from collections import Counter
from random import Random

import pytest

from harness.profiles import some_long
from protocols.macfleet.simulated_fleet import SimulatedFleet, address_of, never_opened
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.gossip import (
    CONTACT_DELAY_MAX,
    FAILED_PING_INTERVAL,
    PING_TIMEOUT,
    PINGS_PER_ROUND,
    REFUSED,
    ROUND_INTERVAL,
    WIRE,
    FleetGossip,
    TransportDialer,
)
from shoal.protocols.macfleet.membership import (
    FAILED_AFTER,
    MISSES_MAX,
    NodeAddress,
    NodeState,
)
from shoal.protocols.seam.endpoints import OutgoingConnection, Probe
from shoal.protocols.seam.peer_addresses import PeerAddress

LOST_WITHIN = MISSES_MAX * (PING_TIMEOUT + ROUND_INTERVAL) + FAILED_AFTER  # seconds
BACK_WITHIN = FAILED_PING_INTERVAL + PING_TIMEOUT + 2 * ROUND_INTERVAL
FLAPS = [400, 10_000]


def fleet_of(nodes: int) -> SimulatedFleet:
    fleet = SimulatedFleet()
    for number in range(nodes):
        fleet.settle(number)
        fleet.sight(number)
    fleet.run(10.0)
    assert {fleet.state(number) for number in range(nodes)} == {NodeState.ALIVE}
    return fleet


@pytest.mark.parametrize("key", [fleet_key("a long token"), None])
def test_an_announced_node_that_answers_is_alive(key: bytes | None) -> None:
    fleet = SimulatedFleet(key)
    fleet.settle(1)
    fleet.sight(1)

    fleet.run(3.0)

    assert fleet.state(1) is NodeState.ALIVE


def test_a_pong_with_another_id_than_announced_is_ignored() -> None:
    fleet = SimulatedFleet()
    fleet.settle(1, "somebody")
    fleet.sight(1)

    fleet.run(60.0)

    assert fleet.state(1) is NodeState.SIGHTED
    assert fleet.fleet.get("somebody") is None


def test_a_node_that_leaves_is_suspected_then_fails_and_returns() -> None:
    fleet = fleet_of(1)

    fleet.away.add(address_of(0))
    fleet.run(LOST_WITHIN)
    assert fleet.state(0) is NodeState.FAILED

    fleet.away.clear()
    fleet.run(BACK_WITHIN)
    assert fleet.state(0) is NodeState.ALIVE


def test_a_suspected_node_that_returns_is_alive_at_once() -> None:
    fleet = fleet_of(1)
    fleet.away.add(address_of(0))
    fleet.off = False
    while fleet.state(0) is NodeState.ALIVE:
        fleet.run(0.5)
    assert fleet.state(0) is NodeState.SUSPECTED

    fleet.away.clear()
    fleet.run(ROUND_INTERVAL + 0.1)

    assert fleet.state(0) is NodeState.ALIVE


def test_one_missed_ping_changes_nothing() -> None:
    fleet = fleet_of(1)
    fleet.away.add(address_of(0))
    fleet.run(PING_TIMEOUT + ROUND_INTERVAL)
    fleet.away.clear()
    fleet.run(5.0)

    node = fleet.fleet.get("n0")
    assert node is not None
    assert (node.state, node.misses, node.since) == (NodeState.ALIVE, 0, node.since)
    assert node.since < 10.0


def test_a_silent_node_delays_no_other_ping() -> None:
    fleet = fleet_of(4)
    fleet.away.update(map(address_of, range(3)))
    fleet.pinged.clear()

    fleet.run(5.0)

    asked = [at for at, address in fleet.pinged if address == address_of(3)]
    assert len(asked) >= 4


def test_nodes_are_pinged_in_turn_and_few_at_a_time() -> None:
    fleet = fleet_of(9)
    fleet.pinged.clear()

    fleet.run(30.0)

    rounds = Counter(at for at, _ in fleet.pinged)
    assert max(rounds.values()) <= PINGS_PER_ROUND
    assert set(Counter(address for _, address in fleet.pinged).values()) == {10}


def test_a_failed_node_is_pinged_occasionally() -> None:
    fleet = fleet_of(1)
    fleet.away.add(address_of(0))
    fleet.run(LOST_WITHIN + 2 * FAILED_PING_INTERVAL)
    fleet.pinged.clear()

    fleet.run(10 * FAILED_PING_INTERVAL)

    assert 8 <= len(fleet.pinged) <= 11


def test_a_lost_node_is_detected_as_fast_in_a_large_fleet() -> None:
    fleet = fleet_of(25)
    fleet.away.add(address_of(7))

    fleet.run(25 / PINGS_PER_ROUND + LOST_WITHIN)

    assert fleet.state(7) is NodeState.FAILED
    others = set(range(25)) - {7}
    assert {fleet.state(number) for number in others} == {NodeState.ALIVE}


# Configured addresses.


def with_addresses(*numbers: int) -> SimulatedFleet:
    return SimulatedFleet(addresses=[address_of(number) for number in numbers])


def test_a_node_at_a_configured_address_is_registered() -> None:
    fleet = with_addresses(1)
    fleet.settle(1, "unheard-of", HardwareProfile(gpu_cores=3, data_port=777))

    fleet.run(2.0)

    (node,) = fleet.fleet.nodes
    assert (node.id, node.state, node.data_port) == ("unheard-of", NodeState.ALIVE, 777)


def test_a_configured_address_is_pinged_until_a_node_answers() -> None:
    fleet = with_addresses(1)
    fleet.run(300.0)
    (row,) = [each for each in fleet.gossip.nodes() if not each.name]
    assert (row.address, row.state) == (str(address_of(1)), "no answer")
    assert row.note == "no answer"

    fleet.settle(1)
    fleet.run(CONTACT_DELAY_MAX + 10.0)

    assert fleet.state(1) is NodeState.ALIVE
    assert all(each.name for each in fleet.gossip.nodes())


def test_pings_of_a_vacant_address_back_off() -> None:
    fleet = with_addresses(1)
    fleet.settle(1)
    fleet.away.add(address_of(1))

    fleet.run(600.0)

    assert (
        600 / (CONTACT_DELAY_MAX + 10.0)
        <= len(fleet.pinged)
        <= 600 / CONTACT_DELAY_MAX + 6
    )


def test_a_node_that_returns_under_another_id_is_registered() -> None:
    fleet = with_addresses(1)
    fleet.settle(1, "first-1a2b")
    fleet.run(5.0)

    fleet.settle(1, "first-3c4d")
    fleet.run(LOST_WITHIN + CONTACT_DELAY_MAX)

    assert fleet.fleet.has_failed("first-1a2b")
    assert all(each.name and not each.note for each in fleet.gossip.nodes())
    found = fleet.fleet.get("first-3c4d")
    assert found is not None
    assert found.state is NodeState.ALIVE


def test_a_failed_nodes_row_contains_the_reason() -> None:
    fleet = with_addresses(1)
    fleet.settle(1)
    fleet.run(5.0)

    fleet.away.add(address_of(1))
    fleet.run(LOST_WITHIN + CONTACT_DELAY_MAX)

    _, row = fleet.gossip.nodes()
    assert (row.name, row.state, row.note) == ("n1", "failed", "no answer")


@pytest.mark.parametrize("announced", [True, False])
def test_a_node_of_version_2_1_is_pinged_without_hardware(announced: bool) -> None:
    fleet = SimulatedFleet() if announced else with_addresses(1)
    fleet.settle(1)
    fleet.older.add(address_of(1))
    if announced:
        fleet.sight(1)

    fleet.run(60.0)

    node = fleet.fleet.get("n1")
    assert node is not None
    assert (node.state, node.misses, node.accepts_hardware) == (
        NodeState.ALIVE,
        0,
        False,
    )
    _, row = fleet.gossip.nodes()
    assert row.note == "reported no hardware; port 50052 is dialled"


def test_an_updated_node_is_pinged_with_hardware_again() -> None:
    fleet = with_addresses(1)
    fleet.settle(1)
    fleet.older.add(address_of(1))
    fleet.run(10.0)
    fleet.away.add(address_of(1))
    fleet.run(10.0)

    fleet.away.clear()
    fleet.older.clear()
    fleet.run(BACK_WITHIN)

    node = fleet.fleet.get("n1")
    assert node is not None
    assert (node.state, node.profile.gpu_cores) == (NodeState.ALIVE, 1)
    _, row = fleet.gossip.nodes()
    assert row.note == ""


def test_the_own_address_registers_no_node() -> None:
    fleet = with_addresses(1)
    fleet.people[address_of(1)] = fleet.own

    fleet.run(60.0)

    assert not fleet.fleet.nodes
    (row,) = [each for each in fleet.gossip.nodes() if not each.name]
    assert "pinged itself" in row.note


def test_a_mirror_registers_no_node() -> None:
    fleet = with_addresses(1)
    fleet.mirrors.add(address_of(1))

    fleet.run(60.0)

    assert not fleet.fleet.nodes


def test_a_node_of_another_fleet_is_not_registered_and_the_reason_is_shown() -> None:
    fleet = with_addresses(1)
    fleet.key = fleet_key("another token")
    fleet.settle(1)
    fleet.key = fleet.own.key

    fleet.run(60.0)

    assert not fleet.fleet.nodes
    (row,) = [each for each in fleet.gossip.nodes() if not each.name]
    assert row.note == REFUSED


# Transports.


def test_a_wanted_transport_is_dialled_while_its_node_is_alive() -> None:
    fleet = fleet_of(2)
    fleet.wants = lambda node: node.id == "n1"

    fleet.run(2.0)
    (call,) = fleet.calls
    assert call.url == "tls-any://10.0.0.1:5000"
    fleet.run(60.0)
    assert fleet.calls == [call]

    fleet.away.add(address_of(1))
    fleet.run(LOST_WITHIN)
    assert not fleet.calls

    fleet.away.clear()
    fleet.run(BACK_WITHIN)
    assert len(fleet.calls) == 1
    fleet.wants = lambda node: False
    fleet.run(2.0)
    assert not fleet.calls


def test_a_moved_transport_is_dialled_at_its_new_address() -> None:
    fleet = fleet_of(1)
    fleet.wants = lambda node: True
    fleet.run(2.0)

    fleet.settle(0, profile=HardwareProfile(data_port=6000))
    fleet.run(3.0)

    (call,) = fleet.calls
    assert call.url == "tls-any://10.0.0.0:6000"


@pytest.mark.parametrize("flaps", some_long(FLAPS, short=1))
def test_no_node_stays_in_a_wrong_state(flaps: int) -> None:
    random = Random(6)
    fleet = fleet_of(20)
    fleet.wants = lambda node: True

    for flap in range(1, flaps + 1):
        fleet.away ^= {address_of(random.randrange(20))}
        fleet.run(random.uniform(0.0, 1.0))
        if flap % 400 == 0:
            fleet.run(20 / PINGS_PER_ROUND + max(LOST_WITHIN, 7 * BACK_WITHIN))
            for number in range(20):
                gone = address_of(number) in fleet.away
                expected = NodeState.FAILED if gone else NodeState.ALIVE
                assert fleet.state(number) is expected, (flap, number)
            assert len(fleet.calls) == 20 - len(fleet.away)


def pinged_address(configured: PeerAddress, reason: str) -> PeerAddress:
    """Ping an address once, with an end for a reason."""
    fleet = SimulatedFleet()
    ways = TransportDialer(
        lambda node: False, lambda node: OutgoingConnection("", never_opened)
    )
    address = NodeAddress("10.0.0.9", 50051)
    gossip = FleetGossip(fleet.own, fleet.fleet, [], ways, {address: configured})
    (exchange,) = (each for each in gossip.tick(0.0) if isinstance(each, Probe))
    assert configured.probing == {WIRE}

    exchange.on_end(reason, 1.0)

    return configured


@pytest.mark.parametrize(
    ("reason", "free"),
    [
        ("closed by peer", True),
        ("no answer from tls-any://10.0.0.9:50051 within 10 s", True),
        ("tls-any://10.0.0.9:50051 does not speak TLS here", True),
        ("cannot connect to tls-any://10.0.0.9:50051: connection refused", False),
    ],
)
def test_other_protocols_may_probe_an_address_without_a_pong(
    reason: str, free: bool
) -> None:
    address = pinged_address(PeerAddress("10.0.0.9:50051"), reason)

    assert address.may_dial("other") is free


def test_an_address_of_another_protocol_is_not_pinged() -> None:
    configured = PeerAddress("10.0.0.9:50051", wire="other")
    fleet = SimulatedFleet()
    ways = TransportDialer(
        lambda node: False, lambda node: OutgoingConnection("", never_opened)
    )
    address = NodeAddress("10.0.0.9", 50051)
    gossip = FleetGossip(fleet.own, fleet.fleet, [], ways, {address: configured})

    assert gossip.tick(0.0) == []
