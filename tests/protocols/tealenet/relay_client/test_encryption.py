"""The encrypted channel, compared with recordings of real peers."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import PeerError
from shoal.ledger.keys import Signer
from shoal.protocols.seam.noise import (
    Opener,
    Sealer,
    TransportKeys,
    hkdf,
)
from shoal.protocols.tealenet.relay_client.encryption import (
    WINDOW,
    ReplayWindow,
    TealeInitiator,
    TealePackets,
    TealeResponder,
    _hashed_secret,
    time_payload,
)

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "tealenet.json").read_text()
)
CASES: dict[str, dict[str, Any]] = {
    case["id"].removeprefix("noise/"): case
    for case in VECTORS["cases"]
    if case["group"] == "noise"
}
ANNE, BELA = Signer.from_seed(b"a" * 32), Signer.from_seed(b"b" * 32)
PAYLOAD = time_payload(1_795_000_000.25)


def value(case: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(case[name])


def responder_of(case: dict[str, Any]) -> TealeResponder:
    local = Signer.from_seed(value(case, "responder_static"))
    return TealeResponder(local, value(case, "message1"))


def receiving(case: dict[str, Any]) -> TealePackets:
    key = value(case, "receive_key")
    return TealePackets(TransportKeys(Sealer(bytes(32)), Opener(key), b""))


@pytest.mark.parametrize("name", ["hkdf_blake2s", "hkdf_blake2s_empty_ikm"])
def test_derived_keys_match_real_peers(name: str) -> None:
    case = CASES[name]

    derived = hkdf(value(case, "chaining_key"), value(case, "ikm"))

    assert [each.hex() for each in derived] == case["outputs"][:2]


def test_shared_secrets_are_hashed_once_more() -> None:
    case = CASES["dh_is_hkdf_sha256_of_x25519"]
    local = Signer.from_seed(value(case, "private"))

    assert local.exchange(value(case, "public")) == value(case, "x25519")
    assert _hashed_secret(local.exchange, value(case, "public")) == value(case, "dh")


@pytest.mark.parametrize("name", ["handshake_1", "handshake_2"])
def test_handshakes_match_the_recordings(name: str) -> None:
    case = CASES[name]
    local, peer = (
        Signer.from_seed(value(case, f"{end}_static"))
        for end in ("initiator", "responder")
    )
    initiator = TealeInitiator(
        local, peer.exchange_key, lambda _: value(case, "initiator_ephemeral")
    )

    first = initiator.write_first(value(case, "payload1"))
    responder = TealeResponder(peer, first)
    second, responder_keys = responder.write_second(
        lambda _: value(case, "responder_ephemeral"), value(case, "payload2")
    )
    initiator_keys = initiator.read_second(second)

    assert (first, second) == (value(case, "message1"), value(case, "message2"))
    assert responder.peer_key == value(case, "initiator_static_public")
    assert initiator_keys.hash == responder_keys.hash == value(case, "handshake_hash")
    sealed = initiator_keys.sealer.seal(b"x")
    assert sealed == Sealer(value(case, "initiator_send_key")).seal(b"x")
    answer = responder_keys.sealer.seal(b"y")
    assert answer == Sealer(value(case, "initiator_receive_key")).seal(b"y")


def test_a_first_message_without_a_time_is_answered() -> None:
    case = CASES["empty_payload_message1_is_accepted"]

    second, secrets = responder_of(case).write_second(
        lambda _: value(case, "responder_ephemeral"), value(case, "payload2")
    )

    assert second == value(case, "message2")
    sealed = Sealer(value(case, "initiator_send_key")).seal(b"x")
    assert secrets.opener.open(*sealed) == b"x"


def test_a_first_message_without_a_payload_is_accepted() -> None:
    case = CASES["empty_payload_message1_is_accepted"]
    local = Signer.from_seed(value(case, "responder_static"))
    initiator = Signer.from_seed(value(case, "initiator_static"))

    responder = TealeResponder(local, value(case, "message1")[:80])

    assert responder.peer_key == initiator.exchange_key


@pytest.mark.parametrize(
    "name",
    [
        "tampered_message1",
        "wrong_responder",
        "message1_31_bytes",
        "message1_32_bytes",
        "message1_60_bytes",
        "message1_79_bytes",
        "message1_81_bytes",
    ],
)
def test_recorded_bad_first_messages_are_refused(name: str) -> None:
    with pytest.raises(PeerError):
        responder_of(CASES[name])


def test_a_truncated_first_message_is_refused(subtests: pytest.Subtests) -> None:
    for size in [*range(80), *range(81, 96), *range(97, 108)]:
        with subtests.test(size=size):
            first = TealeInitiator(
                ANNE, BELA.exchange_key, constant_bytes(1)
            ).write_first(PAYLOAD)

            with pytest.raises(PeerError):
                TealeResponder(BELA, first[:size])


def test_a_truncated_second_message_is_refused(
    subtests: pytest.Subtests,
) -> None:
    for size in range(60):
        with subtests.test(size=size):
            initiator = TealeInitiator(ANNE, BELA.exchange_key, constant_bytes(1))
            responder = TealeResponder(BELA, initiator.write_first(PAYLOAD))
            second, _ = responder.write_second(constant_bytes(2), PAYLOAD)

            with pytest.raises(PeerError):
                initiator.read_second(second[:size])
            assert initiator.read_second(second).hash


@pytest.mark.parametrize("number", range(12))
def test_packets_are_accepted_as_recorded(number: int) -> None:
    case = CASES["replay_window"]
    packets = receiving(case)

    accepted = [
        packets.open(bytes.fromhex(each["packet"])) is not None
        for each in case["packets"][: number + 1]
    ]

    assert accepted == [each["accepted"] for each in case["packets"][: number + 1]]
    assert case["window"] == WINDOW


@pytest.mark.parametrize(
    "name", ["transport_tampered_tag", "transport_tampered_counter", "transport_short"]
)
def test_recorded_bad_packets_are_not_opened(name: str) -> None:
    case = CASES[name]

    assert receiving(case).open(value(case, "packet")) is None


def test_a_packet_is_the_counter_and_the_ciphertext() -> None:
    case = CASES["relayData_carries_counter_then_ciphertext"]
    sealer = Sealer(value(case, "key"))
    packets = TealePackets(TransportKeys(sealer, Opener(bytes(32)), b""))
    for _ in range(case["counter"]):
        packets.seal(b"before")

    packet = packets.seal(case["plaintext_utf8"].encode())

    assert packet == value(case, "packet")
    assert base64.b64encode(packet).decode() == case["relay_data_base64"]


def test_a_forged_packet_does_not_use_up_its_counter() -> None:
    packets = TealePackets(TransportKeys(Sealer(bytes(32)), Opener(bytes(32)), b""))
    packet = packets.seal(b"text")

    assert packets.open(packet[:8] + bytes(20)) is None
    assert packets.open(b"\xff" * 8 + bytes(20)) is None
    assert packets.open(packet) == b"text"


@given(st.lists(st.integers(0, 3 * WINDOW) | st.integers(0, 2**64 - 1)))
def test_counters_are_accepted_once_within_the_window(
    counters: list[int],
) -> None:
    window, seen, highest = ReplayWindow(), set[int](), -1

    for counter in counters:
        expected = counter not in seen and highest - counter < WINDOW
        assert window.accepts(counter) == expected
        if expected:
            window.mark(counter)
            seen.add(counter)
            highest = max(highest, counter)


def test_times_are_written_in_seconds_and_nanoseconds() -> None:
    assert time_payload(1.5).hex() == "0000000000000001" + "1dcd6500"


def constant_bytes(number: int) -> Any:
    """Return a source of constant bytes."""
    return lambda size: bytes([number]) * size
