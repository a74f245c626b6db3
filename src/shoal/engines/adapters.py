"""LoRA adapters in the folders of this machine, and which model each is for.

Source: PEFT's documentation, "Checkpoint format": a folder with ``adapter_config.json``
and the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.gguf_files import FILES_MAX, ModelFolder
from shoal.engines.server_errors import DECODE_ERRORS

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG_MAX = 64 * 1024  # bytes
_HUB = "models--"  # begins a folder of the Hugging Face hub's cache


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: its name, its ``base`` as its author calls it, and its bytes."""

    name: str
    base: str
    folder: Path
    size: int


class _Config(msgspec.Struct, frozen=True):
    base_model_name_or_path: str
    peft_type: Any = None


def find_adapters(folders: Sequence[ModelFolder]) -> list[Adapter]:
    """Return the adapters below folders of models; the first of a name counts.

    Blocks on the disk.  Those that cannot be read are left out.
    """
    found: dict[str, Adapter] = {}
    for each in folders:
        in_hub = each.pattern.startswith(_HUB)
        pattern = f"{_HUB}*/snapshots/*/{CONFIG}" if in_hub else f"*/{CONFIG}"
        try:
            configs = sorted(each.folder.glob(pattern))[:FILES_MAX]
        except OSError:
            continue
        for config in configs:
            folder = config.parent
            name = folder.name
            if in_hub:
                name = folder.parent.parent.name.rpartition("--")[2]
            adapter = None if name in found else _read(name, config)
            if adapter is not None:
                found[name] = adapter
    return [*found.values()]


def _read(name: str, config: Path) -> Adapter | None:
    try:
        with config.open("rb") as file:
            read = msgspec.json.decode(file.read(CONFIG_MAX), type=_Config)
        files = (config.parent / each for each in WEIGHTS)
        size = next((each.stat().st_size for each in files if each.exists()), 0)
    except (OSError, *DECODE_ERRORS):
        return None
    if str(read.peft_type).upper() != "LORA" or not size:
        return None
    return Adapter(name, read.base_model_name_or_path, config.parent, size)
