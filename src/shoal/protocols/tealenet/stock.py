"""What a peer can run, as far as it may bring that."""

from collections.abc import Iterable, Sequence

from shoal.domain.worker import Offer
from shoal.protocols.tealenet.admission import Leave, Presented, permitted
from shoal.protocols.tealenet.ourselves import Ourselves
from shoal.protocols.tealenet.peer import Described, Peer, plain_offers
from shoal.protocols.tealenet.wire.offerings import Offering, offers_of


class Stock:
    """Reads what a peer offers; what is the same as before is no news.

    ``presented`` and ``leave`` say which models a join token is for, if there is one.
    """

    def __init__(
        self, own: Ourselves, presented: Presented | None, leave: Leave
    ) -> None:
        self._own = own
        self._presented = presented
        self._leave = leave
        self._last: tuple[Offer, ...] | None = None

    def describe(self, peer: Peer, described: Described) -> tuple[Offer, ...] | None:
        """Take what is told of a plain peer; return its offers, if they are others."""
        return self._news(plain_offers(peer.breed, described))

    def declare(
        self, peer: Peer, offerings: Iterable[Offering]
    ) -> tuple[Offer, ...] | None:
        """Take what a peer of ours offers; return that, if it is something else."""
        offers = offers_of(
            offerings,
            neighbour=peer.neighbour,
            public_key=peer.public_key,
            proven=bool(peer.public_key),
        )
        return self._news(self._permitted(offers))

    def _permitted(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        admission = self._own.admission
        if self._leave.models is None or admission is None or self._presented is None:
            return tuple(offers)
        names = frozenset[str]().union(*(offer.models for offer in offers))
        allowed = self._leave.models
        if not names <= allowed:
            allowed = permitted(admission, self._presented, names)
        return tuple(offer for offer in offers if offer.models <= allowed)

    def _news(self, offers: tuple[Offer, ...]) -> tuple[Offer, ...] | None:
        if offers == self._last:
            return None
        self._last = offers
        return offers
