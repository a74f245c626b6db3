"""A worker's attempts to connect, and what ends them."""

from dataclasses import replace

import pytest

from protocols.calling import MEMBER, fleet_context, sent
from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet.addresses import (
    coordinator_url,
    fleet_in_url,
    parse_contact,
    parse_url,
)
from shoal.protocols.macfleet.codec.frames import Frame, FrameType, encode_frame
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.dialer import REJECTIONS_MAX, FleetDialer
from shoal.protocols.macfleet.local_node import Config
from shoal.protocols.macfleet.node_endpoints import endpoints
from shoal.protocols.seam.context import unenforceable
from shoal.protocols.seam.endpoints import Listener
from shoal.protocols.seam.session import Close, CloseCode, Send, WorkerEnd

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
def test_valid_addresses_have_urls(url: str, token: str, dialled: str) -> None:
    assert FleetDialer(url, replace(MEMBER, token=token)).url == dialled


@pytest.mark.parametrize(
    "url", ["", "host", "http://host:4010", "host:port", "ftp://host:1", "tcp://:1"]
)
def test_invalid_addresses_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        FleetDialer(url, MEMBER)


def test_a_restricted_worker_does_not_serve_an_upstream_node() -> None:
    only_al = frozenset({"al"})
    dialer = FleetDialer(
        "tcp://host:50052", replace(MEMBER, token="", only_for=only_al)
    )
    dialer.start_session({})
    assert dialer.final_reason(1000, "") is None  # no node answered the ping
    session = dialer.start_session({})
    session.tick(0.0)

    greeting = encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, b"node-a"))
    (close,) = [
        each for each in session.receive([greeting], 0.0) if isinstance(each, Close)
    ]

    assert close.reason == unenforceable("--only-for")
    assert dialer.final_reason(1000, "") == unenforceable("--only-for")


def test_a_shoal_coordinator_is_dialled_at_its_announced_port() -> None:
    assert FleetDialer("http://host:4010", DIRECT).url == "tls-any://host:50052"
    assert coordinator_url("host", {"transport": 7}) == "tls-any://host:7"
    assert coordinator_url("host", {"heartbeat": 8}) == ""


def test_an_open_fleet_has_no_tls_even_for_workers_with_a_token() -> None:
    assert coordinator_url("host", {"transport:tcp": 7}) == "tcp://host:7"


@pytest.mark.parametrize(
    ("labels", "scheme", "pong"),
    [
        (("transport", "heartbeat"), "tls-any", b""),
        (("transport:tcp", "heartbeat:tcp"), "tcp", b"PONG node-a\n"),
    ],
)
def test_a_shoal_coordinator_is_pinged_and_dialled_at_its_own_ports(
    labels: tuple[str, str], scheme: str, pong: bytes
) -> None:
    direct = coordinator_url("host", dict(zip(labels, (7, 5), strict=True)))
    token = "" if pong else MEMBER.token
    dialer = FleetDialer(
        "http://host:4010", replace(MEMBER, token=token, direct_url=direct)
    )

    tried = []
    for _ in range(4):
        session = dialer.start_session({})
        session.tick(0.0)
        tried.append(dialer.url)
        if dialer.url.endswith(":5") and pong:
            session.receive([pong], 0.0)
        assert dialer.final_reason(1006, "connection lost") is None

    assert tried == 2 * [f"{scheme}://host:5", f"{scheme}://host:7"]


def answered(session: WorkerEnd, answer: bytes) -> list[bytes]:
    """Let a node answer a ping; return what it received."""
    said = sent(session.tick(0.0))
    assert isinstance(session.receive([answer], 0.0)[-1], Close)
    return said


def test_a_pong_contains_the_transport_port() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    (ping,) = answered(dialer.start_session({}), b"PONG node-a\n")
    assert dialer.final_reason(1000, "") is None

    assert ping == b"PING worker-one\n"
    assert dialer.url == "tcp://host:50052"
    (greeting,) = sent(dialer.start_session({}).tick(0.0))
    assert b"worker-one" in greeting


def test_a_signed_pong_contains_the_transport_port() -> None:
    listeners = [
        each
        for each in endpoints(Config(), fleet_context())
        if isinstance(each, Listener)
    ]
    transport, heartbeat = listeners
    transport.on_bound(1234)
    dialer = FleetDialer("host:50051", MEMBER)
    worker, node = dialer.start_session({}), heartbeat.accept("192.0.2.1", 0.0)

    node.tick(0.0)
    (ping,) = sent(worker.tick(0.0))
    (pong,) = sent(node.receive([ping], 0.0))
    worker.receive([pong], 0.0)
    dialer.final_reason(1000, "")

    assert dialer.url == "tls-any://host:1234"


def test_a_port_without_a_pong_is_dialled_as_transport_port() -> None:
    dialer = FleetDialer("host:50052", replace(MEMBER, token=""))
    tried = []

    for _ in range(4):
        session = dialer.start_session({})
        (said,) = sent(session.tick(0.0))
        tried.append((dialer.url, said[:4] == b"PING"))
        assert dialer.final_reason(1006, "connection lost") is None

    url = "tcp://host:50052"
    assert tried == [(url, True), (url, False), (url, True), (url, False)]


def test_waiting_for_a_pong_times_out() -> None:
    session = FleetDialer("host:1", replace(MEMBER, token="")).start_session({})
    session.tick(0.0)
    assert session.deadline == 10.0

    assert isinstance(session.tick(10.0)[0], Close)
    assert session.receive([b"PONG late\n"], 11.0) == ()


def test_a_worker_with_the_pinged_nodes_id_pings_again_under_another() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    session = dialer.start_session({})
    session.tick(0.0)
    (close,) = session.receive([b"PONG worker-one\n"], 0.0)
    assert isinstance(close, Close)
    assert (close.code, dialer.final_reason(close.code, "")) == (CloseCode.MOVED, None)

    (ping,) = answered(dialer.start_session({}), b"PONG worker-one\n")
    assert ping == b"PING worker-one-worker\n"
    assert dialer.final_reason(CloseCode.MOVED, "") is None
    assert dialer.url == "tcp://host:50052"


def test_a_second_id_conflict_at_a_node_is_final() -> None:
    dialer = FleetDialer("host:50051", replace(MEMBER, token=""))

    for name in (b"worker-one", b"worker-one-worker"):
        answered(dialer.start_session({}), b"PONG " + name + b"\n")
        final = dialer.final_reason(1000, "")

    assert final is not None
    assert "--name" in final


def test_a_worker_with_the_dialled_nodes_id_changes_its_own_once() -> None:
    dialer = FleetDialer("http://host:4010", replace(DIRECT, token=""))

    closes = []
    for name in (b"worker-one", b"worker-one-worker"):
        session = dialer.start_session({})
        (greeting,) = sent(session.tick(0.0))
        assert greeting.endswith(name)
        answer = encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, name))
        (close,) = session.receive([answer], 0.0)
        assert isinstance(close, Close)
        closes.append(close)
        dialer.final_reason(close.code, "")

    assert [each.code == CloseCode.MOVED for each in closes] == [True, False]
    assert "--name" in closes[1].reason


def test_repeated_rejections_by_upstream_are_final() -> None:
    dialer = FleetDialer("host:50052", MEMBER)
    dialer._on_rejected("host")
    finals = []
    for _ in range(REJECTIONS_MAX):
        dialer._on_rejected("host")
        finals.append(dialer.final_reason(1006, "closed by peer"))

    assert finals[:-1] == [None] * (REJECTIONS_MAX - 1)
    assert "--token" in (finals[-1] or "")


def test_a_url_may_name_the_fleet() -> None:
    parts = parse_url("host:1?fleet=lab-7")

    assert fleet_in_url(parts) == "lab-7"
    own = FleetDialer("host:1?fleet=lab-7", MEMBER)._local
    assert own.member.key == fleet_key(MEMBER.token, "lab-7")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("host:1", "host", 1), ("host", "host", 50051), ("[::1]:5", "::1", 5)],
)
def test_contacts_are_parsed_from_addresses(text: str, host: str, port: int) -> None:
    assert (parse_contact(text).host, parse_contact(text).port) == (host, port)


@pytest.mark.parametrize("text", ["", "http://a:1", "a:port", "a b:1", "u@h:1", ":5"])
def test_invalid_contacts_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        parse_contact(text)


def test_nothing_is_sent_once_the_ping_is_over() -> None:
    session = FleetDialer("host:1", replace(MEMBER, token="")).start_session({})
    (send,) = session.tick(0.0)

    assert isinstance(send, Send)
    assert session.tick(1.0) == ()
