"""What both ends announce in a header."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.domain.job import Privacy
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, ServedModel
from shoal.protocols.grandsage.extension import (
    CONTEXT_MAX,
    ENGINE_MAX,
    ONLY_FOR_MAX,
    PRICE_MAX,
    Extensions,
    read_extensions,
    write_extensions,
)

NONE = frozenset[Feature]()


@settings(max_examples=examples(0.4))
@given(
    kinds=st.frozensets(st.sampled_from(sorted(INFERENCE_KINDS, key=str)), min_size=1),
    features=st.frozensets(st.sampled_from(Feature)),
    context=st.integers(0, CONTEXT_MAX),
    only_for=st.frozensets(st.text(min_size=1)),
    privacy=st.sampled_from([None, *Privacy]),
    price=st.text(max_size=PRICE_MAX),
    engine=st.text(max_size=ENGINE_MAX),
)
def test_announcements_round_trip(
    kinds: frozenset[JobKind],
    features: frozenset[Feature],
    context: int,
    only_for: frozenset[str],
    privacy: Privacy | None,
    price: str,
    engine: str,
) -> None:
    model = ServedModel("m", kinds, features, context)
    written = write_extensions(model, only_for, privacy, price, engine)

    assert read_extensions(written) == Extensions(
        True, kinds, features, context, only_for, privacy, price, engine
    )
    # It stands in a header, between commas.
    assert written.isascii()
    assert written.isprintable()


def test_the_header_is_as_documented() -> None:
    model = ServedModel(
        "m", INFERENCE_KINDS, frozenset({Feature.STOP, Feature.TOOLS}), 4096
    )

    assert write_extensions() == "shoal"
    assert write_extensions(model, {"al", "bo, c=d é"}, Privacy.PUBLIC, "$0.010") == (
        "shoal, chat, completion, embedding, rerank, transcription, "
        "stop, tools, context=4096, "
        "only-for=al, only-for=bo%2C%20c%3Dd%20%C3%A9, "
        "privacy=public, price=$0.010"
    )


@pytest.mark.parametrize(
    ("header", "features"),
    [
        ("shoal, continue, options, stop",
         {Feature.CONTINUE, Feature.OPTIONS, Feature.STOP}),
        ("SHOAL,Stop , later", {Feature.STOP}),
        ("shoal", NONE),
        ("stop", NONE),  # another program's header of that name
        ("", NONE),
    ],
)  # fmt: skip
def test_features_are_those_announced(header: str, features: set[Feature]) -> None:
    extensions = read_extensions(header)

    assert extensions.features == features
    assert extensions.known == ("shoal" in header.lower())


@pytest.mark.parametrize(
    ("header", "kinds"),
    [
        ("shoal, stop", CHAT_ONLY),  # a node from before there were others
        ("shoal, chat", CHAT_ONLY),
        ("shoal, embedding", {JobKind.EMBEDDING}),
        ("shoal, completion, chat", {JobKind.CHAT, JobKind.COMPLETION}),
        ("shoal, painting", CHAT_ONLY),
        ("embedding", CHAT_ONLY),
    ],
)
def test_kinds_are_those_announced(header: str, kinds: set[JobKind]) -> None:
    assert read_extensions(header).kinds == kinds


@pytest.mark.parametrize(
    ("setting", "context"),
    [
        ("context=4096", 4096),
        ("CONTEXT=1, context=2", 2),
        ("context=99999999999", 0),
        ("context=9999999999", CONTEXT_MAX),
        ("context=-5", 0),
        ("context=\u0661", 0),
        ("context=many", 0),
        ("context=", 0),
        ("context", 0),
    ],
)
def test_context_is_a_number_or_unknown(setting: str, context: int) -> None:
    assert read_extensions(f"shoal, {setting}").context == context


def test_empty_keys_and_keys_over_the_limit_are_dropped() -> None:
    many = ", ".join(f"only-for=k{number}" for number in range(ONLY_FOR_MAX + 1))

    assert read_extensions("shoal, only-for=, only-for").only_for == frozenset()
    assert len(read_extensions(f"shoal, {many}").only_for) == ONLY_FOR_MAX
    assert read_extensions("shoal, only-for=%ff%ED%A0%80").only_for


def test_a_lone_surrogate_in_a_key_is_replaced() -> None:
    assert write_extensions(None, {"a\ud800"}) == "shoal, only-for=a%3F"


@given(st.text())
def test_any_header_is_parsed(header: str) -> None:
    assert read_extensions(header).kinds
    assert 0 <= read_extensions(f"shoal,{header}").context <= CONTEXT_MAX
