"""How nodes are announced and found."""

from collections.abc import Mapping

import pytest

from protocols.macfleet.fleet.fleets import AWAY, KEY, limiter, member, sent
from shoal.protocols.crowd import Security, Sighting
from shoal.protocols.macfleet.fleet.meeting import browser, heartbeat_listener
from shoal.protocols.macfleet.fleet.registry import Address, Fleet, State
from shoal.protocols.macfleet.wire.hardware import Profile
from shoal.protocols.macfleet.wire.lines import Heard, write_ping

PROFILE = Profile(chip="M4", gpu_cores=10, ram_gb=16.0, data_port=4001)
TEXT = {"node_id": "b", "pool_version": "2.2.0", "data_port": "4000"}


def sight(key: bytes | None, text: Mapping[str, str], name: str = "b") -> Fleet:
    own = member(key=key)
    fleet = Fleet(own.node_id, own.profile)
    sighting = Sighting(name, ("192.0.2.1", "fe80::1%en0"), 50051, text)
    assert browser(own, fleet).meet(sighting, 0.0) is None
    return fleet


def test_secure_node_announces_an_id_and_ports_alone() -> None:
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
    assert listener.security is Security.OWN
    assert (listener.label, listener.flag) == (
        "heartbeat",
        "--macfleet-heartbeat-port",
    )


def test_open_node_announces_what_it_is_made_of() -> None:
    own = member(key=None, profile=PROFILE)
    listener = heartbeat_listener(own, limiter(), 0, spare=True)

    assert listener.service is not None
    assert listener.service.kind == "_macfleet._tcp"
    assert listener.service.text["compute_score"] == "116.0"
    assert listener.service.text["chip_name"] == "M4"
    assert listener.security is Security.NONE
    assert listener.spare


def test_listener_answers_pings() -> None:
    session = heartbeat_listener(member(), limiter(), 0).accept(AWAY, 0.0)
    session.tick(0.0)

    assert sent(session.receive([write_ping(KEY, Heard("b", bytes(16)))], 0.0))


def test_node_that_is_found_is_to_be_asked() -> None:
    node = sight(KEY, {**TEXT, "shoal": "1", "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.state is State.SIGHTED
    assert node.addresses == (
        Address("192.0.2.1", 50051),
        Address("fe80::1%en0", 50051),
    )
    assert node.ours
    # What it is made of, it says when it has shown the key.
    assert node.profile == Profile(data_port=4000)


def test_node_of_an_open_fleet_is_what_it_announces() -> None:
    node = sight(None, {**TEXT, "gpu_cores": "80"}).get("b")

    assert node is not None
    assert node.profile.gpu_cores == 80
    assert not node.ours


def test_node_without_an_id_or_a_port_is_found_by_its_name() -> None:
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
def test_nonsense_and_we_ourselves_are_not_found(text: Mapping[str, str]) -> None:
    assert not sight(KEY, text).nodes
