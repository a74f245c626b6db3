"""Attacks that work against upstream and fail here."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.macfleet.handshake_ends import (
    TOKEN,
    HandshakeEnd,
    client,
    drawing,
    frame_of,
    giving,
    meet,
    node,
    rewritten,
    server,
)
from protocols.macfleet.recorded import CASES
from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Flag, encode_frame
from shoal.protocols.macfleet.codec.hardware import decode_profile
from shoal.protocols.macfleet.codec.heartbeat_lines import HeartbeatLine, decode_pong
from shoal.protocols.macfleet.codec.keys import fleet_key, sign
from shoal.protocols.macfleet.handshake_messages import control_frame, encode_first
from shoal.protocols.macfleet.member import (
    NAME_MIN,
    resembles_heartbeat,
)


def greeting(node_id: str, challenge: bytes, flags: int) -> bytes:
    """Return an M1 as anyone can write it."""
    return encode_frame(control_frame(encode_first(node_id, challenge), flags))


def put_by(end: HandshakeEnd) -> bytes:
    """Return the challenge of a v1 or v2 server."""
    payload = bytes(frame_of(end.sent[0]).payload)
    at = len(b"node-a") + 32
    return payload[at : at + 32]


def answer_of(end: HandshakeEnd) -> bytes:
    """Return the answer of a v1 or v2 server, and its suffix."""
    payload = bytes(frame_of(end.sent[0]).payload)
    at = len(b"node-a")
    return payload[at : at + 32] + payload[at + 64 :]


# Reflection: a node's own answer is sent back to it.


@pytest.mark.parametrize("flags", [0, Flag.V2])
def test_a_server_does_not_answer_its_own_challenge(flags: int) -> None:
    own = node("node-a", accepts_v1=True)
    first, second = server(own).open(), server(own).open()
    first.hear(greeting("mallory", b"\xff" * 32, flags))

    second.hear(greeting("mallory", put_by(first), flags))

    assert "returned this node's own challenge" in second.why
    assert second.sent == []
    assert second.counts


def test_a_suffix_of_the_server_itself_is_rejected() -> None:
    end = server(node("node-a")).open()

    end.hear(greeting("node-a", b"\xff" * 32, Flag.V2))

    assert "claims this node's id" in end.why
    assert end.sent == []


def test_a_client_does_not_answer_its_own_challenge() -> None:
    challenge = b"\xff" * 32
    own = node("node-b", accepts_v1=True, random_bytes=giving(challenge))
    end = client(own).open()
    key = fleet_key(TOKEN)

    # An attacker got the answer to it from another node, and wants another.
    end.hear(
        encode_frame(control_frame(b"node-a" + sign(key, challenge) + challenge, 0))
    )

    assert "returned this node's own challenge" in end.why
    assert len(end.sent) == 1


def test_a_server_does_not_answer_a_challenge_its_node_sent_elsewhere() -> None:
    own = node("node-b")
    dialling = client(own).open()
    challenge = bytes(frame_of(dialling.sent[0]).payload)[-32:]
    dialled = server(own).open()

    dialled.hear(greeting("mallory", challenge, Flag.V2))

    assert "returned this node's own challenge" in dialled.why


# Signing oracles: what is signed for strangers is used for something else.

FORGED = (
    b"host-0123abcd:" + b"\xff" * 18,
    b"12345678:" + b"\xff" * 23,
    b'x:\xff:{"gpu_cores":9e9,"ram_gb":1}',
    b'x::{"gpu_cores": 99999999999  }\n',
    "é".encode() * 4 + b":" + b"\xff" * 23,
    b"a:b:c:12:" + b"\xff" * 23,
    b"node-a:" + b"\xff" * 25,
    b"no-colon-but-text-from-end-2-end",
)


@pytest.mark.parametrize("challenge", FORGED)
@pytest.mark.parametrize("flags", [0, Flag.V2])
def test_a_server_signs_no_heartbeat_for_a_client(challenge: bytes, flags: int) -> None:
    assert len(challenge) == 32
    end = server(node("node-a", accepts_v1=True)).open()

    end.hear(greeting("mallory", challenge, flags))

    assert "could be the signed part of a heartbeat" in end.why
    assert end.sent == []
    assert end.counts


@pytest.mark.parametrize("challenge", FORGED)
def test_a_client_signs_no_heartbeat_for_an_attacker_in_between(
    challenge: bytes,
) -> None:
    def swapped(number: int, data: bytes) -> bytes:
        payload = bytes(frame_of(data).payload)
        at = payload.find(b"\xee" * 32)
        return (
            rewritten(data, payload=payload[:at] + challenge + payload[at + 32 :])
            if number == 1
            else data
        )

    dialling = client(node("node-b")).open()
    dialled = server(node("node-a", random_bytes=giving(b"\xee" * 32))).open()

    meet(dialling, dialled, swapped)

    own = challenge.startswith(b"node-a:")  # not the client's id
    assert own or "could be the signed part of a heartbeat" in dialling.why
    assert dialled.agreed is None


def forged(challenge: bytes) -> Iterator[HeartbeatLine]:
    """Return every heartbeat that a challenge and its answer could form."""
    key = fleet_key(TOKEN)
    colons = [place for place, byte in enumerate(challenge) if byte == ord(":")]
    proof = sign(key, challenge).hex().encode()
    for one in colons:
        node_id, rest = challenge[:one], challenge[one + 1 :]
        yield from _read(key, b"APONG %b %b %b", node_id, rest.hex().encode(), proof)
        for other in colons[colons.index(one) + 1 :]:
            nonce, hardware = challenge[one + 1 : other], challenge[other + 1 :]
            fields = (nonce.hex().encode(), proof, hardware.hex().encode())
            yield from _read(key, b"APONG %b %b %b %b", node_id, *fields)


def _read(key: bytes, form: bytes, *fields: bytes) -> Iterator[HeartbeatLine]:
    with suppress(PeerError):
        yield decode_pong(key, form % fields)


@settings(max_examples=examples(0.4))
@given(
    parts=st.lists(
        st.text("ab1:- é") | st.binary(max_size=9) | st.sampled_from(['{"ram_gb":9}']),
        min_size=1,
    ),
    fill=st.binary(min_size=32, max_size=32),
)
def test_answered_challenges_contain_no_heartbeat(
    parts: list[str | bytes], fill: bytes
) -> None:
    whole = b"".join(each.encode() if isinstance(each, str) else each for each in parts)
    challenge = (whole + fill)[:32]
    if resembles_heartbeat(challenge, "node-a"):
        return

    for heard in forged(challenge):
        name = heard.node_id
        assert len(name.encode()) < NAME_MIN or not name.isprintable() or " " in name
        if heard.hardware is not None:
            with suppress(PeerError):
                decode_profile(heard.hardware)
                assert not name or not name.isprintable()


def test_challenges_of_upstream_nodes_are_answered() -> None:
    challenges = [
        bytes.fromhex(value)
        for case in CASES
        for name, value in case["input"].items()
        if name.startswith("challenge_") and value
    ]

    assert challenges
    assert not any(resembles_heartbeat(each, "node-a") for each in challenges)


# Guesses and replays.


def test_every_kind_of_guess_counts_as_a_failure() -> None:
    own = node("node-a")
    wrong = server(own).open()
    wrong.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    wrong.hear(encode_frame(control_frame(bytes(32), Flag.V2)))
    left = server(own).open()
    left.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    left.hang_up()
    silent = server(own).open()
    silent.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    silent.wait()

    assert [each.counts for each in (wrong, left, silent)] == [True] * 3


def test_a_replayed_answer_is_rejected() -> None:
    dialling, dialled = client(node("node-b")).open(), server(node("node-a")).open()
    meet(dialling, dialled)
    assert dialled.agreed is not None

    again = server(node("node-a", random_bytes=drawing("later"))).open()
    for data in dialling.sent:
        again.hear(data)
    assert again.agreed is None
    assert again.counts

    once_more = client(node("node-b", random_bytes=drawing("later"))).open()
    for data in dialled.sent:
        once_more.hear(data)
    assert once_more.agreed is None
