"""Discovery on the local network (DNS-SD): listener, TXT record and browser.

Sources: the MacFleet document, "Discovery", and MacFleet's own programs.  A fleet with
a token announces no more than an id and ports.  Announcements prove nothing: anyone may
have sent them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.hardware import (
    CHIP_NAME_MAX,
    CORES_MAX,
    PORTS,
    SIZE_MAX,
    UNKNOWN_PROFILE,
    HardwareProfile,
)
from shoal.protocols.macfleet.codec.keys import service_type
from shoal.protocols.macfleet.election import compute_score
from shoal.protocols.macfleet.heartbeat import FleetMember, PongSession
from shoal.protocols.macfleet.membership import FleetRegistry, NodeAddress
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.multi_peer import (
    DiscoveredService,
    Listener,
    ListenerTls,
    MultiPeerSession,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
)

POOL_VERSION = "2.2.0"  # that of the programs whose wire this is
ID_MAX = 256  # characters


@dataclass(frozen=True, slots=True)
class NodeAnnouncement:
    """A node that may be there, and what it says that it is made of."""

    node_id: str
    data_port: int
    profile: HardwareProfile = UNKNOWN_PROFILE


def encode_txt(
    node_id: str, profile: HardwareProfile, data_port: int, links: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the TXT record of a node of an open fleet, in real peers' order.

    ``links`` are such as ``ethernet`` and ``wifi``.
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
    """Return the TXT record of a node of a fleet that has a token."""
    return {
        "node_id": node_id,
        "pool_version": POOL_VERSION,
        "data_port": str(data_port),
    }


def decode_txt(sighting: DiscoveredService) -> NodeAnnouncement:
    """Read a TXT record; a node that tells no id is called by the service's name.

    Its score is not believed: it follows from the rest.

    Raises PeerError if a number is none, or the id cannot be one.
    """
    text = sighting.text
    node_id = text.get("node_id") or sighting.name
    if not 0 < len(node_id) <= ID_MAX or any(map(str.isspace, node_id)):
        raise PeerError(f"a node is announced as {node_id[:ID_MAX]!r}: that is no id")
    data_port = _number(text, "data_port", PORTS.stop - 1) or sighting.port + 1
    if data_port not in PORTS:
        raise PeerError(f"a node is announced with the port {data_port}")
    profile = replace(
        UNKNOWN_PROFILE,
        chip=text.get("chip_name", UNKNOWN_PROFILE.chip)[:CHIP_NAME_MAX],
        gpu_cores=_number(text, "gpu_cores", CORES_MAX),
        ram_gb=float(_number(text, "ram_gb", int(SIZE_MAX))),
        data_port=data_port,
    )
    return NodeAnnouncement(node_id, data_port, profile)


def _number(text: Mapping[str, str], name: str, most: int) -> int:
    said = text.get(name, "0")
    if not said.isascii() or not said.isdecimal() or len(said) > len(str(most)):
        raise PeerError(f"a node is announced with {name}={said[:ID_MAX]!r}")
    if (number := int(said)) > most:
        raise PeerError(f"a node is announced with {name}={number}")
    return number


HEARTBEAT_LABEL = "heartbeat"
HEARTBEAT_FLAG = "--macfleet-heartbeat-port"
CERTIFICATE_SUBJECT = "macfleet-node"  # whose certificates are, in any fleet
TLS_WITHIN = 5.0  # seconds for the handshake of TLS; real callers leave after two
SHOAL_KEY = "shoal"  # in the TXT record of ours, which real nodes skip
SHOAL_VERSION = "1"  # of what ours announce


def heartbeat_listener(
    member: FleetMember, limiter: FleetRateLimiter, port: int, *, spare: bool = False
) -> Listener:
    """Return where heartbeats are answered; a ``spare`` port may be another."""

    def accept(address: str, now: float) -> MultiPeerSession:
        return PongSession(member, limiter, address)

    return Listener(
        port,
        accept,
        ServiceRecord(service_type(member.key), member.node_id, _TxtRecord(member)),
        security=ListenerTls.NONE if member.key is None else ListenerTls.SELF_SIGNED,
        label=HEARTBEAT_LABEL,
        flag=HEARTBEAT_FLAG,
        falls_back=spare,
        gate=limiter,
        tls_timeout=TLS_WITHIN,
        subject=CERTIFICATE_SUBJECT,
    )


def browser(member: FleetMember, registry: FleetRegistry) -> ServiceBrowser:
    """Return a look for other nodes of the fleet, if they can find us as well.

    Who is found is not called: it is asked for its heartbeat, in rounds.
    """
    return ServiceBrowser(
        service_type(member.key),
        partial(_on_sighting, member, registry),
        reciprocal=True,
    )


def _on_sighting(
    member: FleetMember,
    registry: FleetRegistry,
    sighting: DiscoveredService,
    now: float,
) -> OutgoingConnection | None:
    try:
        found = decode_txt(sighting)
    except PeerError:
        return None  # anybody can announce anything
    # What a node of a fleet with a token is made of, it says when it has shown the key.
    told = HardwareProfile(data_port=found.data_port) if member.key else found.profile
    addresses = [NodeAddress(host, sighting.port) for host in sighting.addresses]
    ours = SHOAL_KEY in sighting.text
    registry.on_announced(found.node_id, addresses, told, now, is_shoal=ours)
    return None


class _TxtRecord(Mapping[str, str]):
    """What a node's TXT record says, as it is when it is announced."""

    def __init__(self, member: FleetMember) -> None:
        self._member = member

    def __getitem__(self, key: str) -> str:
        return self._current()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> Mapping[str, str]:
        own, profile = self._member, self._member.profile()
        if own.key is None:
            told = encode_txt(own.node_id, profile, profile.data_port)
        else:
            told = encode_secure_txt(own.node_id, profile.data_port)
        return {**told, SHOAL_KEY: SHOAL_VERSION}
