"""The server's end as upstream servers act, and where it is stricter."""

from protocols.macfleet.handshake_ends import (
    HandshakeEnd,
    client,
    giving,
    meet,
    node,
    server,
)
from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.protocols.macfleet.codec.keys import fleet_key

STRICTER = {
    "hs/300 byte id": "ids have 256 bytes at most, as in open fleets",
    "hs/eof after first": "whoever leaves with our answer counts as one who guesses",
    "hs/silence after first": "the same",
}
"""Cases that end otherwise in Shoal, and why."""


def recorded_server(case: Case) -> HandshakeEnd:
    given = case["input"]
    challenge = given["server_challenge_b_hex"]
    own = node(
        given["server_id"],
        given["token"],
        accepts_v1=True,
        random_bytes=giving(bytes.fromhex(challenge or "")),
    )
    return server(own, bytes.fromhex(given["server_hw_json_hex"])).open()


def play(end: HandshakeEnd, case: Case) -> None:
    given = case["input"]
    for data in given["client_sends_hex"]:
        end.hear(bytes.fromhex(data))
    if given["then"] == "half-close":
        end.hang_up()
    end.wait()


@recorded("handshake_server")
def test_a_server_acts_as_upstream_does(case: Case) -> None:
    end = recorded_server(case)

    play(end, case)

    expected = case["expect"]
    agreed = end.agreed
    profile = None if agreed is None else agreed.profile
    if case["name"] in STRICTER:
        assert agreed is None
        assert end.counts == (case["name"] != "hs/300 byte id")
        return
    assert [each.hex() for each in end.sent] == expected["server_sends_hex"]
    assert [
        [agreed.peer_id, profile and profile.gpu_cores] for _ in range(1) if agreed
    ] == expected["admitted"]
    assert (end.refused is not None) == expected["server_closes"]
    assert int(end.counts) == expected["auth_failures_recorded"]


@recorded("handshake")
def test_both_ends_send_what_upstream_sends(case: Case) -> None:
    given, expected = case["input"], case["expect"]
    key = given["fleet_key_hex"]
    challenges = [
        bytes.fromhex(given[name] or "")
        for name in ("challenge_a_hex", "challenge_b_hex")
    ]
    one, other = (
        node(
            given[f"{role}_id"],
            given["token"],
            key=None if key is None else fleet_key(given["token"], given["fleet_id"]),
            accepts_v1=True,
            random_bytes=giving(challenge),
        )
        for role, challenge in zip(("client", "server"), challenges, strict=True)
    )
    hardware = [
        bytes.fromhex(given[f"{role}_hw_json_hex"]) for role in ("client", "server")
    ]
    dialling = client(one, other.node_id, hardware[0]).open()
    dialled = server(other, hardware[1]).open()

    meet(dialling, dialled)

    assert key is None or bytes.fromhex(key) == one.key
    assert [each.hex() for each in dialling.sent] == expected["client_frames_hex"]
    assert [each.hex() for each in dialled.sent] == expected["server_frames_hex"]
    for end, peer, sees in (
        (dialling, other, "client_sees_hw"),
        (dialled, one, "server_sees_hw"),
    ):
        assert end.agreed is not None
        assert end.agreed.peer_id == peer.node_id
        seen = end.agreed.profile
        assert (seen is None) == (expected[sees] is None)
        if seen is not None:
            assert seen.chip == expected[sees]["chip_name"]
            assert seen.gpu_cores == expected[sees]["gpu_cores"]
            assert seen.data_port == expected[sees]["data_port"]


def test_v1_is_refused_by_default() -> None:
    case = case_of("hs/v1 ok")
    end = server(node("node-a")).open()

    end.hear(bytes.fromhex(case["input"]["client_sends_hex"][0]))

    assert end.sent == []
    assert "speaks the handshake v1, which is not accepted here" in end.why
    assert not end.counts


def test_a_client_with_the_servers_id_is_refused() -> None:
    end = server(node("node-b")).open()

    end.hear(bytes.fromhex(case_of("hs/v2 ok")["input"]["client_sends_hex"][0]))

    assert "claims this node's id" in end.why
    assert end.sent == []


def test_an_open_server_refuses_its_own_id() -> None:
    end = server(node("node-b", None)).open()

    end.hear(bytes.fromhex(case_of("hs/open ok")["input"]["client_sends_hex"][0]))

    assert "claims this node's id" in end.why


def test_a_long_first_message_is_rejected_by_its_header() -> None:
    case = case_of("hs/300 byte id")
    end = server(node("node-a")).open()

    end.hear(bytes.fromhex(case["input"]["client_sends_hex"][0])[:24])

    assert "332 bytes exceeds the limit of 288" in end.why


def test_a_silent_client_times_out_after_ten_seconds() -> None:
    end = server(node("node-a")).open()
    assert end.handshake.deadline == 10.0

    end.handshake.tick(9.9)
    end.wait()

    assert "sent nothing for 10 s" in end.why
    assert not end.counts


def test_each_message_has_ten_seconds_of_its_own() -> None:
    end = server(node("node-a")).open()

    end.hear(
        bytes.fromhex(case_of("hs/v2 ok")["input"]["client_sends_hex"][0]), now=6.0
    )

    assert end.handshake.deadline == 16.0
