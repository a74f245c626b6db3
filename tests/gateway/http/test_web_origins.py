"""Web pages: the coordinator's own, those that are allowed, and all others."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSServerHandshakeError
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.serving import KEY, serving
from shoal.domain.errors import ConfigError, Forbidden
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.calls import CALLS_PATH
from shoal.gateway.http.web_origins import PagePolicy, page_policy
from shoal.protocols.dispatch import Config

CHAT_PAGE = "https://chat.example"
POLICY = PagePolicy(frozenset({"pool.example"}), frozenset({CHAT_PAGE}))
REBOUND = {"Host": "evil.example:4010", "Origin": "http://evil.example:4010"}
OPEN: dict[str, Any] = {"dispatch": Config(open=True)}
REGISTRATION = {
    "type": "register",
    "provider_pubkey": "ab" * 32,
    "provider_type": "DESKTOP",
    "capabilities": ["TASK"],
}


def headers(*fields: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(fields))


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:4010", True),
        ("192.168.1.2:4010", True),  # no page can be called so
        ("[fe80::1]:4010", True),
        ("LOCALHOST", True),
        ("pool.example:4010", True),
        ("Pool.Example", True),
        ("evil.example:4010", False),
        ("pool.example.evil.example", False),
        ("evil.example@127.0.0.1", False),
        ("127.0.0.1:99999", False),
        (":4010", False),
        ("", False),
    ],
)
def test_a_coordinator_has_names(host: str, own: bool) -> None:
    assert POLICY.names_us(headers(("Host", host))) == own


def test_exactly_one_name_is_required() -> None:
    assert not POLICY.names_us(headers())
    assert not POLICY.names_us(headers(("Host", "localhost"), ("Host", "localhost")))


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("127.0.0.1:4010", "http://127.0.0.1:4010", True),
        ("pool.example", "https://pool.example", True),
        ("127.0.0.1:4010", CHAT_PAGE, True),
        ("127.0.0.1:4010", "https://chat.example:444", False),
        ("127.0.0.1:4010", "http://127.0.0.1:3000", False),
        ("127.0.0.1:4010", "null", False),
        ("127.0.0.1:4010", "file://", False),
        ("127.0.0.1:4010", "", False),
        ("evil.example:4010", "http://evil.example:4010", False),
    ],
)
def test_pages_are_known_by_their_origin(host: str, origin: str, allowed: bool) -> None:
    asked = headers(("Host", host), ("Origin", origin))

    assert POLICY.allows_page(asked) == allowed


def test_request_of_two_pages_is_refused_unless_both_are_allowed() -> None:
    host, allowed = ("Host", "pool.example"), ("Origin", CHAT_PAGE)

    assert POLICY.allows_page(headers(host, allowed, ("Origin", "http://pool.example")))
    for other in ("https://evil.example", "null", ""):
        for both in ([allowed, ("Origin", other)], [("Origin", other), allowed]):
            assert not POLICY.allows_page(headers(host, *both))


def test_programs_without_an_origin_may_use_any_name_to_connect() -> None:
    POLICY.check_upgrade(headers(("Host", "behind.a.proxy.example")))


def test_without_a_key_the_name_counts() -> None:
    POLICY.check_keyless(headers(("Host", "pool.example")))
    with pytest.raises(
        Forbidden, match=r"evil\.example is not a name of .*--allowed-host"
    ):
        POLICY.check_keyless(headers(("Host", "evil.example")))
    with pytest.raises(Forbidden, match=r"pages of null .*--allowed-origin"):
        POLICY.check_keyless(headers(("Host", "pool.example"), ("Origin", "null")))


def test_reason_shows_a_name_of_any_length() -> None:
    with pytest.raises(Forbidden, match=r"^an unnamed site is not a name"):
        POLICY.check_keyless(headers())
    with pytest.raises(Forbidden, match=r"^a{200} is not a name"):
        POLICY.check_keyless(headers(("Host", "a" * 300)))


def test_answer_depends_on_the_page_only_where_pages_are_allowed() -> None:
    asked = headers(("Origin", "https://evil.example"))

    assert PagePolicy().cors_headers(asked) == {}
    assert POLICY.cors_headers(asked) == {"Vary": "Origin"}


def test_only_a_question_of_an_allowed_page_is_answered_as_one() -> None:
    question = ("Access-Control-Request-Method", "POST")
    origin, other = ("Origin", CHAT_PAGE), ("Origin", "https://evil.example")

    assert POLICY.preflight_headers(headers(origin, question)) is not None
    assert POLICY.preflight_headers(headers(origin)) is None
    assert POLICY.preflight_headers(headers(other, question)) is None
    assert POLICY.preflight_headers(headers(question)) is None


def test_allowed_page_may_use_every_method_of_the_api() -> None:
    answer = POLICY.preflight_headers(
        headers(("Origin", CHAT_PAGE), ("Access-Control-Request-Method", "PUT"))
    )

    assert answer is not None
    allowed = answer["Access-Control-Allow-Methods"].split(", ")
    # Browsers send HEAD without a question.
    assert {each.method for each in OPERATIONS} - {"HEAD"} == {*allowed}


def test_the_machine_and_its_address_are_names() -> None:
    policy = page_policy("Pool.LAN", ["Gateway.Example"], [])
    machine = socket.gethostname().partition(".")[0]

    for name in ("pool.lan", "gateway.example", machine, f"{machine}.local"):
        assert policy.names_us(headers(("Host", name))), name


@pytest.mark.parametrize("host", ["", "a b", "http://a", "a:80", "*", "*.a", "-", "a."])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host"):
        page_policy("127.0.0.1", [host], [])


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "*",
        "null",
        "a.example",
        "https://a.example/",
        "https://a.example/x",
        "https://*.example",
        "https://a@b.example",
        "https://a.example:x",
        "https://A.b",
        "//a.example",
    ],
)
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origin"):
        page_policy("127.0.0.1", [], [origin])


async def test_a_page_opens_no_websocket(tmp_path: Path) -> None:
    async with serving(tmp_path, wires=OPEN) as pool:
        async with pool.session.ws_connect(pool.url) as program:  # the control
            await program.send_str(json.dumps(REGISTRATION))
            assert (await program.receive_json())["type"] == "register_ack"
        for target in ("/", CALLS_PATH):
            key = {"Authorization": f"Bearer {KEY}"}
            with pytest.raises(WSServerHandshakeError) as caught:
                await pool.session.ws_connect(pool.url + target, headers=REBOUND | key)
            assert caught.value.status == 403


async def test_an_allowed_page_joins_as_a_worker(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, wires=OPEN, pages=POLICY) as pool,
        pool.session.ws_connect(pool.url, headers={"Origin": CHAT_PAGE}) as worker,
    ):
        await worker.send_str(json.dumps(REGISTRATION))

        assert (await worker.receive_json())["type"] == "register_ack"


async def test_an_open_api_answers_to_its_own_names(tmp_path: Path) -> None:
    async with serving(tmp_path, wires=OPEN) as pool:
        for given, expected in (
            ({}, 200),
            (REBOUND, 403),
            ({"Origin": "null"}, 403),
            ({"x-api-key": "sk-wrong"}, 401),
        ):
            query = {"job_type": "TASK", "policy": "CHEAP"}
            async with pool.session.get(
                f"{pool.url}/v1/quote", params=query, headers=given
            ) as answer:
                assert answer.status == expected, await answer.text()


async def test_only_allowed_pages_may_read_answers(tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    async with serving(tmp_path, pages=POLICY) as pool:
        for origin, allowed in ((CHAT_PAGE, CHAT_PAGE), ("https://evil.example", None)):
            async with pool.session.get(
                f"{pool.url}/v1/models", headers=key | {"Origin": origin}
            ) as answer:
                assert answer.status == 200
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
                assert answer.headers["Vary"] == "Origin"


async def test_an_allowed_page_learns_what_it_may_send(tmp_path: Path) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with serving(tmp_path, pages=POLICY) as pool:
        url = f"{pool.url}/v1/chat/completions"
        async with pool.session.options(
            url, headers=asked | {"Origin": CHAT_PAGE}
        ) as answer:
            assert answer.status == 204
            allowed = answer.headers
            assert allowed["Access-Control-Allow-Origin"] == CHAT_PAGE
            assert "POST" in allowed["Access-Control-Allow-Methods"]
            assert "authorization" in allowed["Access-Control-Allow-Headers"]
        async with pool.session.options(
            url, headers=asked | {"Origin": "https://evil.example"}
        ) as answer:
            assert answer.status == 405
            assert "Access-Control-Allow-Origin" not in answer.headers
