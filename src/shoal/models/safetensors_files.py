"""Models in the hub's cache that are stored as safetensors, for engines that read them.

Sources: the format of safetensors (github.com/huggingface/safetensors, "Format"), and
``config.json`` as Hugging Face's transformers write it.  A file may be anything that
someone has put into the cache: what it claims is checked against what is there.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from shoal.domain.errors import ConfigError
from shoal.domain.worker import LoadableModel
from shoal.engines.server_kinds import EMBEDDINGS, TEXT

ENGINES = "vLLM, SGLang or MLX"
"""What runs such models.  None of them is started by a worker: its owner does that."""

FILES_MAX = 2000  # models of a cache, and files of a model, that are examined
LENGTH = 8  # bytes of the header's length, with the least first
HEADER_MAX = 32 << 20  # bytes
CONFIG_MAX = 1 << 20  # bytes of a ``config.json``
NUMBER_MAX = 1 << 32  # of what a configuration counts
_F16 = 2  # bytes of a number in the cache
log = logging.getLogger("shoal.models")

_METADATA = "__metadata__"
_POOLING = "modules.json"  # of models whose vectors are pooled


class InvalidSafetensors(ConfigError):
    """A file is not of this format, or damaged; the message names it and says why."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR = msgspec.json.Decoder(_Tensor)


def read_bytes_by_type(path: Path) -> Counter[str]:
    """Return how many bytes the tensors of a file take, by their type (``BF16``).

    Raises InvalidSafetensors, OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(HEADER_MAX, size - LENGTH):
            raise InvalidSafetensors(f"{path} is no file of safetensors")
        header = file.read(length)
    found: Counter[str] = Counter()
    try:
        for name, raw in _HEADER.decode(header).items():
            if name == _METADATA:
                continue
            tensor = _TENSOR.decode(raw)
            begin, end = tensor.data_offsets
            if not 0 <= begin <= end <= size - LENGTH - length:
                raise InvalidSafetensors(f"{path}: {name[:80]!a} is not in the file")
            found[tensor.dtype] += end - begin
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSafetensors(f"{path}: its header is damaged: {error}") from error
    return found


def in_cache(hub: Path) -> Iterator[tuple[Path, LoadableModel]]:
    """Yield such models of the hub's cache with their folders, but for damaged ones."""
    for config in islice(hub.glob("models--*/snapshots/*/config.json"), FILES_MAX):
        try:
            model = describe_model(config.parent)
        except (OSError, InvalidSafetensors) as error:
            log.info("no model path=%s reason=%r", config.parent, str(error))
            continue
        if model.size:
            yield config.parent, model


def describe_model(folder: Path) -> LoadableModel:
    """Describe the model of a folder in the hub's cache, under its repository's name.

    Raises InvalidSafetensors, OSError.
    """
    by_type: Counter[str] = Counter()
    files = sorted(islice(folder.glob("*.safetensors"), FILES_MAX))
    for each in files:
        by_type += read_bytes_by_type(each)
    config = _read_config(folder / "config.json")
    text = config.get("text_config")  # of a model that also reads images
    numbers = {**config, **text} if isinstance(text, dict) else config
    return LoadableModel(
        folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1),
        sum(each.stat().st_size for each in files),
        EMBEDDINGS if (folder / _POOLING).is_file() else TEXT,
        context=_count(numbers, "max_position_embeddings"),
        cache=_cache(numbers),
        quantization=_quantization(config, by_type),
        engine=ENGINES,
    )


def _read_config(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(CONFIG_MAX)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSafetensors(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidSafetensors(f"{path} is no configuration")
    return found


def _quantization(config: dict[str, Any], by_type: Counter[str]) -> str:
    """Return how most weights are stored: ``awq 4 bits``, ``BF16``; empty: unknown."""
    for key in ("quantization_config", "quantization"):  # the latter is MLX's
        if isinstance(known := config.get(key), dict):
            method, bits = known.get("quant_method", ""), known.get("bits", "")
            return f"{method} {bits} bits".strip()[:40] if bits else str(method)[:40]
    return max(by_type, key=by_type.__getitem__, default="")[:40]


def _cache(numbers: dict[str, Any]) -> int:
    """Return the bytes of float16 that each token of a context takes; 0: unknown."""
    heads = _count(numbers, "num_attention_heads")
    width = _count(numbers, "head_dim")
    if not width and heads:
        width = _count(numbers, "hidden_size") // heads
    kv_heads = _count(numbers, "num_key_value_heads") or heads
    size = 2 * _F16 * _count(numbers, "num_hidden_layers") * kv_heads * width
    return size if size < NUMBER_MAX else 0


def _count(numbers: dict[str, Any], key: str) -> int:
    found = numbers.get(key)
    return found if type(found) is int and 0 < found < NUMBER_MAX else 0
