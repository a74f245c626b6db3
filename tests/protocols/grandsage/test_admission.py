"""The query and headers with which a node introduces itself."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.contexts import protocol_context, require_token
from protocols.grandsage.recorded import NODE, accept
from protocols.pairs import EPOCH
from shoal.domain.errors import ConfigError, NotAdmitted, Refused
from shoal.domain.vocabulary import Joined
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.grandsage import Config, endpoints
from shoal.protocols.grandsage.admission import (
    NAME_MAX,
    SLOTS_MAX,
    admit,
    read_contexts,
    read_query,
    slots_of,
)
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.session import Notice


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
def test_any_max_concurrency_is_accepted(value: str) -> None:
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
def test_queries_are_parsed_as_form_data(query: str, expected: dict[str, str]) -> None:
    assert read_query(query) == expected


@given(st.text())
def test_any_query_is_admitted_or_refused(query: str) -> None:
    with contextlib.suppress(Refused):
        admit(UpgradeRequest("/ws", query), require_token("nt"))


def test_without_a_configured_token_any_token_is_accepted_but_required() -> None:
    anybody = require_token("")
    request = UpgradeRequest("/ws", "name=n&model=m&token=x&max_concurrency=1")
    assert admit(request, anybody)[0].offer.slots == 1

    with pytest.raises(Refused, match="Missing token"):
        admit(UpgradeRequest("/ws", "name=n&model=m&token=&max_concurrency=1"), anybody)


def test_the_admission_check_receives_the_join_request() -> None:
    asked = []

    def decide(applicant: JoinRequest) -> AdmissionGrant:
        asked.append(applicant)
        return AdmissionGrant("token_1", "somebody")

    query = "name=n+1&model=m/x&token=a%20b&max_concurrency=1"
    _, grant = admit(UpgradeRequest("/ws", query, {}, "192.0.2.7"), decide)

    assert asked == [JoinRequest("a b", "n 1", frozenset({"m/x"}), "192.0.2.7")]
    assert grant == AdmissionGrant("token_1", "somebody")


def test_the_refusal_has_the_reason_of_the_admission_check() -> None:
    def decide(applicant: JoinRequest) -> AdmissionGrant:
        raise NotAdmitted("The token has expired")

    with pytest.raises(Refused, match="The token has expired") as refused:
        admit(UpgradeRequest("/ws", NODE.partition("?")[2]), decide)

    assert refused.value.code == 4002


def test_an_invalid_request_does_not_reach_the_admission_check() -> None:
    def decide(applicant: JoinRequest) -> AdmissionGrant:
        raise AssertionError("a use of a token would be lost")

    for query in ("", "name=n", f"name={'n' * 257}&model=m&token=t&max_concurrency=1"):
        with pytest.raises(Refused) as refused:
            admit(UpgradeRequest("/ws", query), decide)
        assert refused.value.code == 4001


@pytest.mark.parametrize("part", ["name", "model"])
def test_long_names_are_refused(part: str) -> None:
    other = {"name": "model", "model": "name"}[part]
    query = f"{other}=x&token=nt&max_concurrency=1&{part}="

    token = require_token("nt")
    assert admit(UpgradeRequest("/ws", query + "日" * NAME_MAX), token)
    with pytest.raises(Refused, match=f"The {part} is longer than 256") as refused:
        admit(UpgradeRequest("/ws", query + "日" * (NAME_MAX + 1)), token)
    assert refused.value.code == 4001
    assert len(str(refused.value).encode()) <= 123


def test_a_node_without_slots_is_admitted_with_a_warning() -> None:
    accepted = accept("/ws?name=n&model=m&token=nt&max_concurrency=a%0d%0aX:%20y")

    remark = "max_concurrency=a\\r\\nX: y is no number"
    event, notice = accepted.session.tick(0.0)
    assert isinstance(event, Joined)
    assert (event.offer.slots, event.offer.remark) == (0, remark)
    assert notice == Notice(remark)
    assert accepted.headers == {"Shoal-Warning": remark}


def test_a_blank_number_is_zero_as_in_javascript() -> None:
    accepted = accept("/ws?name=n&model=m&token=nt&max_concurrency=%20")

    (event, _) = accepted.session.tick(0.0)

    assert isinstance(event, Joined)
    assert event.offer.remark.endswith("allows no tasks")


def test_a_nodes_offer_is_that_of_its_query() -> None:
    request = UpgradeRequest("/ws", NODE.partition("?")[2])

    joined, _ = admit(request, require_token("nt"), {"m1": 2048})

    assert joined.offer == Offer(
        CHAT_ONLY, frozenset({"m1"}), 8, context=2048, needs_question=True
    )


@pytest.mark.parametrize("text", ["m1", "m1=", "=5", "m1=-5", "m1=many", ""])
def test_an_invalid_context_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected MODEL=TOKENS"):
        read_contexts((text,))


def test_contexts_are_read_by_model() -> None:
    assert read_contexts(("a=b=5", "c=4096")) == {"a=b": 5, "c": 4096}


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
def test_requests_with_a_nodes_parameters_are_claimed(
    path: str, query: str, claimed: bool
) -> None:
    (endpoint,) = endpoints(Config(), protocol_context(EPOCH))

    assert endpoint.claims(UpgradeRequest(path, query)) == claimed


@pytest.mark.parametrize(("value", "slots"), [("0x400", 1024), ("0b11", 3)])
def test_slots_with_a_prefix_are_counted_up_to_the_limit(
    value: str, slots: int
) -> None:
    assert slots_of(value) == (slots, "")


def test_a_model_without_a_given_context_has_none() -> None:
    request = UpgradeRequest("/", "token=t&model=m&max_concurrency=1&name=n")

    joined, _ = admit(request, require_token(""), {"other": 5})

    assert joined.offer.context == 0
