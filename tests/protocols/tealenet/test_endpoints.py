"""The endpoints that a configuration enables."""

from dataclasses import replace

import pytest

from protocols.contexts import protocol_context
from protocols.tealenet.peers import signer
from shoal.domain.errors import ConfigError
from shoal.domain.worker import Hardware
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    Listener,
    ListenerTls,
    OutgoingConnection,
    ServiceBrowser,
    UpgradeRequest,
)
from shoal.protocols.seam.relay import RelayRoute
from shoal.protocols.tealenet import SERVICE, Config, endpoints, is_relay_upgrade
from shoal.protocols.tealenet.local_node import device_id

CONTEXT = replace(
    protocol_context(),
    name="my host",
    identity=signer("a"),
    hardware=Hardware(chip="Apple M2", memory_gb=31.6),
)


def endpoints_of(kind: type, config: Config) -> list[object]:
    return [each for each in endpoints(config, CONTEXT) if isinstance(each, kind)]


def test_a_listener_is_announced_as_macs_expect_it() -> None:
    (plain,) = endpoints_of(Listener, Config(port=4011))

    assert isinstance(plain, Listener)
    assert (plain.port, plain.security) == (4011, ListenerTls.NONE)
    assert plain.service is not None
    assert (plain.service.kind, plain.service.name) == (SERVICE, "my host")
    assert plain.service.text == {
        "deviceID": device_id(signer("a"), ""),
        "chip": "Apple M2",
        "ram": "32",
        "version": "1",
    }


def test_only_enabled_endpoints_exist() -> None:
    assert endpoints_of(Listener, Config(lan=False)) == []
    assert (
        endpoints_of(ServiceBrowser, Config())
        == endpoints_of(OutgoingConnection, Config())
        == []
    )
    assert len(endpoints_of(RelayRoute, Config())) == 1
    assert len(endpoints_of(ServiceBrowser, Config(browse=True))) == 1


def test_configured_peers_and_relays_are_dialled() -> None:
    config = Config(peers=("one:1", "tcp://two:2"), relays=("wss://relay/ws",))

    urls = [
        each.url
        for each in endpoints_of(OutgoingConnection, config)
        if isinstance(each, OutgoingConnection)
    ]

    node = signer("a").public_key.hex()
    assert urls == ["tcp://one:1", "tcp://two:2", f"wss://relay/ws?node={node}"]


@pytest.mark.parametrize("peer", ["one", "http://one:1", "one:port"])
def test_an_invalid_peer_address_is_refused(peer: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        endpoints(Config(peers=(peer,)), CONTEXT)


def test_a_discovered_peer_is_dialled_unless_it_is_this_device() -> None:
    (browser,) = endpoints_of(ServiceBrowser, Config(browse=True))
    assert isinstance(browser, ServiceBrowser)
    other = DiscoveredService("a Mac", ("192.0.2.1",), 5, {"deviceID": "OTHER"})
    itself = replace(other, text={"deviceID": device_id(signer("a"), "")})
    nameless = replace(other, name="my host", text={})

    found = browser.on_found(other, 0.0)

    assert found is not None
    assert found.url == "tcp://192.0.2.1:5"
    assert browser.on_found(itself, 0.0) is None
    assert browser.on_found(nameless, 0.0) is None


@pytest.mark.parametrize(
    ("path", "query", "claimed"),
    [
        ("/ws", "node=ab", True),
        ("/ws", "node=", True),
        ("/ws", "", False),
        ("/ws", "token=a&model=b", False),
        ("/other", "node=ab", False),
    ],
)
def test_a_relay_upgrade_has_a_path_and_a_node_id(
    path: str, query: str, claimed: bool
) -> None:
    assert is_relay_upgrade(UpgradeRequest(path, query)) is claimed
