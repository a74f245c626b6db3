import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, DeviceKind, Offer
from shoal.protocols.tealenet.codec.extension import (
    CONTEXT_MAX,
    SLOTS_MAX,
    WireOffer,
    read_offers,
    wire_offers,
)
from shoal.protocols.tealenet.codec.scalars import MODELS_MAX, NAME_MAX, encode_json

KEY = bytes(range(32))

names = st.frozensets(st.text(min_size=1, max_size=10), max_size=3)
offers = st.builds(
    Offer,
    kinds=st.frozensets(st.sampled_from(JobKind), min_size=1),
    models=names,
    slots=st.integers(0, SLOTS_MAX),
    features=st.frozensets(st.sampled_from(Feature)),
    context=st.integers(0, CONTEXT_MAX),
    only_for=names,
    tasks=names,
    streams=st.booleans(),
    device=st.none() | st.sampled_from(DeviceKind),
    price=st.text(max_size=10),
    engine=st.text(max_size=10),
)


@settings(max_examples=examples(0.4))
@given(st.lists(offers, max_size=4).map(tuple))
def test_offers_round_trip(original: tuple[Offer, ...]) -> None:
    assert read_offers(received(wire_offers(original))) == original


def test_default_fields_of_an_offer_are_omitted() -> None:
    offer = Offer(CHAT_ONLY, frozenset({"m"}), 2)

    assert encode_json(wire_offers([offer])) == b'[{"models":["m"],"slots":2}]'


def test_the_reader_sets_the_owner_of_offers() -> None:
    (offer,) = read_offers(
        [WireOffer(["m"])], coordinator=True, public_key=KEY, proven=True
    )

    assert offer.neighbour
    assert offer.proven
    assert offer.public_key == KEY.hex()


def test_unknown_values_of_an_offer_are_ignored() -> None:
    wire_offer = WireOffer(
        ["m"], ["chat", "dance"], ["tools", "flight"], device="toaster"
    )

    (offer,) = read_offers([wire_offer])

    assert offer.kinds == CHAT_ONLY
    assert offer.features == {Feature.TOOLS}
    assert offer.device is None


@pytest.mark.parametrize(
    "wire_offer", [WireOffer(["m"], ["dance"]), WireOffer(["x" * (NAME_MAX + 1)])]
)
def test_an_offer_without_known_kinds_or_names_is_skipped(
    wire_offer: WireOffer,
) -> None:
    assert read_offers([wire_offer, WireOffer(["m"])]) == (
        Offer(CHAT_ONLY, frozenset({"m"})),
    )


def test_large_numbers_are_capped() -> None:
    (offer,) = read_offers([WireOffer(["m"], slots=10**9, context=10**12)])

    assert offer.slots == SLOTS_MAX
    assert offer.context == CONTEXT_MAX


def test_models_beyond_the_limit_are_skipped() -> None:
    original = [WireOffer([f"m{index}"]) for index in range(MODELS_MAX + 10)]

    assert len(read_offers(original)) == MODELS_MAX
    assert (
        read_offers([WireOffer([f"m{index}" for index in range(MODELS_MAX + 1)])]) == ()
    )


def received(offers: list[WireOffer]) -> list[WireOffer]:
    """Return offers as the peer decodes them."""
    return msgspec.json.decode(encode_json(offers), type=list[WireOffer])
