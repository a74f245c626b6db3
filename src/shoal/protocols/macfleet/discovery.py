"""Discovery on the local network (DNS-SD): listener, TXT record and browser.

Sources: the MacFleet document, "Discovery", and MacFleet's own programs.  A fleet with
a token announces only ids and ports.  Announcements are not authenticated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.addresses import HEARTBEAT_LABEL
from shoal.protocols.macfleet.codec import hardware
from shoal.protocols.macfleet.codec.heartbeat_lines import HeartbeatLine
from shoal.protocols.macfleet.codec.keys import service_type
from shoal.protocols.macfleet.election import compute_score
from shoal.protocols.macfleet.heartbeat import PongSession
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import POOL_VERSION, FleetRegistry, NodeAddress
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam import endpoints
from shoal.protocols.seam.peer_session import PeerSession

ID_MAX = 256  # characters


@dataclass(frozen=True, slots=True)
class NodeAnnouncement:
    """A node as it is announced; nothing of it is authenticated."""

    node_id: str
    data_port: int
    profile: hardware.HardwareProfile = hardware.UNKNOWN_PROFILE
    pool_version: str = POOL_VERSION


def encode_txt(
    node_id: str,
    profile: hardware.HardwareProfile,
    data_port: int,
    links: Sequence[str] = (),
) -> Mapping[str, str]:
    """Return the TXT record of a node of an open fleet, in upstream's field order.

    ``links`` are link types such as ``ethernet`` and ``wifi``.
    """
    return {
        "node_id": node_id,
        "gpu_cores": str(profile.gpu_cores),
        "ram_gb": str(int(profile.ram_gb)),
        "chip_name": profile.chip,
        "link_types": ",".join(links),
        "pool_version": POOL_VERSION,
        "compute_score": f"{compute_score(profile):.1f}",
        "data_port": str(data_port),
    }


def encode_secure_txt(node_id: str, data_port: int) -> Mapping[str, str]:
    """Return the TXT record of a node of a fleet with a token."""
    return {
        "node_id": node_id,
        "pool_version": POOL_VERSION,
        "data_port": str(data_port),
    }


def decode_txt(service: endpoints.DiscoveredService) -> NodeAnnouncement:
    """Decode a TXT record; without a ``node_id`` the service's name is the id.

    The announced score is ignored; it is computed from the other fields.

    Raises PeerError if a number is malformed or the id is invalid.
    """
    text = service.text
    node_id = text.get("node_id") or service.name
    if not 0 < len(node_id) <= ID_MAX or any(map(str.isspace, node_id)):
        raise PeerError(f"a node is announced with the invalid id {node_id[:ID_MAX]!r}")
    data_port = _number(text, "data_port", hardware.PORTS.stop - 1) or service.port + 1
    if data_port not in hardware.PORTS:
        raise PeerError(f"a node is announced with the port {data_port}")
    profile = replace(
        hardware.UNKNOWN_PROFILE,
        chip=text.get("chip_name", hardware.UNKNOWN_PROFILE.chip)[
            : hardware.CHIP_NAME_MAX
        ],
        gpu_cores=_number(text, "gpu_cores", hardware.CORES_MAX),
        ram_gb=float(_number(text, "ram_gb", int(hardware.SIZE_MAX))),
        data_port=data_port,
    )
    version = text.get("pool_version", POOL_VERSION)[:ID_MAX]
    return NodeAnnouncement(node_id, data_port, profile, version)


def _number(text: Mapping[str, str], name: str, limit: int) -> int:
    value = text.get(name, "0")
    if not value.isascii() or not value.isdecimal() or len(value) > len(str(limit)):
        raise PeerError(f"a node is announced with {name}={value[:ID_MAX]!r}")
    if (number := int(value)) > limit:
        raise PeerError(f"a node is announced with {name}={number}")
    return number


HEARTBEAT_FLAG = "--macfleet-heartbeat-port"
CERTIFICATE_SUBJECT = "macfleet-node"  # of certificates in any fleet
TLS_TIMEOUT = 5.0  # seconds for the TLS handshake; upstream clients give up after two


def heartbeat_listener(
    member: FleetMember,
    limiter: FleetRateLimiter,
    registry: FleetRegistry,
    port: int,
    *,
    spare: bool = False,
) -> endpoints.Listener:
    """Return the listener for heartbeats; ``spare``: it may use another port.

    Nodes that ping this one become known to ``registry``.
    """
    on_ping = partial(_on_ping, registry)

    def accept(address: str, now: float) -> PeerSession:
        return PongSession(member, limiter, address, on_ping)

    return endpoints.Listener(
        port,
        accept,
        endpoints.ServiceRecord(
            service_type(member.key), member.node_id, _TxtRecord(member)
        ),
        security=endpoints.ListenerTls.SELF_SIGNED
        if member.uses_tls
        else endpoints.ListenerTls.NONE,
        label=HEARTBEAT_LABEL,
        flag=HEARTBEAT_FLAG,
        falls_back=spare,
        gate=limiter,
        tls_timeout=TLS_TIMEOUT,
        subject=CERTIFICATE_SUBJECT,
    )


def browser(member: FleetMember, registry: FleetRegistry) -> endpoints.ServiceBrowser:
    """Return the browser for other nodes; it runs only if they can discover us too.

    A discovered node is not dialled: gossip pings it.
    """
    return endpoints.ServiceBrowser(
        service_type(member.key), partial(_on_found, member, registry), reciprocal=True
    )


def _on_ping(
    registry: FleetRegistry, ping: HeartbeatLine, address: str, now: float
) -> None:
    profile = None
    try:
        if ping.hardware is not None:
            profile = hardware.decode_profile(ping.hardware)
    except PeerError:
        return  # its pong would be rejected as well
    registry.on_pinged(ping.node_id, address, profile, now)


def _on_found(
    member: FleetMember,
    registry: FleetRegistry,
    service: endpoints.DiscoveredService,
    now: float,
) -> endpoints.OutgoingConnection | None:
    try:
        announcement = decode_txt(service)
    except PeerError:
        return None  # announcements are not authenticated
    # In a fleet with a token, a node's hardware is known after it has authenticated.
    record = (
        hardware.HardwareProfile(data_port=announcement.data_port)
        if member.key
        else announcement.profile
    )
    addresses = [NodeAddress(host, service.port) for host in service.addresses]
    registry.on_pool_version(announcement.node_id, announcement.pool_version)
    registry.on_announced(announcement.node_id, addresses, record, now)
    return None


class _TxtRecord(Mapping[str, str]):
    """The TXT record of a node, computed when it is announced."""

    def __init__(self, member: FleetMember) -> None:
        self._member = member

    def __getitem__(self, key: str) -> str:
        return self._current()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> Mapping[str, str]:
        member, profile = self._member, self._member.profile()
        if member.key is None:
            return encode_txt(member.node_id, profile, profile.data_port)
        return encode_secure_txt(member.node_id, profile.data_port)
