"""The rate limit on offers of peers."""

from dataclasses import dataclass, field

import pytest

from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.peers import peer_models
from shoal.peers.peer_models import (
    CHANGES_AT_ONCE,
    CHANGES_EVERY,
    OfferRateLimiter,
)
from transports.manual_clock import ManualClock

Offers = tuple[Offer, ...]


def offer(name: str) -> Offers:
    return (Offer(CHAT_ONLY, frozenset({name})),)


@dataclass
class ForwardedOffers:
    """Records forwarded offers; each counts as ``changes`` changed models."""

    changes: int
    offers: list[Offers] = field(default_factory=list)

    def __call__(self, offers: Offers) -> int:
        self.offers.append(offers)
        return self.changes


def test_rapid_changes_are_coalesced() -> None:
    clock, taken = ManualClock(), ForwardedOffers(changes=2 * CHANGES_AT_ONCE)
    stock = OfferRateLimiter(clock)

    for number in range(1000):
        stock.submit("p", offer(str(number)), taken)

    assert taken.offers == [offer("0")]
    clock.move(CHANGES_AT_ONCE * CHANGES_EVERY)
    assert taken.offers == [offer("0"), offer("999")]
    clock.move(1000.0)
    assert taken.offers == [offer("0"), offer("999")]


def test_few_changes_pass_at_once() -> None:
    clock, taken = ManualClock(), ForwardedOffers(changes=2)
    stock = OfferRateLimiter(clock)

    for number in range(100):
        stock.submit("p", offer(str(number)), taken)

    assert len(taken.offers) == 100


def test_long_term_rate_is_limited() -> None:
    clock, taken = ManualClock(), ForwardedOffers(changes=2)
    stock = OfferRateLimiter(clock)

    for number in range(10_000):
        stock.submit("p", offer(str(number)), taken)
        clock.move(0.01)

    at_most = (CHANGES_AT_ONCE + 100.0 / CHANGES_EVERY) / 2
    assert at_most - 2 <= len(taken.offers) <= at_most + 2


def test_limit_is_kept_per_peer_across_reconnections() -> None:
    clock = ManualClock()
    before, back, other = (
        ForwardedOffers(changes=2 * CHANGES_AT_ONCE) for _ in range(3)
    )
    stock = OfferRateLimiter(clock)
    stock.submit("p", offer("a"), before)
    stock.submit("p", offer("b"), before)
    stock.on_peer_left("p")

    stock.submit("p", offer("c"), back)
    stock.submit("q", offer("d"), other)

    assert before.offers == [offer("a")]
    assert (back.offers, other.offers) == ([], [offer("d")])
    clock.move(1000.0)
    assert (before.offers, back.offers) == ([offer("a")], [offer("c")])


def test_peers_with_a_full_allowance_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_models, "PEERS_FIRST", 8)
    clock, taken = ManualClock(), ForwardedOffers(changes=1)
    stock = OfferRateLimiter(clock)

    for number in range(1000):
        stock.submit(f"p{number}", offer("a"), taken)
        clock.move(1.0)

    assert len(stock._states) <= 8
