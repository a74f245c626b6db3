"""What is known about a session's peer, before and after its ``hello``."""

from dataclasses import dataclass
from enum import Enum

from shoal.domain.work import Feature
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.seam.multi_peer import NO_JOIN_TOKEN, Protection
from shoal.protocols.seam.session import AdmissionGrant
from shoal.protocols.tealenet.codec.extension import ShoalFeature
from shoal.protocols.tealenet.codec.scalars import NAME_MAX, well_formed

SLOTS_MAX = 1024  # jobs at a time that we believe a peer to run
CONTEXT_MAX = 2**31 - 1  # tokens


class PeerSoftware(Enum):
    """Whose program a peer is, which decides what it understands."""

    MAC = "mac"  # and whatever else is not known
    RUST = "rust"
    SHOAL = "ours"


_FEATURES = {
    PeerSoftware.MAC: frozenset({Feature.STOP, Feature.TOOLS}),
    PeerSoftware.RUST: frozenset({Feature.STOP, Feature.TOOLS, Feature.SCHEMA}),
}


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """What a carrier tells of a peer that says nothing of the kind itself."""

    models: tuple[str, ...] = ()
    slots: int = 1
    context: int = 0
    available: bool = True


@dataclass(frozen=True, slots=True)
class TealeConnection:
    """A peer that has not said anything yet.

    ``dialled``: we made the connection, and ``configured``: because an operator told us
    to. ``name`` is its identity, where the carrier knows it; otherwise it says who it
    is.
    """

    dialled: bool
    configured: bool = False
    name: str = ""
    software: PeerSoftware = PeerSoftware.MAC
    description: PeerDescription = PeerDescription()
    address: str = ""
    protection: Protection = Protection.PLAIN


@dataclass(frozen=True, slots=True)
class TealePeer:
    """A peer that has said who it is.

    ``refusal`` is why it is not let in; empty: it is.  ``submits_jobs`` says whether it
    may ask for work, and is told what there is.  ``public_key`` is proven, if there is
    one.
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

    @property
    def runs_shoal(self) -> bool:
        """Whether it speaks our extension."""
        return self.software is PeerSoftware.SHOAL


def offers_by_name(
    software: PeerSoftware, description: PeerDescription
) -> tuple[Offer, ...]:
    """Return what a peer that is not ours can run: it names its models, and no more.

    Models are found by exactly the names that it gives them.
    """
    features = _FEATURES[
        PeerSoftware.RUST if software is PeerSoftware.RUST else PeerSoftware.MAC
    ]
    names = dict.fromkeys(well_formed(name) for name in description.models)
    return tuple(
        Offer(
            kinds=CHAT_ONLY,
            models=frozenset({name}),
            slots=min(max(1, description.slots), SLOTS_MAX),
            features=features,
            context=min(max(0, description.context), CONTEXT_MAX),
        )
        for name in names
        if 0 < len(name) <= NAME_MAX
    )
