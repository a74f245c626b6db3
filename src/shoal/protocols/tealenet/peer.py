"""The description of a session's peer, before and after its ``hello``."""

from dataclasses import dataclass, replace
from enum import Enum

from shoal.domain.work import Feature
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import UNDESCRIBED, PeerProfile
from shoal.protocols.tealenet.codec.extension import CONTEXT_MAX, ShoalFeature
from shoal.protocols.tealenet.codec.scalars import NAME_MAX, well_formed

OFFERED_MAX = 256  # models of a plain peer that are used


class PeerSoftware(Enum):
    """The program that a peer runs, which decides what it understands."""

    MAC = "mac"  # also the default for unknown programs
    RUST = "rust"
    SHOAL = "shoal"


_FEATURES = {
    PeerSoftware.MAC: frozenset({Feature.STOP, Feature.TOOLS}),
    PeerSoftware.RUST: frozenset({Feature.STOP, Feature.TOOLS, Feature.SCHEMA}),
}


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """A relay's description of a peer that does not send its own."""

    models: tuple[str, ...] = ()
    context: int = 0
    available: bool = True
    profile: PeerProfile = UNDESCRIBED


@dataclass(frozen=True, slots=True)
class TealeConnection:
    """A connection whose peer has not introduced itself yet.

    ``dialled``: this end made the connection; ``configured``: the address comes from
    the configuration.  ``name`` is the peer's identity at a relay; on the local network
    the peer sends it.  ``binding`` is that of a channel encrypted by Noise, which
    proofs cover; empty for any other.
    """

    dialled: bool
    configured: bool = False
    name: str = ""
    software: PeerSoftware = PeerSoftware.MAC
    description: PeerDescription = PeerDescription()
    address: str = ""
    protection: Protection = Protection.PLAIN
    binding: bytes = b""

    def bound_to(self, binding: bytes) -> "TealeConnection":
        """Return the connection, encrypted by Noise."""
        return replace(self, protection=Protection.NOISE, binding=binding)


@dataclass(frozen=True, slots=True)
class TealePeer:
    """A peer that has introduced itself.

    ``refusal``: why it is not admitted; empty if it is.  ``submits_jobs``: it may
    submit jobs, and gets the offers of this end.  ``public_key`` is proven, or empty.
    ``anonymous``: it has no credential.
    """

    name: str
    software: PeerSoftware
    features: frozenset[ShoalFeature] = frozenset()
    submits_jobs: bool = False
    refusal: str = ""
    grant: AdmissionGrant = NO_JOIN_TOKEN
    public_key: bytes = b""
    is_coordinator: bool = False
    knows_passcode: bool = False
    anonymous: bool = False

    @property
    def is_shoal_worker(self) -> bool:
        """Whether the peer is a worker of Shoal's: it submits no jobs."""
        return self.runs_shoal and not self.is_coordinator

    @property
    def runs_shoal(self) -> bool:
        """Whether the peer knows Shoal's extension."""
        return self.software is PeerSoftware.SHOAL


def offers_by_name(
    software: PeerSoftware, description: PeerDescription
) -> tuple[Offer, ...]:
    """Return the offer of a plain peer, with the names that it uses for its models.

    It has one slot for all of them, whatever the peer announces: real peers run one
    request of a peer at a time, and let the others wait.
    """
    features = _FEATURES[
        PeerSoftware.RUST if software is PeerSoftware.RUST else PeerSoftware.MAC
    ]
    names = dict.fromkeys(well_formed(name) for name in description.models)
    models = [name for name in names if 0 < len(name) <= NAME_MAX][:OFFERED_MAX]
    if not models:
        return ()
    return (
        Offer(
            kinds=CHAT_ONLY,
            models=frozenset(models),
            features=features,
            context=min(max(0, description.context), CONTEXT_MAX),
        ),
    )
