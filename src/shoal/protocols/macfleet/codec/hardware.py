"""A node's hardware profile, as JSON.

Source: the MacFleet document, "hardware exchange".  Upstream does not check types: a
text in place of a number breaks its elections, and ``Infinity`` wins them.  Here every
field must be valid, or the whole profile is rejected.
"""

import json
from dataclasses import dataclass, replace

import msgspec

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.worker import Hardware

HARDWARE_MAX = 8192  # bytes
CHIP_NAME_MAX = 64  # characters of a chip's name that are kept
SIZE_MAX = 1e9  # GB, or GB per second: beyond any machine
CORES_MAX = 10**9
PORTS = range(1, 1 << 16)
WIRE_VERSION = 1  # of the hardware profile, and of the handshake's suffix with it


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The hardware of a node; sizes in GB, the bandwidth in GB per second.

    ``data_port`` is its transport port; 0: the one after the heartbeat port.  Elections
    count cores, bandwidth and memory: no decision depends on ``has_ane``, ``mps`` and
    ``mlx``.
    """

    chip: str = "unknown"
    gpu_cores: int = 0
    ram_gb: float = 0.0
    bandwidth_gbps: float = 0.0
    has_ane: bool = False
    mps: bool = False
    mlx: bool = False
    data_port: int = 0
    wire_version: int = WIRE_VERSION


UNKNOWN_PROFILE = HardwareProfile()


class _ProfileJson(msgspec.Struct, frozen=True):
    """The fields as named on the wire; unknown fields are ignored, for newer peers."""

    chip_name: str = "unknown"
    data_port: int = 0
    gpu_cores: int = 0
    has_ane: bool = False
    memory_bandwidth_gbps: float = 0.0
    mlx_available: bool = False
    mps_available: bool = False
    ram_gb: float = 0.0
    wire_version: int = WIRE_VERSION


_decoder = msgspec.json.Decoder(_ProfileJson)


def encode_profile(profile: HardwareProfile) -> bytes:
    """Return the JSON in upstream's format: sorted keys, ASCII only."""
    fields = {
        "chip_name": profile.chip,
        "data_port": profile.data_port,
        "gpu_cores": profile.gpu_cores,
        "has_ane": profile.has_ane,
        "memory_bandwidth_gbps": profile.bandwidth_gbps,
        "mlx_available": profile.mlx,
        "mps_available": profile.mps,
        "ram_gb": profile.ram_gb,
        "wire_version": profile.wire_version,
    }
    return json.dumps(fields, sort_keys=True).encode()


def decode_profile(data: bytes) -> HardwareProfile:
    """Decode a profile; an invalid port becomes 0.

    Raises PeerError if it is not a JSON object, or has an invalid value.
    """
    if len(data) > HARDWARE_MAX:
        raise LimitExceeded("hardware profile", len(data), HARDWARE_MAX)
    try:
        # msgspec does not validate UTF-8 in the texts that it skips.
        fields = _decoder.decode(str(data, "utf-8"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PeerError(f"hardware profile: {error}") from error
    return HardwareProfile(
        chip=fields.chip_name[:CHIP_NAME_MAX],
        gpu_cores=int(_bounded("gpu_cores", fields.gpu_cores, CORES_MAX)),
        ram_gb=_bounded("ram_gb", fields.ram_gb, SIZE_MAX),
        bandwidth_gbps=_bounded(
            "memory_bandwidth_gbps", fields.memory_bandwidth_gbps, SIZE_MAX
        ),
        has_ane=fields.has_ane,
        mps=fields.mps_available,
        mlx=fields.mlx_available,
        data_port=fields.data_port if fields.data_port in PORTS else 0,
        wire_version=fields.wire_version,
    )


def reported_hardware(profile: HardwareProfile) -> Hardware | None:
    """Translate a profile; None if it has no hardware."""
    known = replace(profile, data_port=0, wire_version=WIRE_VERSION)
    if known == UNKNOWN_PROFILE:
        return None
    return Hardware(
        chip=profile.chip,
        memory_gb=profile.ram_gb,
        gpu_cores=profile.gpu_cores,
        bandwidth_gb=profile.bandwidth_gbps,
        tier=0,
    )


def _bounded(name: str, value: float, limit: float) -> float:
    if not 0 <= value <= limit:  # rejects NaN as well
        raise PeerError(f"hardware profile: {name} is not from 0 to {limit:.9g}")
    return value
