"""TealeNet: peers on the local network and through relays serve and submit jobs.

Source: TealeNet's documents on cluster and relay messages, and exchanges recorded with
the real programs; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

from shoal.domain.worker import CHAT_ONLY
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    Listener,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
    UpgradeRequest,
)
from shoal.protocols.seam.peer_addresses import AddressDialer
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.protocol import Endpoint, WireProtocol
from shoal.protocols.seam.relay import RelayRoute
from shoal.protocols.tealenet.codec.relay_messages import MESSAGE_MAX as RELAYED_MAX
from shoal.protocols.tealenet.connections import (
    NODE_PARAMETER,
    RELAY_PATH,
    TealeDialer,
    dial_peer,
    dialled_connection,
    discovered_url,
    lan_session,
    peer_url,
    relay_url,
)
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode, coordinator_node
from shoal.protocols.tealenet.peer import LAN, TealeConnection
from shoal.protocols.tealenet.relay_client.node import RelayNode
from shoal.protocols.tealenet.relay_server.server import RelayServer

__all__ = ["PROTOCOL", "Config"]

SERVICE = "_teale._tcp"
VERSION = "1"  # of the service announcement
RANK = 10  # before the protocols that claim every upgrade with a query


def endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return the endpoints that the configuration enables, and Shoal's own relay.

    Raises ConfigError for an address that cannot be dialled.
    """
    local = coordinator_node(config, context)
    connections = DeviceConnections(local.device_id, LAN.disconnected_after)

    def dial(address: str) -> OutgoingConnection:
        return dialled_connection(local, peer_url(address), connections)

    enabled: list[Endpoint] = [_relay_route(local, context)]
    if config.lan:
        enabled.append(_listener(config, local, connections))
    enabled += [dial(address) for address in config.peers]
    if context.peer_addresses:
        enabled.append(AddressDialer("tealenet", context.peer_addresses, dial))
    enabled += [_membership(local, url) for url in config.relays]
    if config.browse:
        enabled.append(
            ServiceBrowser(SERVICE, partial(_dial_found, local, connections))
        )
    return enabled


def _relay_route(local: TealeLocalNode, context: ProtocolContext) -> RelayRoute:
    """Return Shoal's own relay, at which the coordinator is one of the nodes."""
    relay = RelayServer(context)
    return RelayRoute(
        RANK,
        is_relay_upgrade,
        relay,
        RELAYED_MAX,
        local_member=lambda now: RelayNode(local, now, relay.address_of),
    )


def is_relay_upgrade(request: UpgradeRequest) -> bool:
    """Return whether a request is for the relay: its query has the node's id."""
    names = {name for name, _ in parse_qsl(request.query, keep_blank_values=True)}
    return request.path == RELAY_PATH and NODE_PARAMETER in names


def _listener(
    config: Config, local: TealeLocalNode, connections: DeviceConnections
) -> Listener:
    def accept(address: str, now: float) -> PeerSession:
        connection = TealeConnection(dialled=False, address=address)
        return lan_session(local, connection, connections)

    text = {
        "deviceID": local.device_id,
        "chip": local.hardware.chip,
        "ram": str(round(local.hardware.memory_gb)),
        "version": VERSION,
    }
    return Listener(config.port, accept, ServiceRecord(SERVICE, local.name, text))


def _membership(local: TealeLocalNode, url: str) -> OutgoingConnection:
    """Return the connection with which the coordinator joins another relay."""
    assert local.identity is not None, "a coordinator has an identity"
    return OutgoingConnection(
        relay_url(url, local.identity.public_key.hex()),
        lambda now: RelayNode(local, now),
        message_max=RELAYED_MAX,
    )


def _dial_found(
    local: TealeLocalNode,
    connections: DeviceConnections,
    service: DiscoveredService,
    now: float,
) -> OutgoingConnection | None:
    """Return a connection to a discovered peer.

    None for this coordinator itself and for a device with a connection.
    """
    device_id = service.text.get("deviceID")
    if device_id is not None and connections.is_connected(device_id.upper(), now):
        return None
    if device_id == local.device_id or (
        device_id is None and service.name == local.name
    ):
        return None
    url = discovered_url(service)
    if url is None:
        return None
    return dialled_connection(local, url, connections, configured=False)


PROTOCOL = WireProtocol(
    name="tealenet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: "",
    schemes=frozenset({"http", "https", "ws", "wss", "tcp"}),
    dial=TealeDialer,
    peers="Macs, other pools and relays",
    kinds=CHAT_ONLY,
    has_keys=True,
    joint=True,
    plain_peers=lambda config, tls, anyone: (
        "peers" if anyone or config.admits_peers else ""
    ),
    peering=dial_peer,
)
