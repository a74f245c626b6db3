"""The local node, its peers, and the table of the peers that are connected.

MacFleet's own programs let a later connection with the same node id replace the earlier
one, whoever makes it; here it needs the same key, or the same address.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from weakref import WeakValueDictionary

from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.handshake import HandshakeSettings
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.multi_peer import NO_JOIN_TOKEN, Protection
from shoal.protocols.seam.session import AdmissionGrant


@dataclass(slots=True, eq=False, weakref_slot=True)
class FleetSeat:
    """A connection to a peer; ``last_received`` is when it last said that it is there.

    ``outbound``: it was us who made it.  After ``silence_max`` seconds without a word
    it is free; None: it need not say any.
    """

    name: str
    public_key: bytes
    address: str
    outbound: bool
    last_received: float
    silence_max: float | None

    def is_expired(self, now: float) -> bool:
        """Say whether it has been silent for too long."""
        return (
            self.silence_max is not None and now - self.last_received > self.silence_max
        )


@dataclass(slots=True)
class FleetSeatTable:
    """Who sits where, by name.

    Only its connection keeps a seat, so that none outlives it however that ends: a
    session is not told of every end.
    """

    _seats: WeakValueDictionary[str, FleetSeat] = field(
        default_factory=WeakValueDictionary
    )

    def claim(self, seat: FleetSeat, now: float) -> None:
        """Give a new connection its seat; an older one of the same peer gives way.

        Raises NotAdmitted if somebody else sits there.
        """
        seated = self._seats.get(seat.name)
        if seated is not None and not seated.is_expired(now):
            if seat.public_key != seated.public_key:
                raise NotAdmitted(
                    f"another machine is here by the name {seat.name!r}: choose "
                    "another --name"
                )
            if not seat.public_key and seat.address != seated.address:
                raise NotAdmitted(
                    f"{seat.name!r} is here already, from {seated.address}: while that "
                    "lasts it may connect anew only from there"
                )
        self._seats[seat.name] = seat

    def has_inbound(self, name: str) -> bool:
        """Say whether a peer of that name is here, and it was not us who called.

        It may have been silent for too long: its connection then ends at any moment.
        """
        seated = self._seats.get(name)
        return seated is not None and not seated.outbound

    def release(self, seat: FleetSeat) -> None:
        """Free a seat, if nobody has taken it meanwhile."""
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]


WORKER_FEATURE = (
    "works"  # the feature of one of ours that is there to work, and not to ask
)
APPLE_PREFIX = "Apple"  # how the names of chips begin that have a neural engine
METAL_BACKEND = "metal"
ID_MAX = 256  # bytes of a node's id, as the handshake has it


class FleetRole(Enum):
    """What one of our own is to the other end."""

    COORDINATOR = "coordinator"
    WORKER = "worker"  # serves whoever may ask it, and asks for nothing


def _ignore(reason: str) -> None:
    pass


def _keep_id() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class FleetLocalNode:
    """One end's own side.

    ``handshake`` is what handshakes need, but for the hardware, which is ``profile``:
    the port in it is known only when it is listened on.  ``slots`` is how many tasks
    at a time a worker gets that does not say how many it takes.  ``limiter`` is told
    how handshakes ended with those who called us, and ``on_refused`` why a peer does
    not want us, now or later.  ``on_rejected`` takes where somebody is who hung up as
    soon as he had our proof, as those do who do not want us and have no words for it,
    and ``on_id_conflict`` that somebody whom we have called has our own id: it says
    whether we have taken another.
    """

    role: FleetRole
    handshake: HandshakeSettings
    profile: Callable[[], HardwareProfile]
    slots: int
    limiter: FleetRateLimiter
    seats: FleetSeatTable = field(default_factory=FleetSeatTable)
    registry: FleetRegistry | None = None
    on_refused: Callable[[str], None] = _ignore
    on_rejected: Callable[[str], None] = _ignore
    on_id_conflict: Callable[[], bool] = _keep_id

    @property
    def is_open(self) -> bool:
        """Whether the fleet has no token."""
        return not self.handshake.digest

    @property
    def key(self) -> bytes | None:
        """The fleet's key; None in an open fleet."""
        return self.handshake.key

    def handshake_settings(self) -> HandshakeSettings:
        """Return what a handshake needs, as it is now."""
        return replace(self.handshake, profile=encode_profile(self.profile()))


def node_id(name: str) -> str:
    """Return the id of a node: its name, as far as one can be.

    There is no white space in ids, for that is what ends them in heartbeats.
    """
    text = "-".join(name.encode(errors="replace").decode().split()) or "shoal"
    return text.encode()[:ID_MAX].decode(errors="ignore")


def hardware_profile(hardware: Hardware, data_port: int = 0) -> HardwareProfile:
    """Return what a machine is made of, as nodes tell each other."""
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
    """A peer that has not said anything yet.

    ``dialled``: we made the connection.  ``expected_id`` is the id that it must have
    then; empty: any.  ``must_be_shoal`` says that it has to be one of ours, and so has
    to prove who it is as those do.  ``address`` has its port as well if it was us who
    dialled.
    """

    dialled: bool
    expected_id: str = ""
    must_be_shoal: bool = False
    address: str = ""
    protection: Protection = Protection.PLAIN

    @property
    def host(self) -> str:
        """Where it is, without the port."""
        if not self.dialled:
            return self.address
        return self.address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class FleetPeer:
    """A peer that has shown who it is.

    ``is_shoal``: it speaks our extension.  ``trusted``: it was let in by a token, and
    not because everybody is.  ``is_worker``: it is there to work, and not to ask.
    ``public_key`` is proven, if there is one.
    """

    name: str
    is_shoal: bool = False
    trusted: bool = False
    is_worker: bool = False
    may_ask: bool = False
    admitted: AdmissionGrant = NO_JOIN_TOKEN
    public_key: bytes = b""
