"""Machines on the wire: their hardware, and the models that they can run.

Source: TealeNet's "Cluster Messages", "hello", and the capabilities of its relay.
Unknown values are accepted: real peers use others than the document.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from shoal.domain.worker import Hardware
from shoal.protocols.seam.document_fields import Undocumented, Unread, Unwritten
from shoal.protocols.tealenet.codec.scalars import (
    Date,
    Id,
    Int,
    Name,
    Names,
    WholeNumber,
    well_formed,
    wire_name,
)

TIERS = range(1, 5)
TIER_LOWEST = 4
WORD_MAX = 64  # characters of a chip, a backend or a platform; the rest is cut off
SIZE_MAX = 1e9  # GB, or GB per second: above any real machine
CORES_MAX = 10**9
SHARE_FOR_MODELS = 0.8  # of the memory; the system and the context need the rest


def _no_names() -> tuple[str, ...]:
    return ()


def _lowest() -> int:
    return TIER_LOWEST


class HardwareInfo(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name, kw_only=True
):
    """A machine's hardware; sizes in GB, bandwidth in GB per second.

    Only the tier and the optional fields may be absent; Rust peers require the tier.
    """

    chip_family: Name
    chip_name: Name
    total_ram_gb: float
    gpu_core_count: WholeNumber
    memory_bandwidth_gbs: float
    tier: WholeNumber = msgspec.field(default_factory=_lowest)
    gpu_backend: Name | None = None
    platform: Name | None = None
    gpu_vram_gb: float | None = None


class DeviceInfo(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name, kw_only=True
):
    """A peer's device.  A Rust peer has a new ``id`` at each start and in heartbeats.

    ``connection_quality`` may be unknown.  Shoal omits it, because a Mac refuses
    unknown values.
    """

    id: Id
    name: Name
    hardware: HardwareInfo
    registered_at: Date
    last_seen_at: Annotated[
        Date,
        Unread("the session's own clock decides liveness: a peer's may be wrong"),
    ]
    is_current_device: Annotated[bool, Unread("always true: a peer describes itself")]
    loaded_models: Annotated[
        Names, Unread("the message has the same; real peers leave this one empty")
    ] = msgspec.field(default_factory=_no_names)
    connection_quality: Annotated[
        str | None,
        Undocumented("Macs send it"),
        Unread("a Mac's own estimate of its network; liveness decides here"),
        Unwritten("optional; a Mac refuses words that it does not know"),
    ] = None


_NOT_LOADED = Unread("peers are asked for models that they have loaded")
_ONE_AT_A_TIME = Unread("real nodes run one request at a time, whatever they announce")


class NodeCapabilities(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name, kw_only=True
):
    """A relay node's hardware and models.

    ``ptnIDs`` is neither read nor written: Macs write objects there and Rust peers
    strings, and Rust peers refuse the whole message of a Mac.
    """

    hardware: HardwareInfo
    loaded_models: Names = msgspec.field(default_factory=_no_names)
    max_model_size_gb: Annotated[float, _NOT_LOADED]
    is_available: bool
    swappable_models: Annotated[Names, _NOT_LOADED] = ()
    max_concurrent_requests: Annotated[Int | None, _ONE_AT_A_TIME] = None
    effective_context: Int | None = None
    on_ac_power: Annotated[
        bool | None, Unread("a node says itself whether it is available")
    ] = msgspec.field(default=None, name="onACPower")


def hardware_info(hardware: Hardware) -> HardwareInfo:
    """Translate hardware to the wire's."""
    vram = hardware.gpu_memory_gb
    return HardwareInfo(
        chip_family=_word(hardware.chip_family),
        chip_name=_word(hardware.chip),
        total_ram_gb=_size(hardware.memory_gb),
        gpu_core_count=min(max(0, hardware.gpu_cores), CORES_MAX),
        memory_bandwidth_gbs=_size(hardware.bandwidth_gb),
        tier=hardware.tier if hardware.tier in TIERS else TIER_LOWEST,
        gpu_backend=_word(hardware.gpu_backend) or None,
        platform=_word(hardware.platform) or None,
        gpu_vram_gb=None if vram is None else _size(vram),
    )


def read_hardware(info: HardwareInfo) -> Hardware:
    """Translate hardware from the wire's."""
    vram = info.gpu_vram_gb
    return Hardware(
        chip=_word(info.chip_name),
        chip_family=_word(info.chip_family),
        memory_gb=_size(info.total_ram_gb),
        gpu_cores=int(min(max(0, info.gpu_core_count), CORES_MAX)),
        bandwidth_gb=_size(info.memory_bandwidth_gbs),
        tier=int(info.tier) if info.tier in TIERS else TIER_LOWEST,
        gpu_backend=_word(info.gpu_backend or ""),
        platform=_word(info.platform or ""),
        gpu_memory_gb=None if vram is None else _size(vram),
    )


def shown_name(name: str) -> str:
    """Return the part of a machine's name that is written and shown."""
    return well_formed(name)[:_NAME_SHOWN]


def device_info(
    device_id: str,
    name: str,
    hardware: Hardware,
    *,
    registered_at: Date,
    seen_at: Date,
    models: Sequence[str] = (),
) -> DeviceInfo:
    """Return the description of this device."""
    return DeviceInfo(
        id=device_id,
        name=shown_name(name),
        hardware=hardware_info(hardware),
        registered_at=registered_at,
        last_seen_at=seen_at,
        is_current_device=True,
        loaded_models=tuple(models),
    )


def node_capabilities(
    hardware: Hardware,
    models: Sequence[str],
    *,
    available: bool,
    slots: int,
    context: int,
) -> NodeCapabilities:
    """Return this node's capabilities; ``context`` is 0 if it is unknown."""
    return NodeCapabilities(
        hardware=hardware_info(hardware),
        loaded_models=tuple(models),
        max_model_size_gb=largest_model_gb(hardware),
        is_available=available,
        max_concurrent_requests=slots,
        effective_context=context or None,
    )


def largest_model_gb(hardware: Hardware) -> float:
    """Estimate the size of the largest model that fits, in GB."""
    memory = max(hardware.memory_gb, hardware.gpu_memory_gb or 0.0)
    return math.floor(_size(memory) * SHARE_FOR_MODELS * 10) / 10


_NAME_SHOWN = 128  # characters of a machine's name


def _word(text: str) -> str:
    return well_formed(text[:WORD_MAX])


def _size(given: float) -> float:
    return min(max(0.0, given), SIZE_MAX) if math.isfinite(given) else 0.0
