"""Which models are in a folder: those fetched into it, and files put there by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.engines.gguf_files import Place as Files
from shoal.engines.gguf_files import models_in, parts_of
from shoal.models.library import FILES_MAX
from shoal.models.names import PARTS_MAX, check_model_name

MODELS_MAX = 10_000  # that are listed


@dataclass(frozen=True, slots=True)
class Kept:
    """A model on this machine; ``gguf`` is what the embedded engine would load."""

    name: str
    path: Path
    size: int  # bytes
    files: int
    gguf: Path | None


def kept_in(folder: Path) -> list[Kept]:
    """Return the models in a folder, by name: folders with files, and files alone.

    Raises ConfigError if it cannot be read.
    """
    try:
        found = list(_below(folder, "", PARTS_MAX)) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(found, key=lambda each: each.name)[:MODELS_MAX]


def kept_at(path: Path, name: str) -> Kept:
    """Return the model in a folder of its own."""
    files = [each for each in _visible(path) if each.is_file()][:FILES_MAX]
    gguf = sorted(models_in([Files(path, "*.gguf")]))
    return Kept(
        name,
        path,
        sum(each.stat().st_size for each in files),
        len(files),
        gguf[0] if gguf else None,
    )


def _below(folder: Path, prefix: str, depth: int) -> Iterator[Kept]:
    for each in _visible(folder):
        name = prefix + each.name
        if each.is_file() and each.suffix == ".gguf" and not prefix:
            parts = parts_of(each)
            if each == parts[0] and all(part.is_file() for part in parts):
                size = sum(part.stat().st_size for part in parts)
                yield Kept(each.stem, each, size, len(parts), each)
        elif each.is_dir() and _is_name(name):
            if any(inner.is_file() for inner in _visible(each)):
                yield kept_at(each, name)
            elif depth > 1:
                yield from _below(each, f"{name}/", depth - 1)


def _visible(folder: Path) -> Iterator[Path]:
    return (each for each in folder.iterdir() if not each.name.startswith("."))


def _is_name(name: str) -> bool:
    try:
        check_model_name(name)
    except InvalidRequest:
        return False
    return True
