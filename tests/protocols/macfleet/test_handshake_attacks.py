"""Attacks that work against upstream (v1 and v2 cannot prevent them) and fail here."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples, some_long
from protocols.macfleet.handshake_ends import (
    ANNE,
    AS_ORIGINALS,
    BELA,
    TOKEN,
    UNTIL_V1,
    HandshakeEnd,
    client,
    drawing,
    flipped,
    frame_of,
    giving,
    joining,
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
from shoal.protocols.macfleet.handshake import (
    CHALLENGE_MARK,
    NAME_MIN,
    HandshakeSettings,
    HandshakeStrength,
    resembles_heartbeat,
)
from shoal.protocols.macfleet.handshake_messages import control_frame, encode_first
from shoal.protocols.macfleet.strong_handshake import (
    HandshakeRole,
    Transcript,
    decide,
    introduce,
    seal,
)

MIDDLE = b"m" * 32  # the fingerprint of an attacker's certificate
BEFORE_M3 = 2  # messages


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
@pytest.mark.parametrize("accepts", [AS_ORIGINALS, UNTIL_V1])
def test_a_server_does_not_answer_its_own_challenge(
    flags: int, accepts: frozenset[HandshakeStrength]
) -> None:
    own = node("node-a", accepts=accepts)
    first, second = server(own).open(), server(own).open()
    first.hear(greeting("mallory", b"\xff" * 32, flags))

    second.hear(greeting("mallory", put_by(first), flags))

    assert "returned this node's own challenge" in second.why
    assert second.sent == []
    assert second.counts


def test_a_server_recognises_its_challenges_by_their_mark() -> None:
    first = server(node("node-a")).open()
    first.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    second = server(node("node-a")).open()

    second.hear(greeting("mallory", put_by(first), Flag.V2))

    assert second.sent == []
    assert second.counts


def test_a_suffix_of_the_server_itself_is_rejected() -> None:
    own = node("node-a", accepts=AS_ORIGINALS)
    end = server(own).open()

    end.hear(greeting("node-a", b"\xff" * 32, Flag.V2))

    assert "claims this node's id" in end.why
    assert end.sent == []


def test_a_client_does_not_answer_its_own_challenge() -> None:
    challenge = b"\xff" * 32
    own = node(
        "node-b",
        accepts=UNTIL_V1 - {HandshakeStrength.STRONG},
        random_bytes=giving(challenge),
    )
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


# Relays: another node's answer is passed on.


@pytest.mark.parametrize("flags", [0, Flag.V2])
def test_shoal_nodes_do_not_answer_each_others_challenges(flags: int) -> None:
    asked = server(node("node-a", accepts=UNTIL_V1)).open()
    asked.hear(greeting("node-c", b"\xff" * 32, flags))

    oracle = server(node("node-c", accepts=UNTIL_V1)).open()
    oracle.hear(greeting("mallory", put_by(asked), flags))

    assert "may have removed the offer" in oracle.why
    assert oracle.sent == []


def test_a_proof_is_bound_to_the_certificate() -> None:
    dialling = client(node("node-b", identity=BELA)).open(MIDDLE)
    dialled = server(node("node-a", identity=ANNE)).open()

    meet(dialling, dialled)

    assert dialled.agreed is None
    assert dialling.agreed is None


def test_a_token_proof_is_bound_to_the_certificate() -> None:
    dialling, dialled = client(node("node-b")).open(MIDDLE), server(node("node-a"))

    meet(dialling, dialled.open())

    assert "Invalid token" in dialled.why
    assert dialled.counts


def test_a_signature_is_bound_to_the_certificate() -> None:
    dialling = client(node("node-b", None, identity=BELA)).open(MIDDLE)
    dialled = server(node("node-a", None)).open()

    meet(dialling, dialled)

    assert "has not proved that it has the public key it sent" in dialled.why


# Downgrades: an attacker in between removes the strong handshake's offer.


def without_offer(number: int, data: bytes) -> bytes:
    return rewritten(data, frame_of(data).flags & ~Flag.STRONG)


def without_flags(number: int, data: bytes) -> bytes:
    return rewritten(data, 0)


@pytest.mark.parametrize("alter", [without_offer, without_flags])
@pytest.mark.parametrize("accepts", [UNTIL_V1, UNTIL_V1 - {HandshakeStrength.V1}])
def test_a_removed_offer_is_detected_by_the_server(
    alter: object, accepts: frozenset[HandshakeStrength]
) -> None:
    dialling = client(node("node-b", accepts=accepts)).open()
    dialled = server(node("node-a", accepts=accepts)).open()

    meet(dialling, dialled, alter)  # type: ignore[arg-type]  # an Alter

    assert dialled.agreed is None
    assert dialling.agreed is None
    assert dialled.sent == []


def test_a_removed_offer_is_detected_by_the_client() -> None:
    """A Shoal server takes its client for an upstream one."""
    dialling = client(node("node-b")).open()
    dialled = server(
        node("node-a", accepts=AS_ORIGINALS, random_bytes=_marked())
    ).open()

    meet(dialling, dialled)

    assert "did not accept the offer" in dialling.why
    assert len(dialling.sent) == 1


def _marked() -> object:
    return giving(b"\xff" * 24 + CHALLENGE_MARK)


def test_upstream_nodes_still_use_v2() -> None:
    for one, other in (
        (node("node-b"), node("node-a", accepts=AS_ORIGINALS)),
        (node("node-b", accepts=AS_ORIGINALS), node("node-a")),
    ):
        dialling, dialled = client(one).open(), server(other).open()

        meet(dialling, dialled)

        assert dialling.agreed is not None
        assert dialling.agreed.strength is HandshakeStrength.V2
        assert dialled.agreed is not None
        assert dialled.agreed.strength is HandshakeStrength.V2


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
    end = server(node("node-a", accepts=UNTIL_V1)).open()

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

    dialling = client(node("node-b", accepts=AS_ORIGINALS)).open()
    dialled = server(
        node("node-a", accepts=AS_ORIGINALS, random_bytes=giving(b"\xee" * 32))
    ).open()

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


# Guessing tokens, offline and online.


def strong_said(own: HandshakeSettings, said: Sequence[bytes]) -> list[bytes]:
    """Return a server's messages to a stranger that offers the strong handshake."""
    end = server(own).open()
    for data in said:
        end.hear(data)
    return end.sent


def test_a_stranger_receives_nothing_to_test_tokens_against() -> None:
    stranger = client(node("mallory", "a wrong guess")).open()
    meet(stranger, server(node("node-a", random_bytes=drawing("same"))).open())
    assert len(stranger.sent) == BEFORE_M3

    one, other = (
        strong_said(node("node-a", token, random_bytes=drawing("same")), stranger.sent)
        for token in ("one token", "other token")
    )

    assert one == other
    assert len(one) == 2  # the second refuses the token


def test_every_kind_of_guess_counts_as_a_failure() -> None:
    own = node("node-a")
    wrong = client(node("mallory", "a wrong guess")).open()
    strong = server(own).open()
    meet(wrong, strong)
    left = server(own).open()
    left.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    left.hang_up()
    silent = server(own).open()
    silent.hear(greeting("mallory", b"\xff" * 32, Flag.V2))
    silent.wait()

    assert [each.counts for each in (strong, left, silent)] == [True] * 3


# Replays, and proofs over something else.


def test_a_replayed_proof_is_rejected() -> None:
    dialling, dialled = client(node("node-b")).open(), server(node("node-a")).open()
    meet(dialling, dialled)
    assert dialled.agreed is not None
    again = server(node("node-a", random_bytes=drawing("later"))).open()

    for data in dialling.sent:
        again.hear(data)

    assert again.agreed is None
    assert again.counts


def test_a_replayed_answer_is_rejected() -> None:
    dialling, dialled = client(node("node-b")).open(), server(node("node-a")).open()
    meet(dialling, dialled)
    again = client(node("node-b", random_bytes=drawing("later"))).open()

    for data in dialled.sent:
        again.hear(data)

    assert again.agreed is None


def test_a_client_proof_is_not_a_server_proof() -> None:
    dialling, dialled = client(node("node-b")).open(), server(node("node-a")).open()
    dialled.hear(dialling.sent[0])
    dialling.hear(dialled.sent[0])

    dialling.hear(dialling.sent[1])

    assert dialling.agreed is None


def test_a_server_must_prove_the_token() -> None:
    impostor = replace(node("node-a"), digest=b"", identity=ANNE)
    dialling = client(joining("w", TOKEN), ours=True).open()
    second = control_frame(encode_first("node-a", b"\xff" * 32), Flag.STRONG)
    dialling.hear(encode_frame(second))
    transcript = Transcript(bytes(range(32)))
    for frame in (frame_of(dialling.sent[0]), second, frame_of(dialling.sent[1])):
        transcript.add(frame)

    sealed = seal(decide(impostor), impostor, HandshakeRole.SERVER, transcript, b"")
    dialling.hear(encode_frame(control_frame(sealed, Flag.STRONG)))

    assert "has not proved that it has the token" in dialling.why


def test_a_server_refuses_its_own_id() -> None:
    """Without TLS, a node's outgoing connection could be joined to its incoming one."""
    own = node("node-a")
    dialled = server(own).open(b"")
    first = control_frame(encode_first("node-a", b"\xff" * 32), Flag.V2 | Flag.STRONG)
    dialled.hear(encode_frame(first))
    transcript = Transcript(b"")
    for frame in (first, frame_of(dialled.sent[0])):
        transcript.add(frame)

    sealed = seal(introduce(own), own, HandshakeRole.CLIENT, transcript, own.digest)
    dialled.hear(encode_frame(control_frame(sealed, Flag.STRONG)))

    assert "the server has the same id" in dialled.why


def test_an_unproved_key_is_rejected() -> None:
    class Borrowed:
        public_key = ANNE.public_key
        exchange_key = ANNE.exchange_key
        sign = staticmethod(BELA.sign)
        exchange = staticmethod(BELA.exchange)

    for one, other in (
        (node("node-b", identity=Borrowed()), node("node-a")),
        (node("node-b"), node("node-a", identity=Borrowed())),
    ):
        dialling, dialled = client(one).open(), server(other).open()

        meet(dialling, dialled)

        assert dialling.agreed is None


# One flipped bit.


@pytest.mark.parametrize(
    "bits", some_long([1, 8], short=1), ids=["some bits", "all bits"]
)
@pytest.mark.parametrize("number", range(4))
def test_one_flipped_bit_in_any_message_is_detected(number: int, bits: int) -> None:
    """In an attack, the checksums are valid."""
    plain = meet(*_pair())[number]
    for changed in flipped(plain, bits):
        dialling, dialled = _pair()

        carried = meet(
            dialling,
            dialled,
            lambda at, data, changed=changed: changed if at == number else data,  # type: ignore[misc]  # bound for each
        )

        assert carried[number] == plain
        assert dialling.agreed is None
        assert dialled.agreed is None or number == 3


def _pair() -> tuple[HandshakeEnd, HandshakeEnd]:
    dialling = client(node("node-b", identity=BELA, profile=b"{}")).open()
    return dialling, server(node("node-a", identity=ANNE, profile=b"{}")).open()
