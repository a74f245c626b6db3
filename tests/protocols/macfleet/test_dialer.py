"""A worker's ways to whoever has functions called, and what ends its tries."""

from dataclasses import replace

import pytest

from protocols.calling import MEMBER, Pair, around, sent, unconnected
from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet import PROTOCOL
from shoal.protocols.macfleet.addresses import (
    coordinator_url,
    fleet_in_url,
    parse_contact,
    parse_url,
)
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.config import Config
from shoal.protocols.macfleet.coordinator import endpoints
from shoal.protocols.macfleet.dialer import REJECTIONS_MAX, FleetDialer
from shoal.protocols.seam.multi_peer import Listener
from shoal.protocols.seam.session import CLOSE_MOVED, Close, Send, WorkerEnd

DIRECT = replace(MEMBER, direct_url="tls-any://host:50052")


@pytest.mark.parametrize(
    ("url", "token", "dialled"),
    [
        ("host:50051", "", "tcp://host:50051"),
        ("host:50051", "long enough", "tls-any://host:50051"),
        ("tcp://[::1]:1", "", "tcp://[::1]:1"),
        ("tls-any://host:1", "", "tls-any://host:1"),
    ],
)
def test_each_address_leads_somewhere(url: str, token: str, dialled: str) -> None:
    assert FleetDialer(url, replace(MEMBER, token=token)).url == dialled


@pytest.mark.parametrize(
    "url", ["", "host", "http://host:4010", "host:port", "ftp://host:1", "tcp://:1"]
)
def test_an_address_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        FleetDialer(url, MEMBER)


def test_a_coordinator_of_ours_is_joined_where_it_says() -> None:
    assert FleetDialer("http://host:4010", DIRECT).url == "tls-any://host:50052"
    assert (
        coordinator_url("host", {"transport": 7, "heartbeat": 8}) == "tls-any://host:7"
    )
    assert coordinator_url("host", {"heartbeat": 8}) == ""


def test_a_coordinator_of_an_open_fleet_speaks_no_tls_to_those_with_a_token() -> None:
    assert (
        coordinator_url("host", {"transport:tcp": 7, "heartbeat:tcp": 8})
        == "tcp://host:7"
    )


def answered(session: WorkerEnd, answer: bytes) -> list[bytes]:
    """Let a node answer a ping; return what it was sent."""
    said = sent(session.tick(0.0))
    assert isinstance(session.receive([answer], 0.0)[-1], Close)
    return said


def test_of_a_heartbeat_port_a_worker_learns_where_the_other_is() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    (ping,) = answered(dialer.start_session({}), b"PONG node-a\n")
    assert dialer.why_final(1000, "") is None

    assert ping == b"PING worker-one\n"
    assert dialer.url == "tcp://host:50052"
    (greeting,) = sent(dialer.start_session({}).tick(0.0))
    assert b"worker-one" in greeting


def test_a_heartbeat_port_with_a_token_says_which_port_it_is() -> None:
    listeners = [
        each for each in endpoints(Config(), around()) if isinstance(each, Listener)
    ]
    transport, heartbeat = listeners
    transport.on_bound(1234)
    dialer = FleetDialer("host:50051", MEMBER)
    worker, node = dialer.start_session({}), heartbeat.accept("192.0.2.1", 0.0)

    node.tick(0.0)
    (ping,) = sent(worker.tick(0.0))
    (pong,) = sent(node.receive([ping], 0.0))
    worker.receive([pong], 0.0)
    dialer.why_final(1000, "")

    assert dialer.url == "tls-any://host:1234"


def test_a_port_that_answers_no_ping_is_tried_as_the_other() -> None:
    dialer = FleetDialer("host:50052", replace(MEMBER, token=""))
    tried = []

    for _ in range(4):
        session = dialer.start_session({})
        (said,) = sent(session.tick(0.0))
        tried.append((dialer.url, said[:4] == b"PING"))
        assert dialer.why_final(1006, "connection lost") is None

    url = "tcp://host:50052"
    assert tried == [(url, True), (url, False), (url, True), (url, False)]


def test_a_pong_that_does_not_come_is_not_waited_for_long() -> None:
    session = FleetDialer("host:1", replace(MEMBER, token="")).start_session({})
    session.tick(0.0)
    assert session.deadline == 10.0

    assert isinstance(session.tick(10.0)[0], Close)
    assert session.receive([b"PONG late\n"], 11.0) == ()


def test_a_worker_called_like_its_coordinator_takes_another_name() -> None:
    member = replace(MEMBER, name="coordinator")
    first = unconnected(PROTOCOL, member, around())
    close = met_by(first)
    assert (close.code, first.dialer.why_final(close.code, "")) == (CLOSE_MOVED, None)

    second = unconnected(PROTOCOL, member, around())
    second.worker = first.dialer.start_session({})
    second.begin()

    assert second.events[0].name == "coordinator-worker"  # type: ignore[union-attr]  # Met


def test_a_worker_called_like_whom_it_pings_pings_again_under_another_name() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    session = dialer.start_session({})
    session.tick(0.0)
    (close,) = session.receive([b"PONG worker-one\n"], 0.0)
    assert isinstance(close, Close)
    assert (close.code, dialer.why_final(close.code, "")) == (CLOSE_MOVED, None)

    (ping,) = answered(dialer.start_session({}), b"PONG worker-one\n")
    assert ping == b"PING worker-one-worker\n"
    assert dialer.why_final(CLOSE_MOVED, "") is None
    assert dialer.url == "tcp://host:50052"


def test_a_node_that_always_has_our_name_ends_the_tries() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    for name in (b"worker-one", b"worker-one-worker"):
        answered(dialer.start_session({}), b"PONG " + name + b"\n")
        final = dialer.why_final(1000, "")

    assert final is not None
    assert "--name" in final


def test_a_coordinator_that_always_has_our_name_is_not_tried_at_once_for_ever() -> None:
    dialer = unconnected(PROTOCOL, replace(MEMBER, name="a"), around()).dialer
    closes = []
    for name in ("a", "a-worker"):
        pair = unconnected(PROTOCOL, MEMBER, replace(around(), name=name))
        pair.worker = dialer.start_session({})
        closes.append(met_by(pair))

    assert [each.code == CLOSE_MOVED for each in closes] == [True, False]
    assert "--name" in closes[1].reason


def met_by(pair: Pair) -> Close:
    """Let a worker greet a coordinator; return how it takes the answer."""
    pair.open()
    pair.coordinator.tick(0.0)
    answer = pair.coordinator.receive([*sent(pair.worker.tick(0.0))], 0.0)
    (close,) = pair.worker.receive([*sent(answer)], 0.0)
    assert isinstance(close, Close)
    return close


def test_a_real_fleet_that_hangs_up_again_and_again_has_another_token() -> None:
    dialer = FleetDialer("host:50052", MEMBER)
    dialer._on_rejected("host")
    finals = []
    for _ in range(REJECTIONS_MAX):
        dialer._on_rejected("host")
        finals.append(dialer.why_final(1006, "closed by peer"))

    assert finals[:-1] == [None] * (REJECTIONS_MAX - 1)
    assert "--token" in (finals[-1] or "")


def test_a_url_may_name_the_fleet() -> None:
    parts = parse_url("host:1?fleet=lab-7")

    assert fleet_in_url(parts) == "lab-7"
    own = FleetDialer("host:1?fleet=lab-7", MEMBER)._local
    assert own.key == fleet_key(MEMBER.token, "lab-7")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("host:1", "host", 1), ("host", "host", 50051), ("[::1]:5", "::1", 5)],
)
def test_contacts_are_given_as_addresses(text: str, host: str, port: int) -> None:
    assert (parse_contact(text).host, parse_contact(text).port) == (host, port)


@pytest.mark.parametrize("text", ["", "http://a:1", "a:port", "a b:1", "u@h:1", ":5"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        parse_contact(text)


def test_nothing_is_sent_once_the_ping_is_over() -> None:
    session = FleetDialer("host:1", replace(MEMBER, token="")).start_session({})
    (send,) = session.tick(0.0)

    assert isinstance(send, Send)
    assert session.tick(1.0) == ()
