"""A session's peer and its link: what is known before and after its ``hello``.

Source: what real peers do; see ``docs/protocols/tealenet.md``.
"""

from dataclasses import dataclass
from enum import Enum

from shoal.domain.work import Feature
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import UNDESCRIBED, PeerProfile
from shoal.protocols.tealenet.codec import scalars

OFFERED_MAX = 256  # models of a peer that are used


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The parameters of a kind of links; times are in seconds.

    ``requires_hello``: the dialling peer must send a hello first; otherwise peers need
    not.  ``degraded_after`` and ``disconnected_after`` count from a peer's last
    heartbeat.  ``shares_models``: models may be copied over the link.
    """

    requires_hello: bool
    heartbeat_interval: float
    degraded_after: float
    disconnected_after: float
    shares_models: bool
    message_max: int


LAN = LinkProfile(
    requires_hello=True,
    heartbeat_interval=5.0,
    degraded_after=15.0,
    disconnected_after=30.0,
    shares_models=True,
    message_max=4 << 20,
)
WAN = LinkProfile(
    requires_hello=False,
    heartbeat_interval=15.0,
    # Three intervals, because a relay may be slow.
    degraded_after=45.0,
    disconnected_after=90.0,
    shares_models=False,
    # A relay accepts 16 MiB, of which base64 leaves three quarters.
    message_max=11 << 20,
)


class PeerSoftware(Enum):
    """The program that a peer runs, which decides what it understands."""

    MAC = "mac"  # also the default for unknown programs
    RUST = "rust"

    __hash__ = object.__hash__  # with each heartbeat


_FEATURES = {
    PeerSoftware.MAC: frozenset({Feature.STOP, Feature.TOOLS}),
    PeerSoftware.RUST: frozenset({Feature.STOP, Feature.TOOLS, Feature.SCHEMA}),
}


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """A relay's description of a peer, or the models that the peer names itself."""

    models: tuple[str, ...] = ()
    context: int = 0
    available: bool = True
    profile: PeerProfile = UNDESCRIBED


@dataclass(frozen=True, slots=True)
class TealeConnection:
    """A connection whose peer has not introduced itself yet.

    ``dialled``: this end made the connection; ``configured``: the address comes from
    the configuration.  ``name`` is the peer's identity at a relay; on the local network
    the peer sends it.
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
    """A peer that has introduced itself.

    ``refusal``: why it is not admitted; empty if it is.  ``submits_jobs``: it may
    submit jobs, and gets the offers of this end.
    """

    name: str
    software: PeerSoftware
    submits_jobs: bool = False
    refusal: str = ""
    knows_passcode: bool = False


def offers_by_name(peer: TealePeer, description: PeerDescription) -> tuple[Offer, ...]:
    """Return the offer of a peer, with the names that it uses for its models.

    It has one slot for all of them, whatever the peer announces: real peers run one
    request of a peer at a time, and let the others wait.
    """
    names = dict.fromkeys(scalars.well_formed(name) for name in description.models)
    models = [name for name in names if 0 < len(name) <= scalars.NAME_MAX][:OFFERED_MAX]
    if not models:
        return ()
    return (
        Offer(
            kinds=CHAT_ONLY,
            models=frozenset(models),
            features=_FEATURES[peer.software],
            context=min(max(0, description.context), scalars.CONTEXT_MAX),
            # A device of Shoal's may be another pool.
            neighbour=scalars.is_derived_id(peer.name),
        ),
    )
