"""Announcements and discovery of nodes."""

from collections.abc import Mapping

import pytest

from protocols.macfleet.fleet_members import AWAY, KEY, limiter, member, sent
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.heartbeat_lines import HeartbeatLine, encode_ping
from shoal.protocols.macfleet.discovery import browser, heartbeat_listener
from shoal.protocols.macfleet.membership import FleetRegistry, NodeAddress, NodeState
from shoal.protocols.seam.endpoints import DiscoveredService, ListenerTls

PROFILE = HardwareProfile(chip="M4", gpu_cores=10, ram_gb=16.0, data_port=4001)
TEXT = {"node_id": "b", "pool_version": "2.2.0", "data_port": "4000"}


def sight(key: bytes | None, text: Mapping[str, str], name: str = "b") -> FleetRegistry:
    own = member(key=key)
    fleet = FleetRegistry(own.node_id, own.profile)
    sighting = DiscoveredService(name, ("192.0.2.1", "fe80::1%en0"), 50051, text)
    assert browser(own, fleet).on_found(sighting, 0.0) is None
    return fleet


def test_a_secure_node_announces_only_id_and_ports() -> None:
    listener = heartbeat_listener(member(profile=PROFILE), limiter(), 50051)

    assert listener.service is not None
    assert listener.service.kind.startswith("_mf-")
    assert dict(listener.service.text) == {
        "node_id": "node-a",
        "pool_version": "2.2.0",
        "data_port": "4001",
        "shoal": "1",
    }
    assert len(listener.service.text) == 4
    assert listener.security is ListenerTls.SELF_SIGNED
    assert (listener.label, listener.flag) == (
        "heartbeat",
        "--macfleet-heartbeat-port",
    )


def test_an_open_node_announces_its_hardware() -> None:
    own = member(key=None, profile=PROFILE)
    listener = heartbeat_listener(own, limiter(), 0, spare=True)

    assert listener.service is not None
    assert listener.service.kind == "_macfleet._tcp"
    assert listener.service.text["compute_score"] == "116.0"
    assert listener.service.text["chip_name"] == "M4"
    assert listener.security is ListenerTls.NONE
    assert listener.falls_back


def test_listener_answers_pings() -> None:
    session = heartbeat_listener(member(), limiter(), 0).accept(AWAY, 0.0)
    session.tick(0.0)

    assert sent(session.receive([encode_ping(KEY, HeartbeatLine("b", bytes(16)))], 0.0))


def test_a_discovered_node_is_registered() -> None:
    node = sight(KEY, {**TEXT, "shoal": "1", "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.state is NodeState.SIGHTED
    assert node.addresses == (
        NodeAddress("192.0.2.1", 50051),
        NodeAddress("fe80::1%en0", 50051),
    )
    assert node.is_shoal
    # Its hardware is known once it has authenticated.
    assert node.profile == HardwareProfile(data_port=4000)


def test_a_node_of_an_open_fleet_has_its_announced_hardware() -> None:
    node = sight(None, {**TEXT, "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.profile.gpu_cores == 80
    assert not node.is_shoal


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
