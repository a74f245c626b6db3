import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.profiles import examples
from protocols.tealenet.recordings import Case, case_of, recorded
from shoal.domain.worker import UNKNOWN_HARDWARE, Hardware
from shoal.protocols.tealenet.codec.envelope import decode, encode
from shoal.protocols.tealenet.codec.hardware import (
    DeviceInfo,
    HardwareInfo,
    NodeCapabilities,
    device_info,
    hardware_info,
    largest_model_gb,
    node_capabilities,
)
from shoal.protocols.tealenet.codec.messages import Hello

RTX = Hardware(
    chip="NVIDIA RTX 4090",
    chip_family="nvidiaGPU",
    memory_gb=64.0,
    gpu_cores=16384,
    bandwidth_gb=1008.0,
    tier=1,
    gpu_backend="cuda",
    platform="linux",
    gpu_memory_gb=24.0,
)

sizes = st.floats(0, 1e6, allow_nan=False)
labels = st.text(min_size=1, max_size=64)
machines = st.builds(
    Hardware,
    chip=labels,
    chip_family=labels,
    memory_gb=sizes,
    gpu_cores=st.integers(0, 10**6),
    bandwidth_gb=sizes,
    tier=st.integers(1, 4),
    gpu_backend=st.text(max_size=64),
    platform=st.text(max_size=64),
    gpu_memory_gb=st.none() | sizes,
)


@recorded("node_capabilities")
def test_capabilities_are_read_as_by_one_of_the_originals(case: Case) -> None:
    """Macs and Rust peers refuse each other's ``ptnIDs``; Shoal ignores them."""
    read = msgspec.json.decode(case["json_text"], type=NodeCapabilities)

    accepting = [case[each] for each in ("rust", "swift") if case[each]["accepts"]]
    written = json.loads(msgspec.json.encode(read))
    expected = accepting[0]["reencoded"]
    expected.pop("ptnIDs", None)
    assert written == expected


def test_the_documented_machine_has_the_documented_hardware() -> None:
    hello = decode(case_of("cluster_swift_emits/hello_full")["json_text"])

    assert isinstance(hello, Hello)
    assert hardware_info(RTX) == hello.device_info.hardware


@settings(max_examples=examples(0.4))
@given(machines)
def test_hardware_round_trips(machine: Hardware) -> None:
    info = hardware_info(machine)

    assert msgspec.json.decode(msgspec.json.encode(info), type=HardwareInfo) == info


def test_the_lowest_tier_is_written() -> None:
    written = json.loads(msgspec.json.encode(hardware_info(UNKNOWN_HARDWARE)))

    assert written["tier"] == 4
    assert "gpuBackend" not in written
    assert "gpuVRAMGB" not in written


@pytest.mark.parametrize("tier", [0, 5, -1, 2**40])
def test_an_unknown_tier_becomes_the_lowest(tier: int) -> None:
    assert hardware_info(replace(RTX, tier=tier)).tier == 4


def test_hardware_values_are_capped() -> None:
    info = hardware_info(
        Hardware(
            chip="x" * 200,
            memory_gb=1e300,
            gpu_cores=-5,
            bandwidth_gb=float("nan"),
        )
    )

    assert info.chip_name == "x" * 64
    assert info.total_ram_gb == 1e9
    assert info.gpu_core_count == 0
    assert info.memory_bandwidth_gbs == 0.0


def test_a_device_has_only_fields_that_macs_accept() -> None:
    device = device_info(
        "ID", "n" * 200, RTX, registered_at=1.0, seen_at=2.0, models=["m"]
    )

    written = json.loads(msgspec.json.encode(device))

    assert msgspec.convert(written, DeviceInfo) == device
    assert written["name"] == "n" * 128
    assert written["isCurrentDevice"] is True
    assert "connectionQuality" not in written
    hello = encode(Hello(device, 1, ("m",)))
    assert decode(hello) == Hello(device, 1, ("m",))


def test_capabilities_have_the_fields_that_relays_filter_by() -> None:
    capabilities = node_capabilities(RTX, ["m"], available=True, slots=2, context=8192)

    written = json.loads(msgspec.json.encode(capabilities))

    assert written["maxModelSizeGB"] == largest_model_gb(RTX) == 51.2
    assert written["maxConcurrentRequests"] == 2
    assert written["effectiveContext"] == 8192
    assert "ptnIDs" not in written
    assert "swappableModels" not in written


def test_an_unknown_context_is_omitted() -> None:
    capabilities = node_capabilities(RTX, [], available=False, slots=1, context=0)

    assert b"effectiveContext" not in msgspec.json.encode(capabilities)
