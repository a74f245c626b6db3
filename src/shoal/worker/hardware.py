"""Detects this machine's hardware, once, within seconds.

Source of data that chips do not report: Apple's and NVIDIA's technical specifications.
"""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
from msgspec.structs import replace

from shoal.domain.worker import UNKNOWN_HARDWARE, Hardware
from shoal.processes.programs import RunProgram, program_output


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip; ``bandwidth_gb`` is that of its memory per second, 0 if unknown."""

    bandwidth_gb: float = 0.0
    gpu_cores: int = 0


UNKNOWN = Chip()

# By family; the number of GPU cores differs between machines.
APPLE: Mapping[str, Chip] = {
    "m1": Chip(68.0),
    "m1Pro": Chip(200.0),
    "m1Max": Chip(400.0),
    "m1Ultra": Chip(800.0),
    "m2": Chip(100.0),
    "m2Pro": Chip(200.0),
    "m2Max": Chip(400.0),
    "m2Ultra": Chip(800.0),
    "m3": Chip(100.0),
    "m3Pro": Chip(150.0),
    "m3Max": Chip(400.0),
    "m3Ultra": Chip(819.0),
    "m4": Chip(120.0),
    "m4Pro": Chip(273.0),
    "m4Max": Chip(546.0),
}

NVIDIA: Mapping[str, Chip] = {
    "H200": Chip(4800.0, 16896),
    "H100": Chip(3350.0, 16896),
    "A100": Chip(1555.0, 6912),
    "L40S": Chip(864.0, 18176),
    "L40": Chip(864.0, 18176),
    "L4": Chip(300.0, 7424),
    "A10": Chip(600.0, 9216),
    "T4": Chip(320.0, 2560),
    "RTX 5090": Chip(1792.0, 21760),
    "RTX 5080": Chip(960.0, 10752),
    "RTX 5070": Chip(672.0, 6144),
    "RTX 4090": Chip(1008.0, 16384),
    "RTX 4080": Chip(717.0, 9728),
    "RTX 4070": Chip(504.0, 5888),
    "RTX 4060": Chip(272.0, 3072),
    "RTX 3090": Chip(936.0, 10496),
    "RTX 3080": Chip(760.0, 8704),
    "RTX 3070": Chip(448.0, 5888),
    "RTX 3060": Chip(360.0, 3584),
}

# Suffixes of other chips.
_VARIANT_SUFFIX = re.compile(r"\b(Ti|SUPER|Laptop|Max-Q|Mobile)\b")
_APPLE_NAME = re.compile(r"Apple M(\d+)(?: (Pro|Max|Ultra))?\b")


def apple_family(name: str) -> str:
    """Return the family of an Apple chip, such as ``m2Pro``; empty for other chips."""
    found = _APPLE_NAME.search(name)
    return f"m{found[1]}{found[2] or ''}" if found else ""


def nvidia_chip(name: str) -> Chip:
    """Return the data of a GPU by its driver's name for it."""
    if _VARIANT_SUFFIX.search(name):
        return UNKNOWN
    for known, chip in NVIDIA.items():
        if re.search(rf"\b{known}\b", name):
            return chip
    return UNKNOWN


TEXT_MAX = 64  # characters of a name
GPUS_MAX = 64  # that are read
GB = 1e9  # bytes
MIB = 1 << 20  # bytes

PLATFORMS: Mapping[str, str] = {
    "darwin": "macOS",
    "ios": "iOS",
    "linux": "linux",
    "android": "android",
    "win32": "windows",
    "cygwin": "windows",
}

# Minimum GB of memory for models in tiers 1, 2 and 3; with less, the tier is 4.  The
# documents give examples only: a GPU of 24 GB has tier 1, a Mac of 32 GB tier 2.
# Memory without a GPU counts for less.
TIERS_BY_GPU = (20.0, 10.0, 6.0)
TIERS_BY_UNIFIED = (60.0, 30.0, 15.0)
TIERS_BY_PROCESSOR = (500.0, 100.0, 15.0)

AMD = "0x1002"  # PCI vendor id


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str
    memory: int  # bytes
    family: str
    backend: str


@lru_cache(1)
def this_machine(gpus: tuple[int, ...] = ()) -> Hardware:
    """Return this machine's hardware, with these of its GPUs; empty: all.

    Never raises.  The first call may take seconds if a driver does not answer.
    """
    try:
        memory = psutil.virtual_memory().total
    except OSError:  # Android hides it
        memory = 0
    return detect(sys.platform, Path("/"), program_output, memory, gpus)


def detect(
    system: str,
    root: Path,
    run: RunProgram,
    memory: int,
    numbers: Collection[int] = (),
) -> Hardware:
    """Return a machine's hardware.

    ``system`` is ``sys.platform``, ``root`` its root folder, ``run`` runs a program of
    it, and ``memory`` is in bytes.  ``numbers`` are those of its GPUs that count;
    empty: all.
    """
    memory = min(memory, _container_memory_limit(root) or memory)
    base = replace(
        UNKNOWN_HARDWARE,
        memory_gb=round(memory / GB, 1),
        platform=PLATFORMS.get(system, "freebsd" if "freebsd" in system else ""),
    )
    if system == "darwin":
        return _mac(base, run)
    found = _nvidia(run) or _amd(root)
    gpus = [gpu for at, gpu in enumerate(found) if not numbers or at in numbers]
    gpus.sort(key=lambda gpu: -gpu.memory)
    if not gpus:
        chip = _processor(root) or base.chip
        tier = _tier(base.memory_gb, TIERS_BY_PROCESSOR)
        return replace(base, chip=chip, tier=tier, gpu_backend="cpu")
    return _with_gpus(base, gpus)


def _mac(base: Hardware, run: RunProgram) -> Hardware:
    name = _name(run(["sysctl", "-n", "machdep.cpu.brand_string"])) or base.chip
    family = apple_family(name)
    if not family:  # a Mac with an Intel processor
        tier = _tier(base.memory_gb, TIERS_BY_PROCESSOR)
        return replace(base, chip=name, tier=tier, gpu_backend="cpu")
    cores = re.search(
        r'"gpu-core-count" = (\d{1,6})', run(["ioreg", "-rd1", "-c", "AGXAccelerator"])
    )
    return replace(
        base,
        chip=name,
        chip_family=family,
        gpu_cores=int(cores[1]) if cores else 0,
        bandwidth_gb=APPLE.get(family, UNKNOWN).bandwidth_gb,
        tier=_tier(base.memory_gb, TIERS_BY_UNIFIED),
        gpu_backend="metal",
    )


def _with_gpus(base: Hardware, gpus: Sequence[_Gpu]) -> Hardware:
    """Add the GPUs; models are split over identical ones."""
    identical = [gpu for gpu in gpus if gpu == gpus[0]]
    chip = nvidia_chip(gpus[0].name)
    name, memory = gpus[0].name, sum(gpu.memory for gpu in identical) / GB
    return replace(
        base,
        chip=name if len(identical) == 1 else f"{len(identical)} x {name}",
        chip_family=gpus[0].family,
        gpu_cores=chip.gpu_cores * len(identical),
        bandwidth_gb=chip.bandwidth_gb,
        tier=_tier(memory, TIERS_BY_GPU),
        gpu_backend=gpus[0].backend,
        gpu_memory_gb=round(memory, 1),
    )


def _nvidia(run: RunProgram) -> list[_Gpu]:
    output = run(
        [
            "nvidia-smi",
            "--query-gpu=name,memory.total",
            "--format=csv,noheader,nounits",
        ]
    )
    gpus = []
    for line in output.splitlines()[:GPUS_MAX]:
        name, _, size = line.rpartition(",")
        if name and size.strip().isdecimal():
            memory = int(size) * MIB
            gpus.append(_Gpu(_name(name), memory, "nvidiaGPU", "cuda"))
    return gpus


def _amd(root: Path) -> list[_Gpu]:
    """Read AMD's GPUs from the kernel driver."""
    gpus = []
    # ROCm needs the kernel's compute interface; else Vulkan serves.
    backend = "rocm" if (root / "dev/kfd").exists() else "vulkan"
    for card in sorted((root / "sys/class/drm").glob("card[0-9]*/device"))[:GPUS_MAX]:
        size = _read(card / "mem_info_vram_total").strip()
        if _read(card / "vendor").strip() == AMD and size.isdecimal():
            name = _name(_read(card / "product_name")) or "AMD GPU"
            gpus.append(_Gpu(name, int(size), "unknown", backend))
    return gpus


def _processor(root: Path) -> str:
    """Return the processor's name on Linux; empty elsewhere."""
    named = re.search(
        r"^(?:model name|Hardware|Model)\s*:\s*(.+)$",
        _read(root / "proc/cpuinfo"),
        re.MULTILINE,
    )
    return _name(named[1]) if named else ""


def _container_memory_limit(root: Path) -> int | None:
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return int(limit) if limit.isdecimal() else None


def _tier(size_gb: float, limits: Sequence[float]) -> int:
    return 1 + sum(size_gb < limit for limit in limits)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _name(text: str) -> str:
    """Return a name as one short printable line."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:TEXT_MAX].strip()
