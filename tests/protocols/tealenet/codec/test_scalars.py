import math

import pytest

from protocols.tealenet.recordings import Case, recorded
from shoal.domain.errors import PeerError
from shoal.domain.worker import ThermalLevel
from shoal.protocols.tealenet.codec.messages import InferenceError
from shoal.protocols.tealenet.codec.scalars import (
    encode_json,
    normalized_id,
    passcode_hash,
    thermal_level,
    to_date,
    wire_name,
)


@recorded("dates")
def test_dates_count_from_2001(case: Case) -> None:
    assert math.isclose(to_date(case["unix_seconds"]), case["reference_seconds"])


@recorded("passcode_hash")
def test_passcode_hashes_match_macs(case: Case) -> None:
    assert passcode_hash(case["passcode"]) == case["hash"]


def test_a_passcode_with_a_lone_surrogate_has_a_hash() -> None:
    assert passcode_hash("\ud800") == passcode_hash("\ufffd")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("request_id", "requestID"),
        ("owner_user_id", "ownerUserID"),
        ("total_ram_gb", "totalRAMGB"),
        ("gpu_vram_gb", "gpuVRAMGB"),
        ("memory_bandwidth_gbs", "memoryBandwidthGBs"),
        ("load_time_ms", "loadTimeMs"),
        ("is_last_chunk", "isLastChunk"),
        ("data", "data"),
    ],
)
def test_fields_have_the_names_of_the_wire(field: str, name: str) -> None:
    assert wire_name(field) == name


def test_ids_are_compared_without_case() -> None:
    lower = "550e8400-e29b-41d4-a716-446655440000"

    assert normalized_id(lower) == normalized_id(lower.upper())


def test_an_unknown_thermal_level_counts_as_fair() -> None:
    assert thermal_level("critical") is ThermalLevel.CRITICAL
    assert thermal_level("hot") is ThermalLevel.FAIR


def test_lone_surrogates_are_replaced_everywhere() -> None:
    error = InferenceError("\udc00id", "a\ud800b")

    assert (
        encode_json(error)
        == '{"requestID":"\ufffdid","errorMessage":"a\ufffdb"}'.encode()
    )
    assert (
        encode_json({"\ud800": [("\ud800", 2.5)]})
        == '{"\ufffd":[["\ufffd",2.5]]}'.encode()
    )


def test_deeply_nested_values_are_refused() -> None:
    nested: list[object] = []
    for _ in range(200_000):  # deeper than any Python's limit
        nested = [nested]

    with pytest.raises(PeerError, match="nested too deeply"):
        encode_json(nested)
