"""A node's hardware profile, as JSON.

Source: the MacFleet document, "hardware exchange".  Upstream does not check types: a
text in place of a number breaks its elections, and ``Infinity`` wins them.  Here a
field without a possible value counts as absent.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.worker import Hardware
from shoal.protocols.seam.json_text import well_formed

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


_Size: TypeAlias = Annotated[float, Meta(ge=0, le=SIZE_MAX)]  # rejects NaN as well


class _ProfileJson(msgspec.Struct, frozen=True):
    """The fields as named on the wire; unknown fields are ignored, for newer peers."""

    chip_name: str = "unknown"
    data_port: Annotated[int, Meta(ge=0, le=PORTS[-1])] = 0
    gpu_cores: Annotated[int, Meta(ge=0, le=CORES_MAX)] = 0
    has_ane: bool = False
    memory_bandwidth_gbps: _Size = 0.0
    mlx_available: bool = False
    mps_available: bool = False
    ram_gb: _Size = 0.0
    wire_version: int = WIRE_VERSION


_FIELDS = msgspec.structs.fields(_ProfileJson)


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
    """Decode a profile; numbers may be of another type, or texts.

    Raises PeerError if it is not a JSON object.
    """
    if len(data) > HARDWARE_MAX:
        raise LimitExceeded("hardware profile", len(data), HARDWARE_MAX)
    try:
        given = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise PeerError(f"hardware profile: {error}") from error
    if not isinstance(given, dict):
        raise PeerError(
            f"hardware profile: a {type(given).__name__}, expected an object"
        )
    known: dict[str, Any] = {}
    for each in _FIELDS:
        with suppress(msgspec.ValidationError):
            known[each.name] = msgspec.convert(
                given.get(each.name), each.type, strict=False
            )
    fields = _ProfileJson(**known)
    return HardwareProfile(
        chip=well_formed(fields.chip_name[:CHIP_NAME_MAX]),
        gpu_cores=fields.gpu_cores,
        ram_gb=fields.ram_gb,
        bandwidth_gbps=fields.memory_bandwidth_gbps,
        has_ane=fields.has_ane,
        mps=fields.mps_available,
        mlx=fields.mlx_available,
        data_port=fields.data_port,
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
