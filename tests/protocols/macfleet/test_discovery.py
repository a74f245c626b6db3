"""Announcements and discovery of nodes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from protocols.macfleet.fleet_members import AWAY, KEY, limiter, member, sent
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.heartbeat_lines import HeartbeatLine, encode_ping
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.discovery import browser, heartbeat_listener
from shoal.protocols.macfleet.heartbeat import PingExchange
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import FleetRegistry, NodeAddress, NodeState
from shoal.protocols.seam.endpoints import DiscoveredService, Listener, ListenerTls

PROFILE = HardwareProfile(chip="M4", gpu_cores=10, ram_gb=16.0, data_port=4001)
TEXT = {"node_id": "b", "pool_version": "2.2.0", "data_port": "4000"}


def sight(key: bytes | None, text: Mapping[str, str], name: str = "b") -> FleetRegistry:
    own = member(key=key)
    fleet = FleetRegistry(own.node_id, own.profile)
    sighting = DiscoveredService(name, ("192.0.2.1", "fe80::1%en0"), 50051, text)
    assert browser(own, fleet).on_found(sighting, 0.0) is None
    return fleet


def listening(own: FleetMember, port: int = 0, *, spare: bool = False) -> Listener:
    registry = FleetRegistry(own.node_id, own.profile)
    return heartbeat_listener(own, limiter(), registry, port, spare=spare)


def test_a_secure_node_announces_only_id_and_ports() -> None:
    listener = listening(member(profile=PROFILE), 50051)

    assert listener.service is not None
    assert listener.service.kind.startswith("_mf-")
    assert dict(listener.service.text) == {
        "node_id": "node-a",
        "pool_version": "2.2.0",
        "data_port": "4001",
    }
    assert len(listener.service.text) == 3
    assert listener.security is ListenerTls.SELF_SIGNED
    assert (listener.label, listener.flag) == (
        "heartbeat",
        "--macfleet-heartbeat-port",
    )


def test_an_open_node_announces_its_hardware() -> None:
    own = member(key=None, profile=PROFILE)
    listener = listening(own, spare=True)

    assert listener.service is not None
    assert listener.service.kind == "_macfleet._tcp"
    assert listener.service.text["compute_score"] == "116.0"
    assert listener.service.text["chip_name"] == "M4"
    assert listener.security is ListenerTls.NONE
    assert listener.falls_back


def test_an_open_fleet_may_use_tls() -> None:
    own = replace(member(key=None, profile=PROFILE), open_tls=True)

    listener = listening(own)

    assert listener.security is ListenerTls.SELF_SIGNED
    assert listener.service is not None
    assert listener.service.kind == "_macfleet._tcp"


def test_a_node_that_sends_a_signed_ping_becomes_known() -> None:
    own = member()
    registry = FleetRegistry(own.node_id, own.profile)
    session = heartbeat_listener(own, limiter(), registry, 0).accept(AWAY, 0.0)
    session.tick(0.0)
    other = member("other", profile=HardwareProfile(gpu_cores=4, data_port=7001))

    session.receive([PingExchange(other).ping()], 0.0)

    (node,) = registry.nodes
    assert (node.id, node.state) == ("other", NodeState.SIGHTED)
    assert node.addresses == (NodeAddress(AWAY, 7000), NodeAddress(AWAY, 50051))
    assert (node.stated_port, node.profile.gpu_cores) == (7001, 4)


def test_a_node_that_sends_a_signed_ping_without_hardware_becomes_known() -> None:
    own = member()
    registry = FleetRegistry(own.node_id, own.profile)
    session = heartbeat_listener(own, limiter(), registry, 0).accept(AWAY, 0.0)
    session.tick(0.0)

    session.receive([PingExchange(member("other"), hardware=False).ping()], 0.0)

    (node,) = registry.nodes
    assert (node.id, node.state) == ("other", NodeState.SIGHTED)
    assert node.addresses == (NodeAddress(AWAY, 50051),)


@pytest.mark.parametrize(
    ("key", "own_key", "data_port"),
    [
        (KEY, KEY, 0),  # a Shoal worker, which has no port
        (fleet_key("another token"), KEY, 7001),
        (None, None, 7001),  # nothing authenticates it
    ],
)
def test_other_pings_make_no_node_known(
    key: bytes | None, own_key: bytes | None, data_port: int
) -> None:
    own = member(key=own_key)
    registry = FleetRegistry(own.node_id, own.profile)
    session = heartbeat_listener(own, limiter(), registry, 0).accept(AWAY, 0.0)
    session.tick(0.0)
    other = member("other", key, profile=HardwareProfile(data_port=data_port))

    session.receive([PingExchange(other).ping()], 0.0)

    assert registry.nodes == ()


def test_listener_answers_pings() -> None:
    session = listening(member()).accept(AWAY, 0.0)
    session.tick(0.0)

    assert sent(session.receive([encode_ping(KEY, HeartbeatLine("b", bytes(16)))], 0.0))


def test_a_discovered_node_is_registered() -> None:
    node = sight(KEY, {**TEXT, "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.state is NodeState.SIGHTED
    assert node.addresses == (
        NodeAddress("192.0.2.1", 50051),
        NodeAddress("fe80::1%en0", 50051),
    )
    # Its hardware is known once it has authenticated.
    assert node.profile == HardwareProfile(data_port=4000)


def test_a_node_of_an_open_fleet_has_its_announced_hardware() -> None:
    node = sight(None, {**TEXT, "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.profile.gpu_cores == 80


def test_a_node_without_id_or_port_is_registered_by_service_name() -> None:
    node = sight(KEY, {}).get("b")

    assert node is not None
    assert node.data_port == 50052


@pytest.mark.parametrize(
    "text",
    [
        {**TEXT, "node_id": "node-a"},
        {**TEXT, "node_id": "two words"},
        {**TEXT, "node_id": "b" * 300},
        {**TEXT, "data_port": "many"},
        {**TEXT, "data_port": "-1"},
        {**TEXT, "data_port": "99999"},
    ],
)
def test_invalid_announcements_and_the_own_node_are_ignored(
    text: Mapping[str, str],
) -> None:
    assert not sight(KEY, text).nodes
