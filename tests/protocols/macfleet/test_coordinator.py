"""The endpoints that a configuration opens."""

from dataclasses import replace

import pytest

from protocols.calling import TOKEN, fleet_context
from shoal.domain.errors import ConfigError
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key, service_type
from shoal.protocols.macfleet.config import Config
from shoal.protocols.macfleet.coordinator import endpoints
from shoal.protocols.macfleet.gossip import FleetGossip
from shoal.protocols.macfleet.local_node import hardware_profile, node_id
from shoal.protocols.macfleet.membership import NodeAddress
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    Listener,
    ListenerTls,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
)

OTHER = fleet_key("of the fleet", "x")


def listeners(config: Config, context: ProtocolContext) -> list[Listener]:
    return [e for e in endpoints(config, context) if isinstance(e, Listener)]


def test_both_ports_are_upstreams_defaults_unless_in_use() -> None:
    transport, heartbeat = listeners(Config(), fleet_context())

    assert (transport.label, transport.port, transport.falls_back) == (
        "transport",
        50052,
        True,
    )
    assert (heartbeat.label, heartbeat.port, heartbeat.falls_back) == (
        "heartbeat",
        50051,
        True,
    )
    assert transport.flag == "--macfleet-transport-port"
    assert heartbeat.flag == "--macfleet-heartbeat-port"


def test_a_configured_port_does_not_fall_back() -> None:
    transport, heartbeat = listeners(
        Config(heartbeat_port=0, transport_port=7), fleet_context()
    )

    assert (transport.port, transport.falls_back) == (7, False)
    assert (heartbeat.port, heartbeat.falls_back) == (0, False)


@pytest.mark.parametrize(
    ("config", "token", "key"),
    [
        (Config(), TOKEN, fleet_key(TOKEN)),
        (
            Config(token="of the fleet", fleet="x"),
            TOKEN,
            fleet_key("of the fleet", "x"),
        ),
        (Config(), "", None),
        (Config(open=True), TOKEN, None),
    ],
)
def test_a_fleet_with_a_token_speaks_tls(
    config: Config, token: str, key: bytes | None
) -> None:
    for listens in listeners(config, fleet_context(token)):
        own = listens.security is ListenerTls.SELF_SIGNED
        assert own is (key is not None)
    assert listens.service is not None
    assert listens.service.kind == service_type(key)


def test_labels_show_which_ports_have_no_tls() -> None:
    secure = [each.advertised_label for each in listeners(Config(), fleet_context())]
    plain = [
        each.advertised_label for each in listeners(Config(open=True), fleet_context())
    ]

    assert secure == ["transport", "heartbeat"]
    assert plain == ["transport:tcp", "heartbeat:tcp"]


def test_a_join_token_too_short_for_a_fleet_is_a_warning() -> None:
    warned: list[str] = []
    context = replace(fleet_context("short"), warn=warned.append)

    assert not endpoints(Config(), context)
    (said,) = warned
    assert "--macfleet-token" in said


def test_a_short_fleet_token_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^--macfleet-token: expected 8 char"):
        endpoints(Config(token="short"), fleet_context())


def test_an_open_fleet_with_a_token_is_rejected() -> None:
    with pytest.raises(ConfigError, match="an open fleet has no token"):
        endpoints(Config(open=True, token="long enough"), fleet_context())


def test_discovery_can_be_disabled() -> None:
    assert any(
        isinstance(e, ServiceBrowser) for e in endpoints(Config(), fleet_context())
    )
    quiet = endpoints(Config(browse=False), fleet_context())
    assert not any(isinstance(e, ServiceBrowser) for e in quiet)


def dialled(
    peer: str, *, ours: bool, port: int = 50052, config: Config | None = None
) -> list[str]:
    """Return the URLs a coordinator dials after a node has answered its ping."""
    peers = replace(config or Config(), peers=("192.0.2.9:50051",))
    found = endpoints(peers, fleet_context())
    gossip = next(e for e in found if isinstance(e, MembershipProber))
    assert isinstance(gossip, FleetGossip)
    gossip.tick(0.0)
    fleet = gossip._registry
    profile = HardwareProfile(data_port=port)
    fleet.on_pong(peer, NodeAddress("192.0.2.9", 50051), profile, 0.0)
    if ours:
        fleet.mark_shoal(peer)
    return [e.url for e in gossip.tick(1.0) if isinstance(e, OutgoingConnection)]


def test_a_node_with_an_announced_transport_is_dialled() -> None:
    assert dialled("node-b", ours=False) == ["tls-any://192.0.2.9:50052"]
    assert dialled("node-b", ours=False, port=0) == []


def test_in_an_open_fleet_the_port_after_the_heartbeats_is_dialled() -> None:
    plain, encrypted = Config(open=True), Config(open=True, tls=True)

    assert dialled("node-b", ours=False, port=0, config=plain) == [
        "tcp://192.0.2.9:50052"
    ]
    assert dialled("node-b", ours=False, port=0, config=encrypted) == [
        "tls-any://192.0.2.9:50052"
    ]


def test_of_two_shoal_nodes_the_one_with_the_smaller_id_dials() -> None:
    assert dialled("b", ours=True) == []  # this node is called coordinator
    assert dialled("d", ours=True) == ["tls-any://192.0.2.9:50052"]


def test_a_nodes_id_is_its_name_without_white_space() -> None:
    assert node_id("my machine\n2") == "my-machine-2"
    assert node_id(" ") == "shoal"
    assert len(node_id("é" * 300).encode()) == 256


def test_the_profile_contains_the_hardware() -> None:
    hardware = Hardware("Apple M2", gpu_cores=8, memory_gb=16.0, gpu_backend="metal")

    profile = hardware_profile(hardware, 5)

    assert profile == HardwareProfile(
        "Apple M2", 8, 16.0, has_ane=True, mps=True, data_port=5
    )
