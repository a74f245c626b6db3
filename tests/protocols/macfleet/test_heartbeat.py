"""Both ends of a heartbeat, compared with recordings of MacFleet's own programs."""

import pytest

from protocols.macfleet.fleet_members import (
    AWAY,
    KEY,
    closed,
    limiter,
    member,
    member_of,
    sent,
)
from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import (
    HardwareProfile,
    decode_profile,
    encode_profile,
)
from shoal.protocols.macfleet.codec.heartbeat_lines import (
    LINE_MAX,
    HeartbeatLine,
    decode_ping,
    decode_pong,
    encode_ping,
    encode_pong,
)
from shoal.protocols.macfleet.heartbeat import (
    LINE_TIMEOUT,
    PingExchange,
    PingSession,
    Pong,
    PongSession,
)
from shoal.protocols.macfleet.member import FleetMember, ReplayFilter
from shoal.protocols.macfleet.rate_limiter import BANNED_AFTER, FleetRateLimiter
from shoal.protocols.seam.peer_session import PeerMessage
from shoal.protocols.seam.session import HandlesConnectionLoss, Output

STRICTER = {
    "hb/non utf8 not counted": (1, "else it is a free guess: it was read like others"),
    "hb/70000 byte line not counted": (1, "else whoever floods is never slowed down"),
    "hb/open silence": (0, "nothing is secret: idle connections must not bar a house"),
}
"""The number of failures in cases where upstream counts otherwise, and why."""


def opened(
    own: FleetMember, limits: FleetRateLimiter | None = None
) -> tuple[PongSession, FleetRateLimiter]:
    limits = limits or limiter()
    assert limits.delay(AWAY, 0.0) is not None
    session = PongSession(own, limits, AWAY)
    assert not session.tick(0.0)
    return session, limits


def failures(limits: FleetRateLimiter) -> int:
    record = limits._records.get(AWAY)
    return 0 if record is None else record.failures


def request_of(case: Case) -> bytes:
    given = case["input"]
    if given["request_rule"]:
        return b"APING " + 70_000 * b"a" + b"\n"
    return bytes.fromhex(given["request_hex"])


@recorded("heartbeat_server")
@pytest.mark.parametrize("split", [1 << 20, 1000, 7])
def test_lines_are_answered_as_upstream_does(case: Case, split: int) -> None:
    given, expected = case["input"], case["expect"]
    nonce = given["response_nonce_hex"]
    own = member_of(case, given["server_node_id"], given["server_hw_json_hex"], nonce)
    session, limits = opened(own)
    request = request_of(case)

    said: list[PeerMessage | Output] = []
    for begin in range(0, len(request), split):
        said += session.receive([request[begin : begin + split]], 0.5)
    if given["after_send"] == "half-close":
        said += session.connection_lost(0.5)
    if closed(said) is None:
        assert expected["closed_within_s"] > LINE_TIMEOUT
        assert session.deadline == LINE_TIMEOUT
        said += session.tick(LINE_TIMEOUT)

    assert sent(said).hex() == expected["reply_hex"]
    assert closed(said) is not None
    assert session.deadline is None
    counted, _ = STRICTER.get(case["name"], (expected["auth_failures_recorded"], ""))
    assert failures(limits) == counted
    assert AWAY not in limits._pending


def test_the_table_of_stricter_cases_names_existing_ones() -> None:
    for name, (counted, _) in STRICTER.items():
        assert case_of(name)["expect"]["auth_failures_recorded"] != counted


def test_a_session_handles_a_disconnect() -> None:
    assert isinstance(opened(member())[0], HandlesConnectionLoss)


def test_a_replayed_line_is_not_answered() -> None:
    own = member()
    line = encode_ping(KEY, HeartbeatLine("node-b", b"0123456789abcdef"))
    first, limits = opened(own)
    assert sent(first.receive([line], 0.0))

    again, limits = opened(own, limits)
    said = again.receive([line], 0.0)

    assert not sent(said)
    assert closed(said) == "the ping of 'node-b' is a replay"
    assert failures(limits) == 1


def test_an_incomplete_line_counts_as_a_failure() -> None:
    session, limits = opened(member())
    session.receive([b"APING node-b 00"], 0.0)

    said = session.connection_lost(0.1)

    assert closed(said) is not None
    assert not sent(said)
    assert failures(limits) == 1


def test_parallel_guesses_are_limited_as_sequential_ones() -> None:
    own, limits = member(), limiter()
    sessions = [opened(own, limits)[0] for _ in range(100)]
    guess = encode_ping(b"another key", HeartbeatLine("node-b", b"0123456789abcdef"))
    right = encode_ping(KEY, HeartbeatLine("node-b", b"0123456789abcdef"))

    for session in sessions[:50]:
        session.receive([guess], 0.0)
    answers = [session.receive([right], 0.0) for session in sessions[50:]]

    assert failures(limits) == BANNED_AFTER
    assert {closed(said) for said in answers} == {"this address is banned"}
    assert not any(map(sent, answers))
    assert not limits._pending


def test_a_valid_line_resets_failures() -> None:
    own, limits = member(), limiter()
    for _ in range(BANNED_AFTER - 1):
        session, _ = opened(own, limits)
        session.receive([b"nonsense\n"], 0.0)
    assert failures(limits) == BANNED_AFTER - 1

    session, _ = opened(own, limits)
    session.receive([encode_ping(KEY, HeartbeatLine("node-b", bytes(16)))], 0.0)

    assert failures(limits) == 0


def test_an_open_fleet_counts_no_failures() -> None:
    own, limits = member(key=None), limiter()
    for wrong in (b"HELLO\n", b"\xff\n", (LINE_MAX + 1) * b"a", b""):
        session, _ = opened(own, limits)
        said = [*session.receive([wrong], 0.0), *session.tick(LINE_TIMEOUT)]
        assert closed(said) is not None

    assert not limits._records
    assert not limits._pending


def test_every_pong_has_a_fresh_nonce() -> None:
    own = member()
    nonces = set()
    for number in range(5):
        session, _ = opened(own)
        ping = encode_ping(KEY, HeartbeatLine("node-b", bytes([number])))
        said = session.receive([ping], 0.0)
        nonces.add(decode_pong(KEY, sent(said)).nonce)

    assert len(nonces) == 5


def test_the_buffer_of_a_line_is_bounded() -> None:
    session, _ = opened(member())
    for _ in range(LINE_MAX // 1000):
        assert not session.receive([1000 * b"a"], 0.0)

    assert closed(session.receive([1000 * b"a"], 0.0)) is not None
    assert not session.receive([b"more\n"], 0.0)
    assert not session.tick(9.0)


def test_a_line_is_new_once_and_the_oldest_is_evicted_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.member.REPLAYS_MAX", 100)
    said = ReplayFilter()
    lines = [HeartbeatLine("b", number.to_bytes(16)) for number in range(101)]

    assert not any(said.is_replay(KEY, each) for each in lines)
    assert said.is_replay(KEY, lines[-1])
    assert said.is_replay(KEY, lines[1])
    assert not said.is_replay(KEY, lines[0])


def test_lines_that_differ_in_any_field_are_different() -> None:
    said = ReplayFilter()
    lines = [
        HeartbeatLine("b", b"1"),
        HeartbeatLine("c", b"1"),
        HeartbeatLine("b", b"2"),
        HeartbeatLine("b", b"1", b"{}"),
    ]

    assert not any(said.is_replay(KEY, each) for each in lines)


def test_a_pong_has_current_hardware_only_if_the_ping_has_it() -> None:
    profile = HardwareProfile(chip="M4", data_port=7)
    own = member(profile=profile)

    first, second = own.own_line(hardware=True), own.own_line(hardware=False)

    assert first.hardware is not None
    assert decode_profile(first.hardware) == profile
    assert second.hardware is None
    assert first.nonce != second.nonce
    assert member(key=None).own_line(hardware=True) == HeartbeatLine("node-a")


HARDWARE = HardwareProfile(chip="M4", gpu_cores=10, data_port=50052)

OTHERWISE = {
    "hbclient/reply is our own ping mirrored": "anybody can hand a ping back",
    "hbclient/open prefix": "it names nobody, so that nobody could be registered",
}
"""Answers that upstream accepts and Shoal rejects, and why."""


@recorded("heartbeat_client")
def test_pongs_are_accepted_as_upstream_does(case: Case) -> None:
    given, expected = case["input"], case["expect"]
    own = member_of(
        case, given["node_id"], given["hw_json_hex"], given["nonce_hex"] or ""
    )
    exchange = PingExchange(own)
    line = exchange.ping()
    if given["token"] and not given["hw_json_hex"]:
        # Shoal always sends its hardware, as upstream agents do; others need not.
        line = encode_ping(own.key, own.own_line(hardware=False))
    assert line.hex() == expected["line_hex"]
    heard: list[Pong] = []
    session = PingSession(exchange, lambda pong, now: heard.append(pong))
    session._sent = True
    reply = bytes.fromhex(given["peer_reply_hex"])

    try:
        said = [*session.receive([reply], 0.0), *session.connection_lost(0.0)]
    except PeerError:
        assert not expected["believed_alive"] or case["name"] in OTHERWISE
    else:
        assert bool(heard) == expected["believed_alive"]
        assert (closed(said) is not None) == bool(heard)
    assert expected["believed_alive"] or not heard
    delivered = [
        (node_id, decode_profile(hardware.encode()))
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
    return encode_pong(key, HeartbeatLine(node_id, nonce, hardware))


def test_a_pong_contains_id_and_hardware() -> None:
    exchange = PingExchange(member(), "node-b")
    exchange.ping()

    assert exchange.receive_pong(pong(hardware=encode_profile(HARDWARE))) == Pong(
        "node-b", HARDWARE
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (pong("node-a"), "own id"),
        (pong(nonce=(1).to_bytes(16)), "own ping, sent back"),
        (pong("node-c"), "'node-c' answered, expected 'node-b'"),
        (pong("b" * 257), "1 to 256 bytes"),
        (pong(""), "1 to 256 bytes"),
        (pong(hardware=b"[]"), "hardware profile"),
        (pong(key=b"another"), "not signed for this fleet"),
        (pong(key=None), "expected APONG"),
    ],
)
def test_an_invalid_pong_is_rejected(line: bytes, why: str) -> None:
    exchange = PingExchange(member(), "node-b")
    exchange.ping()

    with pytest.raises(PeerError, match=why):
        exchange.receive_pong(line)


def test_a_replayed_pong_is_rejected() -> None:
    own = member()
    PingExchange(own).receive_pong(pong())

    with pytest.raises(PeerError, match="is a replay"):
        PingExchange(own).receive_pong(pong())


def test_pongs_of_an_open_fleet_may_repeat() -> None:
    own = member(key=None)
    for _ in range(2):
        assert PingExchange(own).receive_pong(b"PONG node-b\n") == Pong("node-b", None)


def test_a_session_pings_once_and_ends_with_the_pong() -> None:
    heard: list[tuple[Pong, float]] = []
    session = PingSession(PingExchange(member()), lambda *each: heard.append(each))

    assert decode_ping(KEY, sent(session.tick(1.0))).node_id == "node-a"
    assert not session.tick(2.0)
    for byte in pong():
        assert not heard
        said = session.receive([bytes([byte])], 3.0)

    assert closed(said) == "answered"
    assert heard == [(Pong("node-b", None), 3.0)]
    assert not session.receive([pong()], 4.0)
    assert not session.connection_lost(5.0)


def test_an_endless_pong_is_rejected() -> None:
    session = PingSession(PingExchange(member()), lambda pong, now: None)
    session.tick(0.0)

    with pytest.raises(LimitExceeded):
        session.receive([(LINE_MAX + 1) * b"a"], 0.0)
