"""Limits how often peers may change their offers.

Each model that is added or removed is a stored fact, and a peer may have hundreds of
models and change them at any rate.  A burst of changes applies at once; later changes
are delayed, and the latest offers replace earlier ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.worker import Offer
from shoal.transports.clock import Clock, Timer

CHANGES_AT_ONCE = 512  # models added or removed in one burst
CHANGES_EVERY = 1 / 32  # seconds per change in the long run
PEERS_FIRST = 64  # peers at which states that no longer limit are first evicted

ApplyOffers: TypeAlias = Callable[[tuple[Offer, ...]], int]
"""Applies offers; returns the number of models that changed."""


@dataclass(slots=True)
class _OfferState:
    """The rate limit of one peer, and the offers that wait for it.

    ``spent_until`` is when all changes so far would be done at the long-term rate.
    """

    spent_until: float = 0.0
    offers: tuple[Offer, ...] = ()
    timer: Timer | None = None


class OfferRateLimiter:
    """The limits of all peers, by name: reconnecting does not reset a limit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stocks: dict[str, _OfferState] = {}
        self._clear_at = PEERS_FIRST

    def submit(self, peer: str, offers: tuple[Offer, ...], take: ApplyOffers) -> None:
        """Apply a peer's offers now, or as soon as its limit permits."""
        self._clear()
        stock = self._stocks.setdefault(peer, _OfferState())
        stock.offers = offers
        due = stock.spent_until - CHANGES_AT_ONCE * CHANGES_EVERY
        if self._clock.now() >= due:
            self._pass_on(stock, take)
        elif stock.timer is None:
            stock.timer = self._clock.call_at(due, lambda: self._pass_on(stock, take))

    def on_peer_left(self, peer: str) -> None:
        """Drop the pending offers of a peer that left."""
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
        # Rarely, because it iterates over all peers.
        if len(self._stocks) < self._clear_at:
            return
        now = self._clock.now()
        for peer, stock in [*self._stocks.items()]:
            if now >= stock.spent_until and stock.timer is None:
                del self._stocks[peer]
        self._clear_at = 2 * max(len(self._stocks), PEERS_FIRST // 2)
