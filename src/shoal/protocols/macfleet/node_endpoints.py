"""A node's endpoints in a fleet: listeners, membership and discovery.

Coordinators and listening workers have the same ones.  The other nodes of the fleet
find either, and dial it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.domain.errors import ConfigError
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet import addresses, discovery, membership
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import TOKEN_MIN, fleet_key
from shoal.protocols.macfleet.gossip import FleetGossip, TransportDialer
from shoal.protocols.macfleet.local_node import (
    TRANSPORT_PORT,
    Config,
    FleetConnectionInfo,
    FleetLocalNode,
    FleetRole,
    hardware_profile,
    node_id,
)
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import Listener, ListenerTls, OutgoingConnection
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.protocol import Endpoint

TRANSPORT_FLAG = "--macfleet-transport-port"


@dataclass(slots=True)
class _LocalHardware:
    """The hardware of this machine; ``on_bound`` sets the transport port in it."""

    hardware: Hardware
    port: int = 0

    def on_bound(self, port: int) -> None:
        self.port = port

    def profile(self) -> HardwareProfile:
        return hardware_profile(self.hardware, self.port)


def endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return every endpoint of a coordinator.

    Returns none, with a warning, if the join token is too short for a fleet.

    Raises ConfigError for an invalid fleet token or peer address.
    """
    token = _fleet_token(config, context)
    if 0 < len(token) < TOKEN_MIN:
        return _no_endpoints(config, context)
    return _endpoints(config, context, token, FleetRole.COORDINATOR)


def worker_endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return every endpoint of a listening worker.

    Raises ConfigError for an invalid token or peer address, and without a token if the
    fleet is not declared open.
    """
    token = _fleet_token(config, context)
    if not token and not config.open:
        raise ConfigError(
            "--listen: the nodes of a fleet share a token, and none is set: set "
            "--token, or --macfleet-open for a fleet without a token"
        )
    if 0 < len(token) < TOKEN_MIN:
        raise ConfigError(
            f"--listen: a fleet's token has {TOKEN_MIN} characters or more, and this "
            f"one has {len(token)}"
        )
    return _endpoints(config, context, token, FleetRole.WORKER)


def _fleet_token(config: Config, context: ProtocolContext) -> str:
    """Return the fleet's token; empty for an open fleet."""
    if config.open and config.token:
        raise ConfigError(
            "--macfleet-open and --macfleet-token: an open fleet has no token; omit "
            "one of them"
        )
    return "" if config.open else config.token or context.token


def _endpoints(
    config: Config, context: ProtocolContext, token: str, role: FleetRole
) -> Sequence[Endpoint]:
    machine = _LocalHardware(context.hardware)
    member = FleetMember(
        node_id(context.name),
        fleet_key(token, config.fleet) if token else None,
        machine.profile,
        context.random_bytes,
        open_tls=config.tls,
        accepts_v1=config.v1,
    )
    limiter, transport_limiter = (
        FleetRateLimiter(context.throttle, spares_loopback=not token) for _ in range(2)
    )
    registry = membership.FleetRegistry(member.node_id, machine.profile, context.warn)
    local = FleetLocalNode(role, member, config.slots, transport_limiter, registry)
    dialer = TransportDialer(
        lambda node: not local.seats.has_inbound(node.id), partial(_dial, local)
    )
    heartbeats = _port(config.heartbeat_port, membership.HEARTBEAT_PORT)
    contacts = [addresses.parse_contact(each) for each in config.peers]
    peer_addresses = {
        addresses.parse_contact(each.address): each for each in context.peer_addresses
    }
    result: list[Endpoint] = [
        # Before the heartbeat listener, which announces the transport port.
        _listener(config, local, machine),
        discovery.heartbeat_listener(
            member, limiter, registry, heartbeats, spare=config.heartbeat_port is None
        ),
        FleetGossip(member, registry, contacts, dialer, peer_addresses),
    ]
    if config.browse:
        result.append(discovery.browser(member, registry))
    return result


def _no_endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    if config.token:
        raise ConfigError(
            f"--macfleet-token: expected {TOKEN_MIN} characters or more, and it has "
            f"{len(config.token)}; use a longer token"
        )
    context.warn(
        f"the join token has fewer than {TOKEN_MIN} characters, too few for a "
        "MacFleet token, so MacFleet's ports stay closed: set --macfleet-token, or "
        "--macfleet-open for a fleet without a token"
    )
    return ()


def _port(configured: int | None, default: int) -> int:
    return default if configured is None else configured


def _listener(
    config: Config, local: FleetLocalNode, machine: _LocalHardware
) -> Listener:
    def accept(address: str, now: float) -> PeerSession:
        return FleetSession(local, FleetConnectionInfo(dialled=False, address=address))

    return Listener(
        _port(config.transport_port, TRANSPORT_PORT),
        accept,
        security=ListenerTls.SELF_SIGNED if local.member.uses_tls else ListenerTls.NONE,
        label=addresses.TRANSPORT_LABEL,
        flag=TRANSPORT_FLAG,
        falls_back=config.transport_port is None,
        gate=local.limiter,
        subject=discovery.CERTIFICATE_SUBJECT,
        on_bound=machine.on_bound,
    )


def _dial(local: FleetLocalNode, node: membership.FleetNode) -> OutgoingConnection:
    """Dial a node's transport; its default port if it states none.

    Nodes of open fleets and of version 2.1 state none.
    """
    address = str(replace(node.address, port=node.data_port))
    connection = FleetConnectionInfo(dialled=True, address=address, expected_id=node.id)
    url = addresses.transport_url(address, secure=local.member.uses_tls)
    return OutgoingConnection(url, lambda now: FleetSession(local, connection))
