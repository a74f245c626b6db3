"""Heartbeats as a node answers them, line by line as real nodes were recorded."""

import pytest

from protocols.macfleet.fleet.fleets import (
    AWAY,
    KEY,
    closed,
    limiter,
    member,
    member_of,
    sent,
)
from protocols.macfleet.recorded import Case, recorded
from shoal.protocols.crowd import From
from shoal.protocols.macfleet.fleet.answering import LINE_WITHIN, PongSession
from shoal.protocols.macfleet.fleet.limiter import BARRED_AFTER, Limiter
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.wire.lines import LINE_MAX, Heard, read_pong, write_ping
from shoal.protocols.session import Output, Parting

STRICTER = {
    "hb/non utf8 not counted": (1, "else it is a free guess: it was read like others"),
    "hb/70000 byte line not counted": (1, "else whoever floods is never slowed down"),
    "hb/open silence": (0, "nothing is secret: idle connections must not bar a house"),
}
"""How many failures we count where real nodes count otherwise, and why."""


def opened(own: Member, limits: Limiter | None = None) -> tuple[PongSession, Limiter]:
    limits = limits or limiter()
    assert limits.delay(AWAY, 0.0) is not None
    session = PongSession(own, limits, AWAY)
    assert not session.tick(0.0)
    return session, limits


def failures(limits: Limiter) -> int:
    record = limits._records.get(AWAY)
    return 0 if record is None else record.failures


def request_of(case: Case) -> bytes:
    given = case["input"]
    if given["request_rule"]:
        return b"APING " + 70_000 * b"a" + b"\n"
    return bytes.fromhex(given["request_hex"])


@recorded("heartbeat_server")
@pytest.mark.parametrize("split", [1 << 20, 1000, 7])
def test_lines_are_answered_as_by_real_nodes(case: Case, split: int) -> None:
    given, expected = case["input"], case["expect"]
    nonce = given["response_nonce_hex"]
    own = member_of(case, given["server_node_id"], given["server_hw_json_hex"], nonce)
    session, limits = opened(own)
    request = request_of(case)

    said: list[From | Output] = []
    for begin in range(0, len(request), split):
        said += session.receive([request[begin : begin + split]], 0.5)
    if given["after_send"] == "half-close":
        said += session.parted(0.5)
    if closed(said) is None:
        assert expected["closed_within_s"] > LINE_WITHIN
        assert session.deadline == LINE_WITHIN
        said += session.tick(LINE_WITHIN)

    assert sent(said).hex() == expected["reply_hex"]
    assert closed(said) is not None
    assert session.deadline is None
    counted, _ = STRICTER.get(case["name"], (expected["auth_failures_recorded"], ""))
    assert failures(limits) == counted
    assert AWAY not in limits._undecided


def test_table_of_what_is_stricter_names_cases_that_there_are() -> None:
    (mark,) = [recorded("heartbeat_server").mark]
    cases = {case["name"]: case for case in mark.args[1]}

    for name, (counted, _) in STRICTER.items():
        assert cases[name]["expect"]["auth_failures_recorded"] != counted


def test_session_wants_to_know_that_its_peer_has_hung_up() -> None:
    assert isinstance(opened(member())[0], Parting)


def test_line_is_answered_only_once_however_often_it_is_heard() -> None:
    own = member()
    line = write_ping(KEY, Heard("node-b", b"0123456789abcdef"))
    first, limits = opened(own)
    assert sent(first.receive([line], 0.0))

    again, limits = opened(own, limits)
    said = again.receive([line], 0.0)

    assert not sent(said)
    assert closed(said) == "the ping of 'node-b' was heard before"
    assert failures(limits) == 1


def test_line_that_stops_half_way_counts() -> None:
    session, limits = opened(member())
    session.receive([b"APING node-b 00"], 0.0)

    said = session.parted(0.1)

    assert closed(said) is not None
    assert not sent(said)
    assert failures(limits) == 1


def test_guesses_made_at_the_same_time_are_no_more_than_one_after_the_other() -> None:
    own, limits = member(), limiter()
    sessions = [opened(own, limits)[0] for _ in range(100)]
    guess = write_ping(b"another key", Heard("node-b", b"0123456789abcdef"))
    right = write_ping(KEY, Heard("node-b", b"0123456789abcdef"))

    for session in sessions[:50]:
        session.receive([guess], 0.0)
    answers = [session.receive([right], 0.0) for session in sessions[50:]]

    assert failures(limits) == BARRED_AFTER
    assert {closed(said) for said in answers} == {"too many failures of this address"}
    assert not any(map(sent, answers))
    assert not limits._undecided


def test_right_line_forgives_what_was_wrong_before() -> None:
    own, limits = member(), limiter()
    for _ in range(BARRED_AFTER - 1):
        session, _ = opened(own, limits)
        session.receive([b"nonsense\n"], 0.0)
    assert failures(limits) == BARRED_AFTER - 1

    session, _ = opened(own, limits)
    session.receive([write_ping(KEY, Heard("node-b", bytes(16)))], 0.0)

    assert failures(limits) == 0


def test_nothing_counts_in_an_open_fleet() -> None:
    own, limits = member(key=None), limiter()
    for wrong in (b"HELLO\n", b"\xff\n", (LINE_MAX + 1) * b"a", b""):
        session, _ = opened(own, limits)
        said = [*session.receive([wrong], 0.0), *session.tick(LINE_WITHIN)]
        assert closed(said) is not None

    assert not limits._records
    assert not limits._undecided


def test_every_answer_has_a_nonce_of_its_own() -> None:
    own = member()
    nonces = set()
    for number in range(5):
        session, _ = opened(own)
        ping = write_ping(KEY, Heard("node-b", bytes([number])))
        said = session.receive([ping], 0.0)
        nonces.add(read_pong(KEY, sent(said)).nonce)

    assert len(nonces) == 5


def test_memory_of_what_is_held_of_a_line_is_bounded() -> None:
    session, _ = opened(member())
    for _ in range(LINE_MAX // 1000):
        assert not session.receive([1000 * b"a"], 0.0)

    assert closed(session.receive([1000 * b"a"], 0.0)) is not None
    assert not session.receive([b"more\n"], 0.0)
    assert not session.tick(9.0)
