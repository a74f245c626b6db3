"""Hardware detection from recorded outputs, and of this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shoal.domain.worker import UNKNOWN_HARDWARE, Hardware
from shoal.processes.programs import RunProgram
from shoal.worker import hardware
from shoal.worker.hardware import (
    UNKNOWN,
    apple_family,
    detect,
    nvidia_chip,
    this_machine,
)

GIB = 1 << 30
CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9454P 48-Core Processor

processor\t: 1
model name\t: AMD EPYC 9454P 48-Core Processor
"""


def programs(**answers: str) -> RunProgram:
    """Return programs that print these answers, by name."""

    def run(command: Sequence[str]) -> str:
        return answers.get(command[0].replace("-", "_"), "")

    return run


def files(root: Path, contents: Mapping[str, str]) -> Path:
    for name, text in contents.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_this_machine_is_detected_once() -> None:
    hardware = this_machine()

    assert hardware is this_machine()
    assert hardware.memory_gb > 0
    assert hardware.platform
    assert hardware.chip != ""
    assert hardware.tier in range(1, 5)


def test_server_with_processors_alone(tmp_path: Path) -> None:
    root = files(tmp_path, {"proc/cpuinfo": CPUINFO})

    assert detect("linux", root, programs(), 128 * GIB) == Hardware(
        chip="AMD EPYC 9454P 48-Core Processor",
        memory_gb=137.4,
        tier=2,
        gpu_backend="cpu",
        platform="linux",
    )


def test_machine_is_described_by_its_gpu(tmp_path: Path) -> None:
    root = files(tmp_path, {"proc/cpuinfo": CPUINFO})
    run = programs(nvidia_smi="NVIDIA GeForce RTX 4090, 24564\n")

    assert detect("linux", root, run, 64 * GIB) == Hardware(
        chip="NVIDIA GeForce RTX 4090",
        chip_family="nvidiaGPU",
        memory_gb=68.7,
        gpu_cores=16384,
        bandwidth_gb=1008.0,
        tier=1,
        gpu_backend="cuda",
        platform="linux",
        gpu_memory_gb=25.8,
    )


def test_identical_gpus_count_together(tmp_path: Path) -> None:
    lines = "NVIDIA T400, 2048\n" + "NVIDIA H100 80GB HBM3, 81559\n" * 2
    hardware = detect("linux", tmp_path, programs(nvidia_smi=lines), 64 * GIB)

    assert hardware.chip == "2 x NVIDIA H100 80GB HBM3"
    assert hardware.gpu_memory_gb == 171.0
    assert hardware.gpu_cores == 2 * 16896


def test_gpus_that_another_worker_has_do_not_count(tmp_path: Path) -> None:
    run = programs(nvidia_smi="NVIDIA T400, 2048\nNVIDIA H100 80GB HBM3, 81559\n")
    for gpus, chip in (
        ((0,), "NVIDIA T400"),
        ((1,), "NVIDIA H100 80GB HBM3"),
        ((0, 1), "NVIDIA H100 80GB HBM3"),
        ((2,), "unknown"),
    ):
        assert detect("linux", tmp_path, run, 64 * GIB, gpus).chip == chip


@pytest.mark.parametrize(
    "printed",
    ["", "No devices were found\n", "[N/A], [N/A]\n", ",\n", "\x00\ufffd, 1e9\n"],
)
def test_useless_driver_output_is_ignored(tmp_path: Path, printed: str) -> None:
    hardware = detect("linux", tmp_path, programs(nvidia_smi=printed), 16 * GIB)

    assert (hardware.chip_family, hardware.gpu_backend) == ("unknown", "cpu")


def test_gpu_of_the_kernel_driver(tmp_path: Path) -> None:
    card = "sys/class/drm/card1/device/"
    root = files(
        tmp_path,
        {
            card + "vendor": "0x1002\n",
            card + "mem_info_vram_total": "17163091968\n",
            "sys/class/drm/card0/device/vendor": "0x8086\n",
            "dev/kfd": "",
        },
    )
    hardware = detect("linux", root, programs(), 32 * GIB)

    assert (
        hardware.chip,
        hardware.gpu_backend,
        hardware.gpu_memory_gb,
        hardware.tier,
    ) == (
        "AMD GPU",
        "rocm",
        17.2,
        2,
    )


def test_mac_reports_family_and_cores() -> None:
    run = programs(
        sysctl="Apple M2 Pro\n", ioreg='  |   "gpu-core-count" = 19\n  |   "x" = 1\n'
    )
    assert detect("darwin", Path("/none"), run, 32 * GIB) == Hardware(
        chip="Apple M2 Pro",
        chip_family="m2Pro",
        memory_gb=34.4,
        gpu_cores=19,
        bandwidth_gb=200.0,
        tier=2,
        gpu_backend="metal",
        platform="macOS",
    )


def test_intel_mac_has_no_gpu() -> None:
    run = programs(sysctl="Intel(R) Core(TM) i7-8850H CPU @ 2.60GHz\n")
    hardware = detect("darwin", Path("/none"), run, 16 * GIB)

    assert (hardware.chip_family, hardware.gpu_backend, hardware.tier) == (
        "unknown",
        "cpu",
        3,
    )


def test_container_memory_is_limited(tmp_path: Path) -> None:
    root = files(tmp_path, {"sys/fs/cgroup/memory.max": "4000000000\n"})
    assert detect("linux", root, programs(), 64 * GIB).memory_gb == 4.0

    files(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert detect("linux", root, programs(), 64 * GIB).memory_gb == 68.7


@pytest.mark.parametrize(
    ("system", "platform"),
    [("win32", "windows"), ("freebsd14", "freebsd"), ("android", "android"), ("x", "")],
)
def test_machine_without_data_is_unknown(
    tmp_path: Path, system: str, platform: str
) -> None:
    hardware = detect(system, tmp_path, programs(), 0)

    assert (hardware.chip, hardware.chip_family) == ("unknown", "unknown")
    assert (hardware.platform, hardware.tier) == (platform, 4)
    assert hardware.memory_gb == UNKNOWN_HARDWARE.memory_gb


def test_names_are_short_single_lines(tmp_path: Path) -> None:
    root = files(tmp_path, {"proc/cpuinfo": "model name : a\x1b[2J  b" + "x" * 999})

    chip = detect("linux", root, programs(), GIB).chip

    assert chip.startswith("a [2J bxxx")
    assert len(chip) == hardware.TEXT_MAX


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Apple M1", "m1"),
        ("Apple M3 Ultra", "m3Ultra"),
        ("Apple M12 Max", "m12Max"),
        ("Apple A18", ""),
        ("Intel", ""),
    ],
)
def test_apple_families_are_recognised(name: str, family: str) -> None:
    assert apple_family(name) == family


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4800.0),
        ("NVIDIA A100-SXM4-80GB", 1555.0),
        ("NVIDIA L40S", 864.0),
        ("NVIDIA L4", 300.0),
        ("Tesla T4", 320.0),
    ],
)
def test_gpus_are_recognised_by_driver_names(name: str, bandwidth: float) -> None:
    assert nvidia_chip(name).bandwidth_gb == bandwidth


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 4070 Ti", "NVIDIA GH400"]
)
def test_gpu_variants_are_not_recognised(name: str) -> None:
    assert nvidia_chip(name) == UNKNOWN
