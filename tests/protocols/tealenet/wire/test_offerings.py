import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.work import Feature, Kind
from shoal.domain.worker import CHATS, Device, Offer
from shoal.protocols.tealenet.wire.offerings import (
    CONTEXT_MAX,
    SLOTS_MAX,
    Offering,
    offerings_of,
    offers_of,
)
from shoal.protocols.tealenet.wire.scalars import MODELS_MAX, NAME_MAX, written

KEY = bytes(range(32))

names = st.frozensets(st.text(min_size=1, max_size=10), max_size=3)
offers = st.builds(
    Offer,
    kinds=st.frozensets(st.sampled_from(Kind), min_size=1),
    models=names,
    slots=st.integers(0, SLOTS_MAX),
    features=st.frozensets(st.sampled_from(Feature)),
    context=st.integers(0, CONTEXT_MAX),
    only_for=names,
    tasks=names,
    streams=st.booleans(),
    device=st.none() | st.sampled_from(Device),
    price=st.text(max_size=10),
)


@given(st.lists(offers, max_size=4).map(tuple))
def test_offers_arrive_as_they_were_made(made: tuple[Offer, ...]) -> None:
    assert offers_of(sent(offerings_of(made))) == made


def test_an_ordinary_offer_is_written_in_few_words() -> None:
    offer = Offer(CHATS, frozenset({"m"}), 2)

    assert written(offerings_of([offer])) == b'[{"models":["m"],"slots":2}]'


def test_whose_offers_they_are_is_said_by_who_read_them() -> None:
    (offer,) = offers_of([Offering(["m"])], neighbour=True, public_key=KEY, proven=True)

    assert offer.neighbour
    assert offer.proven
    assert offer.public_key == KEY.hex()


def test_what_we_do_not_know_of_an_offer_is_left_out() -> None:
    offering = Offering(["m"], ["chat", "dance"], ["tools", "flight"], device="toaster")

    (offer,) = offers_of([offering])

    assert offer.kinds == CHATS
    assert offer.features == {Feature.TOOLS}
    assert offer.device is None


@pytest.mark.parametrize(
    "offering", [Offering(["m"], ["dance"]), Offering(["x" * (NAME_MAX + 1)])]
)
def test_an_offer_of_nothing_that_we_know_is_none(offering: Offering) -> None:
    assert offers_of([offering, Offering(["m"])]) == (Offer(CHATS, frozenset({"m"})),)


def test_numbers_beyond_belief_are_cut() -> None:
    (offer,) = offers_of([Offering(["m"], slots=10**9, context=10**12)])

    assert offer.slots == SLOTS_MAX
    assert offer.context == CONTEXT_MAX


def test_no_more_models_are_taken_than_a_peer_may_have() -> None:
    made = [Offering([f"m{index}"]) for index in range(MODELS_MAX + 10)]

    assert len(offers_of(made)) == MODELS_MAX
    assert offers_of([Offering([f"m{index}" for index in range(MODELS_MAX + 1)])]) == ()


def sent(offerings: list[Offering]) -> list[Offering]:
    """Return offers as the other end reads them."""
    return msgspec.json.decode(written(offerings), type=list[Offering])
