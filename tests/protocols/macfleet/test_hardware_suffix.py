"""Hardware suffixes of handshake messages."""

from dataclasses import replace

import pytest

from protocols.macfleet.codec.test_hardware import profile_of
from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake_messages import decode_suffix, encode_suffix

REASONS = {
    "peel/wrong challenge": "not signed",
    "peel/wrong id": "not signed",
    "peel/wrong token": "not signed",
    "peel/flipped hmac bit": "not signed",
    "peel/flipped json bit": "not signed",
    "peel/1 byte": "has no hardware",
    "peel/block size zero": "of 0 bytes is invalid",
    "peel/block size 34": "of 34 bytes is invalid",
    "peel/block size past start": "of 100 bytes is invalid",
    "peel/block size over limit": "of 8228 bytes is invalid",
    "peel/hw_len mismatch": "hardware of 1 bytes in a suffix of 232",
    "peel/empty json": "hardware profile",
    "peel/json list": "hardware profile",
}


@recorded("hw_suffix")
def test_suffixes_are_encoded_as_upstream_does(case: Case) -> None:
    said = case["input"]

    written = encode_suffix(
        fleet_key(said["token"], said["fleet_id"] or ""),
        bytes.fromhex(said["peer_challenge_hex"]),
        said["node_id"],
        bytes.fromhex(said["hw_json_hex"]),
        said["wire_version"],
    )

    assert written.hex() == case["expect"]["suffix_hex"]


@recorded("hw_suffix_peel")
def test_suffixes_are_decoded_as_upstream_does(case: Case) -> None:
    said = case["input"]
    given = (
        fleet_key(said["token"]),
        bytes.fromhex(said["sent_challenge_hex"]),
        said["peer_id"],
        bytes.fromhex(said["payload_hex"]),
    )

    if "error" in case["expect"]:
        with pytest.raises(PeerError, match=REASONS[case["name"]]):
            decode_suffix(*given)
    else:
        accepted = case["expect"]["accepted"]
        peeled = decode_suffix(*given)
        assert peeled.message.hex() == accepted["base_hex"]
        expected = profile_of(accepted["hw"])
        if "header version 7" in case["name"]:  # upstream keeps the version of the JSON
            expected = replace(expected, wire_version=7)
        assert peeled.hardware == expected


def test_short_messages_are_rejected(subtests: pytest.Subtests) -> None:
    for size in range(40):
        with subtests.test(size=size), pytest.raises(PeerError):
            decode_suffix(bytes(32), bytes(32), "n", b"\0" * size)


def test_a_suffix_may_be_all_of_a_message() -> None:
    key, challenge = fleet_key("a-fleet-token-0001"), bytes(32)
    hardware = encode_profile(HardwareProfile(chip="m2"))

    suffix = encode_suffix(key, challenge, "n", hardware)

    peeled = decode_suffix(key, challenge, "n", suffix)
    assert peeled.hardware.chip == "m2"
    assert peeled[0] == b""
