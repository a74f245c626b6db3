"""Hardware profiles of nodes."""

import json
from typing import Any

import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import (
    CHIP_NAME_MAX,
    HARDWARE_MAX,
    HardwareProfile,
    decode_profile,
    encode_profile,
)

# Upstream keeps these values, and they break its elections or win them.
IMPOSSIBLE = {"hwparse/wrong types kept", "hwparse/infinity"}


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

    if "error" in case["expect"]:
        with pytest.raises(PeerError, match="hardware profile"):
            decode_profile(data)
    elif case["name"] in IMPOSSIBLE:
        assert decode_profile(data) != profile_of(case["expect"]["accepted"])
    else:
        assert decode_profile(data) == profile_of(case["expect"]["accepted"])


@pytest.mark.parametrize(
    "text",
    [
        '{"gpu_cores": -1}',
        '{"gpu_cores": 1e999}',
        '{"gpu_cores": 8.5}',
        '{"gpu_cores": "many"}',
        '{"ram_gb": 1e999}',
        '{"ram_gb": Infinity}',
        '{"ram_gb": -0.1}',
        '{"ram_gb": 1e10}',
        '{"memory_bandwidth_gbps": NaN}',
        '{"memory_bandwidth_gbps": 2e9}',
        '{"gpu_cores": true}',
        '{"has_ane": 2}',
        '{"chip_name": null}',
        '{"chip_name": 7}',
        '{"data_port": null}',
        '{"gpu_cores": ' + "9" * 400 + "}",
    ],
)
def test_an_impossible_hardware_value_counts_as_absent(text: str) -> None:
    assert decode_profile(text.encode()) == HardwareProfile()


def test_numbers_of_another_type_are_read() -> None:
    profile = decode_profile(
        b'{"gpu_cores": 8.0, "ram_gb": "16", "has_ane": 1, "data_port": "50052"}'
    )

    assert profile == HardwareProfile(
        gpu_cores=8, ram_gb=16.0, has_ane=True, data_port=50052
    )


@pytest.mark.parametrize(
    "text", ['{"gpu_cores": ' + "9" * 5000 + "}", '{"x": ' + "[" * 4000, "5", "[]"]
)
def test_what_is_no_object_of_json_is_rejected(text: str) -> None:
    with pytest.raises(PeerError, match="hardware profile"):
        decode_profile(text.encode())


def test_half_a_character_in_a_chip_name_is_replaced() -> None:
    assert decode_profile(b'{"chip_name": "M\\ud83d"}').chip == "M\ufffd"


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
