"""Limits how often peers may change their offers.

Each model that comes or goes is a fact to be stored, and a peer may have hundreds of
models and change them at any rate.  A burst of changes passes at once; later changes
are delayed, and the last offer counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.worker import Offer
from shoal.transports.clock import Clock, Timer

CHANGES_AT_ONCE = 512  # models that come or go
CHANGES_EVERY = 1 / 32  # seconds from one of them to the next in the long run
PEERS_FIRST = 64  # peers at which those that may change again are looked for

ApplyOffers: TypeAlias = Callable[[tuple[Offer, ...]], int]
"""Takes offers; returns how many models have changed by them."""


@dataclass(slots=True)
class _OfferState:
    """What a peer said since it was heard last.

    ``spent_until`` is when all its changes would have come, had they come one by one.
    """

    spent_until: float = 0.0
    offers: tuple[Offer, ...] = ()
    timer: Timer | None = None


class OfferRateLimiter:
    """All peers, by their names: one that comes back goes on where it was."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stocks: dict[str, _OfferState] = {}
        self._clear_at = PEERS_FIRST

    def submit(self, peer: str, offers: tuple[Offer, ...], take: ApplyOffers) -> None:
        """Pass on what a peer offers, now or as soon as it may change that."""
        self._clear()
        stock = self._stocks.setdefault(peer, _OfferState())
        stock.offers = offers
        heard_from = stock.spent_until - CHANGES_AT_ONCE * CHANGES_EVERY
        if self._clock.now() >= heard_from:
            self._pass_on(stock, take)
        elif stock.timer is None:
            stock.timer = self._clock.call_at(
                heard_from, lambda: self._pass_on(stock, take)
            )

    def on_peer_left(self, peer: str) -> None:
        """Forget what a peer said last: it has gone."""
        stock = self._stocks.get(peer)
        if stock is not None and stock.timer is not None:
            stock.timer.cancel()
            stock.timer = None
            stock.offers = ()

    def _pass_on(self, stock: _OfferState, take: ApplyOffers) -> None:
        if stock.timer is not None:
            stock.timer.cancel()
            stock.timer = None
        offers, stock.offers = stock.offers, ()
        begin = max(self._clock.now(), stock.spent_until)
        stock.spent_until = begin + max(1, take(offers)) * CHANGES_EVERY

    def _clear(self) -> None:
        # Only now and then: it looks at all of them.
        if len(self._stocks) < self._clear_at:
            return
        now = self._clock.now()
        for peer, stock in [*self._stocks.items()]:
            if now >= stock.spent_until and stock.timer is None:
                del self._stocks[peer]
        self._clear_at = 2 * max(len(self._stocks), PEERS_FIRST // 2)
