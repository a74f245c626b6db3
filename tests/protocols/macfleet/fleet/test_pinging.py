"""Heartbeats as a node asks for them."""

import pytest

from protocols.macfleet.fleet.fleets import KEY, closed, member, member_of, sent
from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.fleet.pinging import PingExchange, PingSession, Pong
from shoal.protocols.macfleet.wire.hardware import Profile, read_profile, write_profile
from shoal.protocols.macfleet.wire.lines import (
    LINE_MAX,
    Heard,
    read_ping,
    write_ping,
    write_pong,
)

HARDWARE = Profile(chip="M4", gpu_cores=10, data_port=50052)

OTHERWISE = {
    "hbclient/reply is our own ping mirrored": "anybody can hand a ping back",
    "hbclient/open prefix": "it names nobody, so that nobody could be registered",
}
"""Answers that real nodes believe and we do not, and why."""


@recorded("heartbeat_client")
def test_pongs_are_believed_as_by_real_nodes(case: Case) -> None:
    given, expected = case["input"], case["expect"]
    own = member_of(
        case, given["node_id"], given["hw_json_hex"], given["nonce_hex"] or ""
    )
    exchange = PingExchange(own)
    line = exchange.line()
    if given["token"] and not given["hw_json_hex"]:
        # Ours always tell their hardware, as real agents do; others need not.
        line = write_ping(own.key, own.word(hardware=False))
    assert line.hex() == expected["line_hex"]
    heard: list[Pong] = []
    session = PingSession(exchange, lambda pong, now: heard.append(pong))
    session._asked = True
    reply = bytes.fromhex(given["peer_reply_hex"])

    try:
        said = [*session.receive([reply], 0.0), *session.parted(0.0)]
    except PeerError:
        assert not expected["believed_alive"] or case["name"] in OTHERWISE
    else:
        assert bool(heard) == expected["believed_alive"]
        assert (closed(said) is not None) == bool(heard)
    assert expected["believed_alive"] or not heard
    delivered = [
        (node_id, read_profile(hardware.encode()))
        for node_id, hardware in expected["peer_hw_delivered"]
    ]
    assert (case["name"] in OTHERWISE) or delivered == [
        (pong.node_id, pong.profile) for pong in heard if pong.profile
    ]


def pong(
    node_id: str = "node-b",
    nonce: bytes = b"0123456789abcdef",
    hardware: bytes | None = None,
    key: bytes | None = KEY,
) -> bytes:
    return write_pong(key, Heard(node_id, nonce, hardware))


def test_pong_tells_who_answers_and_what_it_is_made_of() -> None:
    exchange = PingExchange(member(), "node-b")
    exchange.line()

    assert exchange.hear(pong(hardware=write_profile(HARDWARE))) == Pong(
        "node-b", HARDWARE
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (pong("node-a"), "our own id"),
        (pong(nonce=(1).to_bytes(16)), "our own ping, handed back"),
        (pong("node-c"), "'node-c' answers where 'node-b' should"),
        (pong("b" * 257), "1 to 256 bytes"),
        (pong(""), "1 to 256 bytes"),
        (pong(hardware=b'{"ram_gb": Infinity}'), "hardware profile"),
        (pong(hardware=b'{"gpu_cores": "many"}'), "hardware profile"),
        (pong(key=b"another"), "not signed for this fleet"),
        (pong(key=None), "expected APONG"),
    ],
)
def test_pong_that_says_nothing_about_the_node_is_refused(
    line: bytes, why: str
) -> None:
    exchange = PingExchange(member(), "node-b")
    exchange.line()

    with pytest.raises(PeerError, match=why):
        exchange.hear(line)


def test_pong_that_was_heard_before_is_refused() -> None:
    own = member()
    PingExchange(own).hear(pong())

    with pytest.raises(PeerError, match="heard before"):
        PingExchange(own).hear(pong())


def test_pong_of_an_open_fleet_can_be_the_same_each_time() -> None:
    own = member(key=None)
    for _ in range(2):
        assert PingExchange(own).hear(b"PONG node-b\n") == Pong("node-b", None)


def test_session_asks_once_and_is_over_with_the_answer() -> None:
    heard: list[tuple[Pong, float]] = []
    session = PingSession(PingExchange(member()), lambda *each: heard.append(each))

    assert read_ping(KEY, sent(session.tick(1.0))).node_id == "node-a"
    assert not session.tick(2.0)
    for byte in pong():
        assert not heard
        said = session.receive([bytes([byte])], 3.0)

    assert closed(said) == "answered"
    assert heard == [(Pong("node-b", None), 3.0)]
    assert not session.receive([pong()], 4.0)
    assert not session.parted(5.0)


def test_answer_without_an_end_is_refused_before_it_is_held() -> None:
    session = PingSession(PingExchange(member()), lambda pong, now: None)
    session.tick(0.0)

    with pytest.raises(LimitExceeded):
        session.receive([(LINE_MAX + 1) * b"a"], 0.0)
