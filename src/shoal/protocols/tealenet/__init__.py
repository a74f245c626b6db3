"""TealeNet: peers on the local network and through relays serve and submit jobs.

Source: TealeNet's documents on cluster and relay messages, and exchanges recorded with
the real programs; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    Listener,
    ListenerTls,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
    UpgradeRequest,
)
from shoal.protocols.seam.peer_addresses import AddressDialer
from shoal.protocols.seam.peer_session import PeerSession, Protection
from shoal.protocols.seam.protocol import Endpoint, WireProtocol
from shoal.protocols.seam.relay import RelayRoute
from shoal.protocols.tealenet.codec.relay_messages import MESSAGE_MAX as RELAYED_MAX
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.connections import (
    MESSAGE_MAX,
    NODE_PARAMETER,
    RELAY_PATH,
    SHOAL_MARK,
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
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import TealeConnection
from shoal.protocols.tealenet.relay.server import RelayServer

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
    pinned_keys = PinnedKeys()

    def dial(address: str) -> OutgoingConnection:
        return _dial(local, peer_url(address), connections, configured=True)

    enabled: list[Endpoint] = [_relay_route(local, context, pinned_keys)]
    if config.lan:
        enabled += _listeners(config, local, connections)
    enabled += [dial(address) for address in config.peers]
    if context.peer_addresses:
        enabled.append(AddressDialer("tealenet", context.peer_addresses, dial))
    enabled += [_membership(local, url, pinned_keys) for url in config.relays]
    if config.browse:
        enabled.append(
            ServiceBrowser(SERVICE, partial(_dial_found, local, connections))
        )
    return enabled


def _relay_route(
    local: TealeLocalNode, context: ProtocolContext, pinned_keys: PinnedKeys
) -> RelayRoute:
    """Return Shoal's own relay, at which the coordinator is one of the nodes."""
    relay = RelayServer(context)
    return RelayRoute(
        RANK,
        is_relay_upgrade,
        relay,
        RELAYED_MAX,
        local_member=lambda now: RelayNode(local, now, pinned_keys, relay),
    )


def is_relay_upgrade(request: UpgradeRequest) -> bool:
    """Return whether a request is for the relay: its query has the node's id."""
    names = {name for name, _ in parse_qsl(request.query, keep_blank_values=True)}
    return request.path == RELAY_PATH and NODE_PARAMETER in names


def _listeners(
    config: Config, local: TealeLocalNode, connections: DeviceConnections
) -> Sequence[Listener]:
    def accept(protection: Protection, address: str, now: float) -> PeerSession:
        return lan_session(
            local,
            TealeConnection(dialled=False, address=address, protection=protection),
            connections,
        )

    return [
        Listener(
            config.port,
            partial(accept, Protection.PLAIN),
            _service_record(local),
            encrypts=True,
        ),
        # Not announced, because real peers do not use TLS; Shoal's /healthz has it.
        Listener(
            0,
            partial(accept, Protection.TLS),
            security=ListenerTls.COORDINATOR,
            encrypts=True,
        ),
    ]


def _service_record(local: TealeLocalNode) -> ServiceRecord:
    text = {
        "deviceID": local.device_id,
        "chip": local.hardware.chip,
        "ram": str(round(local.hardware.memory_gb)),
        "version": VERSION,
        SHOAL_MARK: VERSION,
    }
    return ServiceRecord(SERVICE, local.name, text)


def _dial(
    local: TealeLocalNode, url: str, connections: DeviceConnections, *, configured: bool
) -> OutgoingConnection:
    form = PayloadForm()

    def open_(now: float) -> PeerSession:
        return dialled_session(local, url, connections, form, configured=configured)

    return OutgoingConnection(url, open_, message_max=MESSAGE_MAX)


def _membership(
    local: TealeLocalNode, url: str, pinned_keys: PinnedKeys
) -> OutgoingConnection:
    """Return the connection with which the coordinator joins another relay."""
    assert local.identity is not None, "a coordinator has an identity"
    return OutgoingConnection(
        relay_url(url, local.identity.public_key.hex()),
        lambda now: RelayNode(local, now, pinned_keys),
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
    return None if url is None else _dial(local, url, connections, configured=False)


PROTOCOL = WireProtocol(
    name="tealenet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https", "ws", "wss", "tcp", "tls"}),
    dial=TealeDialer,
    peers="Macs, other pools and relays",
    signs=True,
    joint=True,
    encrypts=True,
    plain_peers=lambda config, tls: "peers that are not Shoal's workers",
    peering=dial_peer,
)
