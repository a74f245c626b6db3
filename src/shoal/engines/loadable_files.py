"""The model files of a machine that its embedded engine can load."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain.work import Feature, HubModel
from shoal.domain.worker import LoadableModel, ModelLayers
from shoal.engines.catalog import MODELS_MAX, is_valid_name
from shoal.engines.gguf_files import (
    PROJECTOR,
    kinds_by_header,
    model_size,
    parts_of,
    projector_of,
)
from shoal.engines.gguf_header import (
    GgufHeader,
    InvalidGguf,
    layer_of,
    read_header,
    read_tensors,
)
from shoal.engines.server_kinds import LLAMA_SERVER, TEXT, describe_model

EMBEDDED = "embedded"
TEMPLATE = "tokenizer.chat_template"
# Keys of a projector's metadata that say what it makes tokens of.
_SENSES = {
    "clip.has_vision_encoder": Feature.IMAGES,
    "clip.has_audio_encoder": Feature.AUDIO,
}
_IN_CACHE = re.compile(r"/models--([^/]+)--([^/]+)/snapshots/([^/]+)/(.+)$")

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"

ListFiles: TypeAlias = Callable[[], Iterable[tuple[str, Path]]]
"""Lists files of models with their names; the first of a name counts."""

log = logging.getLogger("shoal.engines")


@dataclass(frozen=True, slots=True)
class LoadableFile:
    """A file, or the first part of one, and what it is."""

    path: Path
    model: LoadableModel


class FileLibrary:
    """The models among some files, as of the last ``scan``."""

    def __init__(self, list_files: ListFiles) -> None:
        self.files: Mapping[str, LoadableFile] = {}
        self._list_files = list_files
        # What was read of each file, and of which size and time it was then.
        self._known: dict[Path, tuple[object, LoadableModel | None]] = {}

    def scan(self) -> None:
        """Look for models again; files that have not changed are not read.

        Blocks on the disk.
        """
        known, self._known = self._known, {}
        files: dict[str, LoadableFile] = {}
        folders: dict[Path, object] = {}
        for name, path in self._list_files():
            if len(files) >= MODELS_MAX:
                break
            if name in files or not is_valid_name(name):
                continue
            if path.parent not in folders:
                folders[path.parent] = _projectors(path.parent)
            stamp = _stamp(path), folders[path.parent]
            if path not in known or known[path][0] != stamp:
                known[path] = stamp, _described(path)
            self._known[path] = known[path]
            if (model := known[path][1]) is not None:
                files[name] = LoadableFile(path, replace(model, name=name))
        self.files = files


def describe_file(path: Path) -> LoadableModel:
    """Describe the model of a GGUF file, under the file's name.

    Raises InvalidGguf, also if it is no language model, and OSError.
    """
    header, projector = read_header(path), projector_of(path)
    if not header.is_language_model:
        raise InvalidGguf(f"{path} is no language model")
    kinds = kinds_by_header(header)
    features = describe_model(
        LLAMA_SERVER,
        path.stem,
        kinds=kinds,
        lacks=() if "tools" in header.text(TEMPLATE) else (Feature.TOOLS,),
        modalities=() if projector is None else _senses(projector),
    ).features
    size = sum(model_size(each) for each in (path, projector) if each is not None)
    return LoadableModel(
        path.stem,
        size,
        kinds,
        features | {Feature.CONTINUE} if kinds == TEXT else features,
        header.context,
        header.cache,
        header.quantization,
        engine=EMBEDDED,
        layers=_layers(path, header) if kinds == TEXT and projector is None else None,
        hub=_hub_model(path, size),
    )


def _hub_model(path: Path, size: int) -> HubModel | None:
    """Return where a file in the cache of the hub's library came from.

    None: it is elsewhere.
    """
    if (place := _IN_CACHE.search(path.as_posix())) is None:
        return None
    organization, name, revision, file = place.groups()
    found = HubModel(f"{organization}/{name}", file, revision, size)
    return found if found.is_usable else None


def _layers(path: Path, header: GgufHeader) -> ModelLayers | None:
    """Return how the bytes of a model are spread over its layers; None: unknown."""
    layers: Counter[int] = Counter()
    others: dict[str, int] = {}
    try:
        tensors = [read_tensors(part) for part in parts_of(path)]
    except (OSError, InvalidGguf):
        return None  # whether it can be loaded, llama.cpp will say
    for name, place in (each for part in tensors for each in part.items()):
        if (layer := layer_of(name)) is None:
            others[name] = place.size
        else:
            layers[layer] += place.size
    sizes = [layers[each] for each in sorted(layers)]
    if not sizes or sorted(layers) != [*range(len(sizes))]:
        return None
    first = others.pop(EMBEDDINGS, 0)
    runs = tuple((len([*same]), size) for size, same in groupby(sizes))
    # Without weights of its own, the output has a copy of the first.
    last = sum(others.values()) + (0 if OUTPUT in others else first)
    found = ModelLayers(runs, last, header.states, header.scores)
    return found if found.is_usable else None


def _described(path: Path) -> LoadableModel | None:
    try:
        model = describe_file(path)
    except (OSError, InvalidGguf) as error:
        log.info("no model path=%s reason=%r", path, str(error))
        return None
    return model if model.size else None  # a part is missing


def _stamp(path: Path) -> object:
    """Return what changes with a file, or its parts."""
    try:
        found = [each.stat() for each in parts_of(path)]
    except OSError as error:
        return str(error)
    return [(each.st_size, each.st_mtime_ns) for each in found]


def _projectors(folder: Path) -> object:
    """Return what changes with the projectors of a folder, and whose they are."""
    names = sorted(path.name for path in folder.glob("*.gguf"))
    projectors = [name for name in names if PROJECTOR in name.lower()]
    stamps = [_stamp(folder / name) for name in projectors]
    return (names, stamps) if projectors else ()


def _senses(projector: Path) -> frozenset[Feature]:
    try:
        values = read_header(projector).values
    except (OSError, InvalidGguf):
        return frozenset()
    return frozenset(each for key, each in _SENSES.items() if values.get(key) is True)
