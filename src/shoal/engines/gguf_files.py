"""GGUF files on this machine: where they usually are, and which of them fits."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from shoal.engines.memory import free_memory

FILES_MAX = 2000  # files of one place that are looked at
HEADER_MAX = 1024 * 1024  # bytes of a file in which its pooling is looked for
NEEDS = 1.5  # times its size: a model, the contexts of its slots, and room for both
SMALL = 1024**3  # bytes that are dared where the free memory is not known

# A 32-bit number called so in a GGUF file, which is how vectors are made of tokens:
# 1 to 3 are their mean, the first and the last one.
_POOLING = re.compile(rb"\.pooling_type\x04\0\0\0[\x01-\x03]\0\0\0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, and how the files in it are to be found."""

    folder: Path
    pattern: str


def usual_places(
    data: Path, environment: Mapping[str, str] = os.environ
) -> tuple[Place, ...]:
    """Return where programs keep their models.

    Args:
        data: our own data folder.
    """
    home = Path.home()
    hub = environment.get("HF_HUB_CACHE") or str(
        Path(environment.get("HF_HOME") or home / ".cache" / "huggingface") / "hub"
    )
    caches = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    llama = environment.get("LLAMA_CACHE") or str(caches / "llama.cpp")
    return (
        Place(data / "models", "**/*.gguf"),
        Place(Path(hub).expanduser(), "models--*/snapshots/*/**/*.gguf"),
        Place(Path(llama).expanduser(), "*.gguf"),
        Place(home / ".lmstudio" / "models", "*/*/*.gguf"),
        Place(home / ".cache" / "lm-studio" / "models", "*/*/*.gguf"),
    )


def models_in(places: Iterable[Place]) -> Iterator[Path]:
    """Yield the files that can be loaded: of one in parts, the first of them."""
    for place in places:
        for path in islice(place.folder.glob(place.pattern), FILES_MAX):
            below = path.relative_to(place.folder)
            if any(part.startswith(".") for part in below.parts):
                continue  # it is not whole yet, or nobody's business
            part = _PART.search(path.stem)
            # What belongs to another model: how it sees.
            if "mmproj" not in path.name and (part is None or int(part[1]) == 1):
                yield path


def largest_that_fits(
    places: Iterable[Place], memory: int | None = None
) -> Path | None:
    """Return the largest model for texts that ``memory`` has room for, in bytes.

    Without it, what is free now counts.
    """
    free = memory if memory is not None else free_memory()
    room = SMALL if free is None else free / NEEDS
    sizes = {path: size_of(path) for path in models_in(places)}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        if 0 < sizes[path] <= room and is_gguf(path) and not makes_embeddings(path):
            return path
    return None


def named(places: Iterable[Place], pattern: str) -> Path | None:
    """Return the first file whose name, without its ending, fits the pattern."""
    fitting = (path for path in models_in(places) if fnmatchcase(path.stem, pattern))
    return next((path for path in fitting if is_gguf(path)), None)


def size_of(path: Path) -> int:
    """Return the bytes of a model with all its parts; 0 if it cannot be read."""
    try:
        return sum(each.stat().st_size for each in parts_of(path))
    except OSError:
        return 0


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that one of them belongs to; mostly it alone."""
    part = _PART.search(path.stem)
    if part is None:
        return [path]
    stem = path.stem[: part.start()]
    return [
        path.with_name(f"{stem}-{number:05}-of-{part[2]}{path.suffix}")
        for number in range(1, int(part[2]) + 1)
    ]


def is_gguf(path: Path) -> bool:
    """Say whether a file can be read and begins like one."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def makes_embeddings(path: Path) -> bool:
    """Say whether a GGUF file tells how vectors are to be made of what it reads.

    Such a model is asked for nothing else.  Raises OSError.
    """
    with path.open("rb") as file:
        return _POOLING.search(file.read(HEADER_MAX)) is not None
