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
        self._states: dict[str, _OfferState] = {}
        self._clear_at = PEERS_FIRST

    def submit(self, peer: str, offers: tuple[Offer, ...], apply: ApplyOffers) -> None:
        """Apply a peer's offers now, or as soon as its limit permits."""
        self._clear()
        state = self._states.setdefault(peer, _OfferState())
        state.offers = offers
        due = state.spent_until - CHANGES_AT_ONCE * CHANGES_EVERY
        if self._clock.now() >= due:
            self._pass_on(state, apply)
        elif state.timer is None:
            state.timer = self._clock.call_at(due, lambda: self._pass_on(state, apply))

    def on_peer_left(self, peer: str) -> None:
        """Drop the pending offers of a peer that left."""
        state = self._states.get(peer)
        if state is not None and state.timer is not None:
            state.timer.cancel()
            state.timer = None
            state.offers = ()

    def _pass_on(self, state: _OfferState, apply: ApplyOffers) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        offers, state.offers = state.offers, ()
        begin = max(self._clock.now(), state.spent_until)
        state.spent_until = begin + max(1, apply(offers)) * CHANGES_EVERY

    def _clear(self) -> None:
        # Rarely, because it iterates over all peers.
        if len(self._states) < self._clear_at:
            return
        now = self._clock.now()
        for peer, state in [*self._states.items()]:
            if now >= state.spent_until and state.timer is None:
                del self._states[peer]
        self._clear_at = 2 * max(len(self._states), PEERS_FIRST // 2)
