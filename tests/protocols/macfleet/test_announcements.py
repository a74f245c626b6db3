"""TXT records of announced nodes."""

import pytest

from protocols.macfleet.fleet_members import member
from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key, service_type
from shoal.protocols.macfleet.discovery import (
    NodeAnnouncement,
    browser,
    decode_txt,
    encode_secure_txt,
    encode_txt,
)
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.seam.endpoints import DiscoveredService


def sighting(**text: str) -> DiscoveredService:
    return DiscoveredService("node-a", ("192.0.2.1",), 50051, text)


@recorded("mdns")
def test_nodes_are_announced_as_upstream_does(case: Case) -> None:
    said, expected = case["input"], case["expect"]
    token, node_id, port = said["token"], said["node_id"], said["data_port"]
    profile = HardwareProfile("Apple M4 Pro", 10, 16.0, bandwidth_gbps=200.0)

    if token is None:
        text = encode_txt(node_id, profile, port, ("wifi", "thunderbolt"))
    else:
        text = encode_secure_txt(node_id, port)

    key = None if token is None else fleet_key(token, said["fleet_id"] or "")
    kind = f"{service_type(key)}.local."
    assert kind == expected["service_type"]
    assert f"{node_id}.{kind}" == expected["instance"]
    assert [[*each] for each in text.items()] == expected["txt"]


def test_an_upstream_record_is_decoded() -> None:
    text = dict(case_of("mdns/open")["expect"]["txt"])

    assert decode_txt(sighting(**text)) == NodeAnnouncement(
        "node-a", 50052, HardwareProfile("Apple M4 Pro", 10, 16.0, data_port=50052)
    )


def test_an_announcement_of_another_version_is_logged_once() -> None:
    logged: list[str] = []
    registry = FleetRegistry("me", HardwareProfile, logged.append)
    searching = browser(member(), registry)
    text = dict(case_of("mdns/secure")["expect"]["txt"])

    for version in ("2.2.0", "2.1.4", "2.1.4"):
        found = DiscoveredService(
            "node-a", ("192.0.2.1",), 50051, {**text, "pool_version": version}
        )
        searching.on_found(found, 0.0)

    assert logged == [
        "node 'node-a' has pool_version '2.1.4', and this node has '2.2.0'"
    ]
    assert registry.get("node-a") is not None


@pytest.mark.parametrize(
    ("text", "node_id", "data_port"),
    [
        ({}, "node-a", 50052),
        ({"node_id": ""}, "node-a", 50052),
        ({"node_id": "x", "data_port": "0"}, "x", 50052),
        ({"node_id": "n\u00f8de", "data_port": "7"}, "n\u00f8de", 7),
    ],
)
def test_missing_fields_follow_from_the_service(
    text: dict[str, str], node_id: str, data_port: int
) -> None:
    read = decode_txt(sighting(**text))

    assert (read.node_id, read.data_port) == (node_id, data_port)


@pytest.mark.parametrize(
    "text",
    [
        {"data_port": "x"},
        {"data_port": "-1"},
        {"data_port": "65536"},
        {"data_port": "\u0663"},
        {"gpu_cores": "many"},
        {"gpu_cores": "9" * 5000},
        {"ram_gb": "16.5"},
        {"ram_gb": "inf"},
        {"node_id": "a b"},
        {"node_id": "x" * 300},
    ],
    ids=lambda text: repr(text)[:40],
)
def test_invalid_records_are_rejected(text: dict[str, str]) -> None:
    with pytest.raises(PeerError, match="a node is announced"):
        decode_txt(sighting(**text))
