"""What is known of the peer of a conversation: before it says a word, and after."""

from dataclasses import dataclass
from enum import Enum

from shoal.domain.work import Feature
from shoal.domain.worker import CHATS, Offer
from shoal.protocols.crowd import BY_NO_TOKEN, Protection
from shoal.protocols.session import Pass
from shoal.protocols.tealenet.wire.extension import Ability
from shoal.protocols.tealenet.wire.scalars import NAME_MAX, well_formed

SLOTS_MAX = 1024  # jobs at a time that we believe a peer to run
CONTEXT_MAX = 2**31 - 1  # tokens


class Breed(Enum):
    """Whose program a peer is, which decides what it understands."""

    MAC = "mac"  # and whatever else is not known
    RUST = "rust"
    OURS = "ours"


_FEATURES = {
    Breed.MAC: frozenset({Feature.STOP, Feature.TOOLS}),
    Breed.RUST: frozenset({Feature.STOP, Feature.TOOLS, Feature.SCHEMA}),
}


@dataclass(frozen=True, slots=True)
class Described:
    """What a carrier tells of a peer that says nothing of the kind itself."""

    models: tuple[str, ...] = ()
    slots: int = 1
    context: int = 0
    available: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """A peer that has not said anything yet.

    ``dialled``: we made the connection, and ``named``: because an operator told us to.
    ``name`` is its identity, where the carrier knows it; otherwise it says who it is.
    """

    dialled: bool
    named: bool = False
    name: str = ""
    breed: Breed = Breed.MAC
    described: Described = Described()
    address: str = ""
    protection: Protection = Protection.PLAIN


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that has said who it is.

    ``refusal`` is why it is not let in; empty: it is.  ``asks`` says whether it may ask
    for work, and is told what there is.  ``public_key`` is proven, if there is one.
    """

    name: str
    breed: Breed
    features: frozenset[Ability] = frozenset()
    asks: bool = False
    refusal: str = ""
    admitted: Pass = BY_NO_TOKEN
    public_key: bytes = b""
    neighbour: bool = False
    knows_passcode: bool = False

    @property
    def ours(self) -> bool:
        """Whether it speaks our extension."""
        return self.breed is Breed.OURS


def plain_offers(breed: Breed, described: Described) -> tuple[Offer, ...]:
    """Return what a peer that is not ours can run: it names its models, and no more.

    Models are found by exactly the names that it gives them.
    """
    features = _FEATURES[Breed.RUST if breed is Breed.RUST else Breed.MAC]
    names = dict.fromkeys(well_formed(name) for name in described.models)
    return tuple(
        Offer(
            kinds=CHATS,
            models=frozenset({name}),
            slots=min(max(1, described.slots), SLOTS_MAX),
            features=features,
            context=min(max(0, described.context), CONTEXT_MAX),
        )
        for name in names
        if 0 < len(name) <= NAME_MAX
    )
