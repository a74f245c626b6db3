"""Lines of the heartbeat port."""

import pytest

from protocols.each_case import in_each_case
from protocols.macfleet.recorded import CASES, Case, recorded
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.heartbeat_lines import (
    LINE_MAX,
    HeartbeatLine,
    decode_ping,
    decode_pong,
    encode_ping,
    encode_pong,
)
from shoal.protocols.macfleet.codec.keys import fleet_key

KEY = fleet_key("vector-token-0001")


def key_of(case: Case) -> bytes | None:
    token, fleet = case["input"]["token"], case["input"]["fleet_id"] or ""
    return None if token is None else fleet_key(token, fleet)


def unhex(said: str | None) -> bytes | None:
    return None if said is None else bytes.fromhex(said)


def decides(case: Case) -> bool:
    """Say whether a case contains a line; the others are about its absence."""
    request = unhex(case["input"]["request_hex"])
    if request is None:
        return False
    return b"\n" in request or case["input"]["after_send"] == "half-close"


WHOLE_LINES = {
    case["name"]: case
    for case in CASES
    if case["kind"] == "heartbeat_server" and decides(case)
}


@in_each_case(WHOLE_LINES)
def test_a_ping_is_decoded_as_upstream_does(case: Case) -> None:
    said, key, expected = case["input"], key_of(case), case["expect"]["reply_hex"]
    line = bytes.fromhex(said["request_hex"]).split(b"\n")[0]

    if not expected:
        with pytest.raises(PeerError):
            decode_ping(key, line)
        return

    ping = decode_ping(key, line)
    hardware = unhex(said["server_hw_json_hex"])
    pong = HeartbeatLine(
        said["server_node_id"],
        unhex(said["response_nonce_hex"]) or b"",
        None if ping.hardware is None else hardware,
    )
    assert encode_pong(key, pong).hex() == expected


@recorded("heartbeat_client")
def test_a_pong_is_decoded_as_upstream_does(case: Case) -> None:
    said, expected, key = case["input"], case["expect"], key_of(case)
    ping = HeartbeatLine(
        said["node_id"], unhex(said["nonce_hex"]) or b"", unhex(said["hw_json_hex"])
    )
    reply = unhex(said["peer_reply_hex"]) or b""

    assert encode_ping(key, ping).hex() == expected["line_hex"]
    try:
        decode_pong(key, reply)
        believed = True
    except PeerError:
        believed = False
    assert believed == expected["believed_alive"]


def test_lines_round_trip() -> None:
    for key, said in (
        (None, HeartbeatLine("node")),
        (KEY, HeartbeatLine("n\u00f8de", b"\1" * 16)),
        (KEY, HeartbeatLine("node", b"\1" * 16, b'{"ram_gb": 8.0}')),
    ):
        assert decode_ping(key, encode_ping(key, said)) == said
        assert decode_pong(key, encode_pong(key, said)) == said


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "expected APING, got b''"),
        (b"PING node", "expected APING"),
        (b"APING \xff 00 00", "utf-8"),
        (b"APING a 00", "3 fields"),
        (b"APING a 0 00", "[Oo]dd-length"),
        (b"APING a 0\t0 00", "[Nn]on-hex|Odd"),
        (b"APING a \xc3\xa9\xc3\xa9 00", "ASCII"),
        (b"APING a 00 00", "not signed"),
    ],
)
def test_errors_name_what_is_wrong_with_a_line(line: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        decode_ping(KEY, line)


def test_a_line_that_never_ends_is_rejected() -> None:
    with pytest.raises(LimitExceeded):
        decode_ping(None, b"PING " + b"x" * LINE_MAX)


def test_an_open_ping_contains_the_id() -> None:
    assert decode_ping(None, b"PING node-1\r\n") == HeartbeatLine("node-1")
    assert decode_ping(None, b"PING\n") == HeartbeatLine("")
