"""MacFleet's settings, the local node, its peers, and the table of connected peers.

In MacFleet's own programs a later connection with the same node id replaces the earlier
one, whichever node makes it; here it must come from the same address.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakValueDictionary

from shoal.domain.errors import NotAdmitted
from shoal.domain.settings import setting
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.handshake_messages import ID_MAX
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import HEARTBEAT_PORT, FleetRegistry
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter

TRANSPORT_PORT = 50052  # MacFleet's default


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of MacFleet."""

    token: str = setting(
        "token of the fleet, 8 characters or more; its holders may serve and submit "
        "jobs; empty: the join token",
        "",
        secret=True,
    )
    fleet: str = setting(
        "id of the fleet; with the token, it makes the fleet's key (default: default)",
        "",
        "ID",
    )
    open: bool = setting(
        "open fleet, without token and TLS: everyone who can reach the ports may "
        "serve and submit jobs",
        False,
    )
    tls: bool = setting(
        "TLS in an open fleet, as MacFleet's --tls; fleets with a token always use it",
        False,
    )
    v1: bool = setting(
        "also accept the version 1 handshake, which a reflection attack "
        "can pass without the token",
        False,
    )
    heartbeat_port: int | None = setting(
        "port for heartbeats; 0: the system chooses (default: "
        f"{HEARTBEAT_PORT}, or another if that is in use)",
        None,
    )
    transport_port: int | None = setting(
        "port for tasks; 0: the system chooses (default: "
        f"{TRANSPORT_PORT}, or another if that is in use)",
        None,
    )
    peers: tuple[str, ...] = setting(
        "nodes to contact without discovery: HOST:PORT of their heartbeats, separated "
        "by commas",
        (),
        "ADDRESSES",
    )
    browse: bool = setting("discover nodes of the fleet on the local network", True)
    slots: int = setting(
        "concurrent tasks for each worker, since MacFleet's do not report a number",
        4,
        "N",
    )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FleetSeat:
    """The place of a connected peer in the table; ``outbound``: this node dialled."""

    name: str
    address: str
    outbound: bool


@dataclass(slots=True)
class FleetSeatTable:
    """The seats of connected peers, by name.

    References are weak: only its connection holds a seat, so that none outlives the
    connection however that ends.
    """

    _seats: WeakValueDictionary[str, FleetSeat] = field(
        default_factory=WeakValueDictionary
    )

    def claim(self, seat: FleetSeat) -> None:
        """Add a new connection; it replaces an older one from the same address.

        Raises NotAdmitted if a peer at another address has that name.
        """
        current = self._seats.get(seat.name)
        if current is not None and seat.address != current.address:
            raise NotAdmitted(
                f"{seat.name!r} is already connected from {current.address}: until "
                "that ends, it can only reconnect from there"
            )
        self._seats[seat.name] = seat

    def has_inbound(self, name: str) -> bool:
        """Say whether a peer of that name has an incoming connection."""
        current = self._seats.get(name)
        return current is not None and not current.outbound

    def release(self, seat: FleetSeat) -> None:
        """Remove a seat, unless a newer connection has replaced it."""
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]


APPLE_PREFIX = "Apple"  # of the names of chips with a neural engine
METAL_BACKEND = "metal"


class FleetRole(Enum):
    """What this node is to its peers."""

    COORDINATOR = "coordinator"
    WORKER = "worker"  # runs the jobs of its peers, and submits none


def _ignore(reason: str) -> None:
    pass


def _keep_id() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class FleetLocalNode:
    """This node, as all its connections see it.

    ``slots`` is the number of concurrent tasks for each worker, which does not report
    one.  ``limiter`` receives the outcome of incoming handshakes.  ``on_refused``
    receives why a peer refuses this node.  ``on_rejected`` receives the address of a
    peer that disconnected right after the handshake, as upstream nodes do to reject
    one.  ``on_id_conflict`` is called if a dialled peer has this node's id; it returns
    whether this node now has another.
    """

    role: FleetRole
    member: FleetMember
    slots: int
    limiter: FleetRateLimiter
    registry: FleetRegistry
    seats: FleetSeatTable = field(default_factory=FleetSeatTable)
    on_refused: Callable[[str], None] = _ignore
    on_rejected: Callable[[str], None] = _ignore
    on_id_conflict: Callable[[], bool] = _keep_id


def node_id(name: str) -> str:
    """Return a node id made from a name.

    White space is replaced, because it separates the fields of heartbeats.
    """
    text = "-".join(name.encode(errors="replace").decode().split()) or "shoal"
    return text.encode()[:ID_MAX].decode(errors="ignore")


def hardware_profile(hardware: Hardware, data_port: int = 0) -> HardwareProfile:
    """Return a machine's hardware as a profile."""
    return HardwareProfile(
        chip=hardware.chip,
        gpu_cores=hardware.gpu_cores,
        ram_gb=hardware.memory_gb,
        bandwidth_gbps=hardware.bandwidth_gb,
        has_ane=hardware.chip.startswith(APPLE_PREFIX),
        mps=hardware.gpu_backend == METAL_BACKEND,
        data_port=data_port,
    )


@dataclass(frozen=True, slots=True)
class FleetConnectionInfo:
    """A connection before its handshake.

    ``dialled``: this node made it.  The peer must then have the id ``expected_id``;
    empty: any.  ``address`` includes the port if this node dialled.
    """

    dialled: bool
    address: str
    expected_id: str = ""

    @property
    def host(self) -> str:
        """The address without the port."""
        if not self.dialled:
            return self.address
        return self.address.rpartition(":")[0].strip("[]")
