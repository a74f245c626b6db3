"""The client's end as upstream clients act, and where it is stricter."""

from protocols.macfleet.handshake_ends import (
    HandshakeEnd,
    client,
    frame_of,
    giving,
    node,
)
from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.protocols.macfleet.codec.frames import Flag
from shoal.protocols.macfleet.handshake import rejection

STRICTER = {
    "hsclient/ack prefix differs but suffix signed for expected": (
        "the hardware has to be signed for the id that the answer begins with"
    ),
    "hsclient/v1 ack other id accepted": "an id that is expected is compared",
}
"""Cases that end otherwise in Shoal, and why."""

CALLED_OTHERWISE = {"hsclient/open any id accepted": "someone-else"}
"""Servers known by what they send; upstream uses the id it expected."""


def recorded_client(case: Case) -> HandshakeEnd:
    given = case["input"]
    own = node(
        given["client_id"],
        given["token"],
        accepts_v1=True,
        random_bytes=giving(bytes.fromhex(given["challenge_a_hex"] or "")),
    )
    hardware = bytes.fromhex(given["client_hw_json_hex"])
    return client(own, given["expected_peer_id"], hardware).open()


@recorded("handshake_client")
def test_a_client_acts_as_upstream_does(case: Case) -> None:
    end, expected = recorded_client(case), case["expect"]

    if replies := case["input"]["server_replies_hex"]:
        end.hear(bytes.fromhex(replies))
    elif "hangs up" in case["name"]:
        end.hang_up()
    end.wait()

    sent = [each.hex() for each in end.sent]
    assert sent[0] == expected["client_first_hex"]
    if case["name"] in STRICTER or "error" in expected:
        assert end.refused is not None
        assert len(sent) == 1
        return
    connected = CALLED_OTHERWISE.get(case["name"], expected["connected_as"])
    assert "".join(sent[1:]) == expected["client_second_hex"]
    assert end.agreed is not None
    assert end.agreed.peer_id == connected
    profile = end.agreed.profile
    assert (profile and profile.gpu_cores) == expected["peer_hw_gpu_cores"]


def test_the_server_id_need_not_be_known() -> None:
    case = case_of("hsclient/v2 ok")
    case = case | {"input": case["input"] | {"expected_peer_id": ""}}
    end = recorded_client(case)

    end.hear(bytes.fromhex(case["input"]["server_replies_hex"]))

    assert end.agreed is not None
    assert end.agreed.peer_id == "node-a"
    assert end.agreed.profile is not None


def test_a_wrong_token_is_named_with_a_remedy() -> None:
    case = case_of("hsclient/ack other token")
    end = recorded_client(case)

    end.hear(bytes.fromhex(case["input"]["server_replies_hex"]))

    assert end.why.startswith(
        "the fleet at 10.0.0.2:50052 has another token or another id: check --token"
    )


def test_the_first_message_has_no_hardware() -> None:
    end = client(node("node-b")).open()

    frame = frame_of(end.sent[0])

    assert frame.flags == Flag.V2
    assert bytes(frame.payload).startswith(b"node-b")
    assert len(frame.payload) == 6 + 32


def test_in_an_open_fleet_the_first_message_is_the_id_alone() -> None:
    end = client(node("node-b", None)).open()

    frame = frame_of(end.sent[0])

    assert (frame.flags, bytes(frame.payload)) == (0, b"node-b")


def test_a_v1_server_is_refused_by_default() -> None:
    case = case_of("hsclient/v1 ack (downgrade accepted)")
    end = client(node("node-b", random_bytes=giving(bytes(32)))).open()

    end.hear(bytes.fromhex(case["input"]["server_replies_hex"]))

    assert "speaks the handshake v1, which is not accepted here" in end.why
    assert len(end.sent) == 1


def test_a_node_that_dials_itself_gets_an_error() -> None:
    case = case_of("handshake/open")
    end = client(node("node-a", None)).open()

    end.hear(bytes.fromhex(case["expect"]["server_frames_hex"][0]))

    assert "has this node's id, 'node-a'" in end.why


def test_a_disconnect_after_the_last_message_is_a_rejection() -> None:
    refusal = rejection("10.0.0.2:50052")

    assert refusal.final
    assert "another token" in str(refusal)
    assert "check --token" in str(refusal)


def test_a_disconnect_before_any_answer_names_likely_causes() -> None:
    for token, expected in ((None, "with a token"), ("long enough", "without a token")):
        end = client(node("node-b", token)).open()

        end.hang_up()

        assert expected in end.why


def test_a_silent_server_times_out_after_ten_seconds() -> None:
    end = client(node("node-a")).open()
    assert end.handshake.deadline == 10.0

    end.handshake.tick(9.9)
    assert not end.why
    end.wait()

    assert "did not answer within 10 s" in end.why
