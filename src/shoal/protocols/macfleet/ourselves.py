"""What one of our own is and has: the same on every connection that it makes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.desk import Desk
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.registry import Fleet
from shoal.protocols.macfleet.handshake import Own
from shoal.protocols.macfleet.wire.hardware import Profile, write_profile

WORKS = "works"  # the feature of one of ours that is there to work, and not to ask
APPLE = "Apple"  # how the names of chips begin that have a neural engine
METAL = "metal"
ID_MAX = 256  # bytes of a node's id, as the handshake has it


class Role(Enum):
    """What one of our own is to the other end."""

    COORDINATOR = "coordinator"
    WORKER = "worker"  # serves whoever may ask it, and asks for nothing


def _to_nobody(reason: str) -> None:
    pass


def _no_other_name() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Ourselves:
    """One end's own side.

    ``node`` is what handshakes need, but for the hardware, which is ``profile``: the
    port in it is known only when it is listened on.  ``slots`` is how many tasks at a
    time a worker gets that does not say how many it takes.  ``limiter`` is told how
    handshakes ended with those who called us, and ``turned_away`` why a peer does not
    want us, now or later.  ``rejected`` takes where somebody is who hung up as soon as
    he had our proof, as those do who do not want us and have no words for it, and
    ``namesake`` that somebody whom we have called has our own id: it says whether we
    have taken another.
    """

    role: Role
    node: Own
    profile: Callable[[], Profile]
    slots: int
    limiter: Limiter
    desk: Desk = field(default_factory=Desk)
    fleet: Fleet | None = None
    turned_away: Callable[[str], None] = _to_nobody
    rejected: Callable[[str], None] = _to_nobody
    namesake: Callable[[], bool] = _no_other_name

    @property
    def is_open(self) -> bool:
        """Whether the fleet has no token."""
        return not self.node.digest

    @property
    def key(self) -> bytes | None:
        """The fleet's key; None in an open fleet."""
        return self.node.key

    def at_hand(self) -> Own:
        """Return what a handshake needs, as it is now."""
        return replace(self.node, profile=write_profile(self.profile()))


def node_id(name: str) -> str:
    """Return the id of a node: its name, as far as one can be.

    There is no white space in ids, for that is what ends them in heartbeats.
    """
    text = "-".join(name.encode(errors="replace").decode().split()) or "shoal"
    return text.encode()[:ID_MAX].decode(errors="ignore")


def profile_of(hardware: Hardware, data_port: int = 0) -> Profile:
    """Return what a machine is made of, as nodes tell each other."""
    return Profile(
        chip=hardware.chip,
        gpu_cores=hardware.gpu_cores,
        ram_gb=hardware.memory_gb,
        bandwidth_gbps=hardware.bandwidth_gb,
        has_ane=hardware.chip.startswith(APPLE),
        mps=hardware.gpu_backend == METAL,
        data_port=data_port,
    )
