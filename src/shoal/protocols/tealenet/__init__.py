"""TealeNet: peers on the local network and through relays, who serve and ask alike.

Source: TealeNet's documents on cluster and relay messages, and exchanges recorded with
the real programs; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

from shoal.protocols.seam.multi_peer import (
    DiscoveredService,
    Listener,
    ListenerTls,
    MultiPeerSession,
    OutgoingConnection,
    Protection,
    RelayRoute,
    ServiceBrowser,
    ServiceRecord,
)
from shoal.protocols.seam.peer_addresses import AddressDialer
from shoal.protocols.seam.protocol import Endpoint, WireProtocol
from shoal.protocols.seam.session import ProtocolContext, UpgradeRequest
from shoal.protocols.tealenet.codec.relay_messages import MESSAGE_MAX as RELAYED_MAX
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.connections import (
    MESSAGE_MAX,
    NODE_PARAMETER,
    RELAY_PATH,
    TealeDialer,
    dial_peer,
    dialled_session,
    discovered_url,
    lan_session,
    peer_url,
    relay_url,
)
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.local_node import TealeLocalNode, coordinator_node
from shoal.protocols.tealenet.membership.node_directory import PinnedKeys
from shoal.protocols.tealenet.membership.relay_node import RelayNode
from shoal.protocols.tealenet.peer import TealeConnection
from shoal.protocols.tealenet.relay.server import RelayServer

__all__ = ["PROTOCOL", "Config"]

SERVICE = "_teale._tcp"
VERSION = "1"  # of what is announced
RANK = 10  # before wires on which any query means a worker


def endpoints(config: Config, setting: ProtocolContext) -> Sequence[Endpoint]:
    """Return every way to peers that the configuration allows, and our own relay.

    Raises ConfigError for an address that cannot be dialled.
    """
    own = coordinator_node(config, setting)
    desk = DeviceConnections(own.device_id, LAN.disconnected_after)
    pinned = PinnedKeys()
    found: list[Endpoint] = [_relay_route(own, setting, pinned)]
    if config.lan:
        found += _listeners(config, own, desk)
    for address in config.peers:
        url = peer_url(address)
        found.append(_dial(own, url, desk, configured=True))
    if setting.peer_addresses:
        found.append(
            AddressDialer(
                "tealenet",
                setting.peer_addresses,
                lambda address: _dial(own, peer_url(address), desk, configured=True),
            )
        )
    found += [_membership(own, url, pinned) for url in config.relays]
    if config.browse:
        found.append(ServiceBrowser(SERVICE, partial(_dial_found, own, desk)))
    return found


def _relay_route(
    own: TealeLocalNode, setting: ProtocolContext, pinned_keys: PinnedKeys
) -> RelayRoute:
    """Return our own relay, on which we are a node like any other."""
    relay = RelayServer(setting)
    return RelayRoute(
        RANK,
        is_relay_upgrade,
        relay,
        RELAYED_MAX,
        local_member=lambda now: RelayNode(own, now, pinned_keys, relay.address_of),
    )


def is_relay_upgrade(hello: UpgradeRequest) -> bool:
    """Say whether a connection is for the relay: all real nodes say who they are."""
    names = {name for name, _ in parse_qsl(hello.query, keep_blank_values=True)}
    return hello.path == RELAY_PATH and NODE_PARAMETER in names


def _listeners(
    config: Config, own: TealeLocalNode, connections: DeviceConnections
) -> Sequence[Listener]:
    def accept(protection: Protection, address: str, now: float) -> MultiPeerSession:
        caller = TealeConnection(dialled=False, address=address, protection=protection)
        return lan_session(own, caller, connections)

    return [
        Listener(config.port, partial(accept, Protection.PLAIN), _service_record(own)),
        # Real peers know of none: it is found by whoever asks over HTTPS.
        Listener(0, partial(accept, Protection.TLS), security=ListenerTls.COORDINATOR),
    ]


def _service_record(own: TealeLocalNode) -> ServiceRecord:
    text = {
        "deviceID": own.device_id,
        "chip": own.hardware.chip,
        "ram": str(round(own.hardware.memory_gb)),
        "version": VERSION,
        "shoal": VERSION,  # real peers skip it
    }
    return ServiceRecord(SERVICE, own.name, text)


def _dial(
    own: TealeLocalNode, url: str, connections: DeviceConnections, *, configured: bool
) -> OutgoingConnection:
    def open_(now: float) -> MultiPeerSession:
        return dialled_session(own, url, connections, configured=configured)

    return OutgoingConnection(url, open_, message_max=MESSAGE_MAX)


def _membership(
    own: TealeLocalNode, url: str, pinned_keys: PinnedKeys
) -> OutgoingConnection:
    """Return how we take part in another relay."""
    assert own.identity is not None, "a coordinator has one"
    return OutgoingConnection(
        relay_url(url, own.identity.public_key.hex()),
        lambda now: RelayNode(own, now, pinned_keys),
        message_max=RELAYED_MAX,
    )


def _dial_found(
    own: TealeLocalNode,
    connections: DeviceConnections,
    sighting: DiscoveredService,
    now: float,
) -> OutgoingConnection | None:
    """Return how to connect to a peer that was found.

    That is not to be with ourselves, nor with whom we are connected already.
    """
    found = sighting.text.get("deviceID")
    if found is not None and connections.is_connected(found.upper(), now):
        return None
    if found == own.device_id or (found is None and sighting.name == own.name):
        return None
    url = discovered_url(sighting)
    return None if url is None else _dial(own, url, connections, configured=False)


PROTOCOL = WireProtocol(
    name="tealenet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https", "ws", "wss", "tcp", "tls"}),
    dial=TealeDialer,
    signs=True,
    joint=True,
    preferred=True,
    service=SERVICE,
    peering=dial_peer,
)
