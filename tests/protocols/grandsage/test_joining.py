"""The query and headers with which a node introduces itself."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.grandsage.recorded import NODE, OURS, accept
from protocols.pairs import START
from shoal.domain.errors import Refused
from shoal.domain.vocabulary import Joined
from shoal.domain.work import Feature
from shoal.protocols.grandsage import PROTOCOL, Config
from shoal.protocols.grandsage.joining import (
    NAME_MAX,
    SLOTS_MAX,
    admit,
    read_extensions,
    read_query,
    slots_of,
    write_extensions,
)
from shoal.protocols.session import Hello, Notice


# ECMAScript 2024, section 7.1.4.1.1 (StringToNumber), as `count < value` uses it.
@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("1", 1), ("2.5", 3), ("1e1", 10), ("0x10", 16), ("0b11", 3), ("0o17", 15),
        (" 4\n", 4), ("+3", 3), (".5", 1), ("5.", 5), ("007", 7), ("1E+2", 100),
        ("Infinity", SLOTS_MAX), ("+Infinity", SLOTS_MAX), ("1e999", SLOTS_MAX),
        ("99999", SLOTS_MAX), ("0x" + "f" * 300, SLOTS_MAX), ("1024", SLOTS_MAX),
        ("0", 0), ("-1", 0), ("-Infinity", 0), ("0.0", 0), (" ", 0), ("0x0", 0),
        ("abc", 0), ("1a", 0), ("1 2", 0), ("-0x10", 0), ("0x", 0), ("1_000", 0),
        ("infinity", 0), ("inf", 0), ("nan", 0), ("\u0661", 0), ("e1", 0), ("--1", 0),
        ("+-Infinity", 0), ("1e", 0), (".", 0), ("1n", 0),
    ],
)  # fmt: skip
def test_slots_are_counted_as_javascript_compares(value: str, slots: int) -> None:
    counted, remark = slots_of(value)

    assert counted == slots
    assert bool(remark) == (slots in (0, SLOTS_MAX) and value != "1024")


@given(st.text())
def test_any_value_counts_as_something(value: str) -> None:
    slots, remark = slots_of(value)

    assert 0 <= slots <= SLOTS_MAX
    assert remark.isascii()
    assert remark.isprintable()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("a=1&b=2", {"a": "1", "b": "2"}),
        ("a=1&a=2", {"a": "1"}),
        ("a=1?b=2", {"a": "1"}),
        ("a=x+y%20z", {"a": "x y z"}),
        ("a=%E6%97%A5", {"a": "日"}),
        ("a=%zz%4", {"a": "%zz%4"}),
        ("a=%ff", {"a": "\ufffd"}),
        ("a&=&&b=", {"a": "", "": "", "b": ""}),
        ("", {}),
    ],
)
def test_queries_are_read_as_form_data(query: str, expected: dict[str, str]) -> None:
    assert read_query(query) == expected


@given(st.text())
def test_any_query_is_let_in_or_refused(query: str) -> None:
    with contextlib.suppress(Refused):
        admit(query, {}, "nt")


def test_no_token_configured_means_any_will_do_but_one_must_be_there() -> None:
    assert admit("name=n&model=m&token=x&max_concurrency=1", {}, "").offer.slots == 1

    with pytest.raises(Refused, match="Missing token"):
        admit("name=n&model=m&token=&max_concurrency=1", {}, "")


@pytest.mark.parametrize("part", ["name", "model"])
def test_endless_names_are_refused(part: str) -> None:
    other = {"name": "model", "model": "name"}[part]
    query = f"{other}=x&token=nt&max_concurrency=1&{part}="

    assert admit(query + "日" * NAME_MAX, {}, "nt")
    with pytest.raises(Refused, match=f"The {part} is longer than 256") as refused:
        admit(query + "日" * (NAME_MAX + 1), {}, "nt")
    assert refused.value.code == 4001
    assert len(str(refused.value).encode()) <= 123


def test_a_node_without_slots_is_let_in_and_told_why_it_gets_no_work() -> None:
    accepted = accept("/ws?name=n&model=m&token=nt&max_concurrency=a%0d%0aX:%20y")

    remark = "max_concurrency=a\\r\\nX: y is no number"
    event, notice = accepted.session.tick(0.0)
    assert isinstance(event, Joined)
    assert (event.offer.slots, event.offer.remark) == (0, remark)
    assert notice == Notice(remark)
    assert accepted.headers == {"Shoal-Warning": remark}


def test_the_extension_is_answered_only_where_it_is_announced() -> None:
    assert accept(NODE).headers == {}
    assert accept(NODE, OURS).headers == {"Shoal-Extensions": "shoal"}
    only_words = {"shoal-extensions": "continue, stop"}
    assert accept(NODE, only_words).headers == {}


@pytest.mark.parametrize(
    ("header", "features"),
    [
        ("shoal, continue, options, stop", set(Feature)),
        ("SHOAL,Stop , later", {Feature.STOP}),
        ("shoal", set()),
        ("stop", set()),  # another program's header of that name
        ("", set()),
    ],
)
def test_features_are_what_is_announced(header: str, features: set[Feature]) -> None:
    node = admit(NODE.partition("?")[2], {"shoal-extensions": header}, "nt")

    assert node.offer.features == features
    assert node.extended == ("shoal" in header.lower())


def test_extensions_are_read_as_written() -> None:
    written = write_extensions(Feature)

    assert written == "shoal, continue, options, stop"
    assert read_extensions(written) == {"shoal", "continue", "options", "stop"}


@pytest.mark.parametrize(
    ("path", "query", "claimed"),
    [
        ("/ws", "", True),
        ("/ws", "name=n", True),
        ("/ws", "colour=red", False),
        ("/", "", False),
        ("/any/path", "token=t", True),
        ("/", "model=m", True),
        ("/", "max_concurrency=1", True),
        ("/", "name=n", False),
        ("/other", "", False),
    ],
)
def test_connections_that_look_like_a_nodes_are_claimed(
    path: str, query: str, claimed: bool
) -> None:
    (endpoint,) = PROTOCOL.endpoints(Config(), START)

    assert endpoint.claims(Hello(path, query)) == claimed
