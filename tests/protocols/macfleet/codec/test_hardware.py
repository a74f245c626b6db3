"""Hardware profiles of nodes."""

import json
from typing import Any

import pytest

from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import (
    CHIP_NAME_MAX,
    HARDWARE_MAX,
    HardwareProfile,
    decode_profile,
    encode_profile,
)

# Upstream accepts these, and they break its elections or win them.
TIGHTENED = {
    "hwparse/wrong types kept": "Expected `int`, got `str`",
    "hwparse/infinity": "invalid character",
}


def profile_of(fields: dict[str, Any]) -> HardwareProfile:
    names = {
        "chip_name": "chip",
        "memory_bandwidth_gbps": "bandwidth_gbps",
        "mps_available": "mps",
        "mlx_available": "mlx",
    }
    return HardwareProfile(
        **{names.get(name, name): value for name, value in fields.items()}
    )


@recorded("hw_json")
def test_profiles_are_encoded_as_upstream_does(case: Case) -> None:
    written = encode_profile(profile_of(case["input"]))

    assert written.decode() == case["expect"]["json_text"]
    assert written.hex() == case["expect"]["json_hex"]


@recorded("hw_json_parse")
def test_profiles_are_decoded_as_upstream_does(case: Case) -> None:
    data = bytes.fromhex(case["input"]["json_hex"])

    if "error" in case["expect"] or case["name"] in TIGHTENED:
        with pytest.raises(PeerError, match=TIGHTENED.get(case["name"], "profile")):
            decode_profile(data)
    else:
        assert decode_profile(data) == profile_of(case["expect"]["accepted"])


@pytest.mark.parametrize("name", TIGHTENED)
def test_stricter_cases_were_accepted_by_upstream(name: str) -> None:
    assert "accepted" in case_of(name)["expect"]


@pytest.mark.parametrize(
    "text",
    [
        '{"gpu_cores": -1}',
        '{"gpu_cores": 1e999}',
        '{"ram_gb": 1e999}',
        '{"ram_gb": -0.1}',
        '{"ram_gb": 1e10}',
        '{"memory_bandwidth_gbps": NaN}',
        '{"memory_bandwidth_gbps": 2e9}',
        '{"gpu_cores": true}',
        '{"has_ane": 1}',
        '{"chip_name": null}',
        '{"data_port": "50052"}',
        '{"gpu_cores": ' + "9" * 400 + "}",
        '{"gpu_cores": ' + "9" * 5000 + "}",
        '{"x": ' + "[" * 4000,
    ],
)
def test_impossible_hardware_values_are_rejected(text: str) -> None:
    with pytest.raises(PeerError, match="hardware profile"):
        decode_profile(text.encode())


@pytest.mark.parametrize(
    ("said", "taken"), [(0, 0), (-1, 0), (65535, 65535), (65536, 0)]
)
def test_an_invalid_port_counts_as_none(said: int, taken: int) -> None:
    assert decode_profile(json.dumps({"data_port": said}).encode()).data_port == taken


def test_integers_are_valid_sizes() -> None:
    assert decode_profile(b'{"ram_gb": 16}').ram_gb == 16.0


def test_a_long_chip_name_is_cut() -> None:
    profile = decode_profile(json.dumps({"chip_name": "x" * 500}).encode())

    assert profile.chip == "x" * CHIP_NAME_MAX


def test_a_profile_too_large_for_upstream_is_rejected() -> None:
    decode_profile(b"{}".ljust(HARDWARE_MAX))

    with pytest.raises(LimitExceeded):
        decode_profile(b"{}".ljust(HARDWARE_MAX + 1))
