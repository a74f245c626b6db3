"""What is known of chips that do not tell it themselves.

Sources: Apple's and NVIDIA's technical specifications.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """``bandwidth_gb`` is that of its memory, per second; 0 where it is not known."""

    bandwidth_gb: float = 0.0
    gpu_cores: int = 0


UNKNOWN = Chip()

# By family; how many GPU cores they have differs from machine to machine.
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

_OTHERS = re.compile(r"\b(Ti|SUPER|Laptop|Max-Q|Mobile)\b")  # other chips by that name
_APPLE_NAME = re.compile(r"Apple M(\d+)(?: (Pro|Max|Ultra))?\b")


def apple_family(name: str) -> str:
    """Return the family of a chip of Apple's, such as ``m2Pro``; empty: of another."""
    found = _APPLE_NAME.search(name)
    return f"m{found[1]}{found[2] or ''}" if found else ""


def nvidia_chip(name: str) -> Chip:
    """Return what is known of a GPU by the name that its driver gives it."""
    if _OTHERS.search(name):
        return UNKNOWN
    for known, chip in NVIDIA.items():
        if re.search(rf"\b{known}\b", name):
            return chip
    return UNKNOWN
