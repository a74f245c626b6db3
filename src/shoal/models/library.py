"""The models that are shared with peers: a table of names, and the files of each.

Names that peers say are looked up in the table and nowhere else: no path is ever made
of them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ConfigError, InvalidRequest, ShoalError
from shoal.engines.gguf_files import parts_of
from shoal.models.names import check_file_name, check_model_name

CHUNK = 1_048_576  # bytes, as other peers send them
FILES_MAX = 1000  # of one model

log = logging.getLogger("shoal.models")


class CannotShare(ShoalError):
    """The model's files are not as they would have to be; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model; ``size`` is in bytes."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model as it is to be sent: its files, in order of their names."""

    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model's file; ``last`` of them all."""

    file_name: str
    offset: int
    data: bytes
    last: bool


class Library:
    """Which models are shared, each a file or a folder.

    Looking and reading wait for the disk: neither is for the event loop.
    """

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = dict(models)

    @property
    def names(self) -> Sequence[str]:
        """Return what can be asked for."""
        return sorted(self._models)

    def look(self, name: str) -> SharedModel | None:
        """Return a model as it is on the disk now, or None if it is not shared.

        Raises CannotShare if its files are gone, or not what can be sent.
        """
        path = self._models.get(name)
        if path is None:
            return None
        try:
            files = [ModelFile(each, each.stat().st_size) for each in _files_at(path)]
        except OSError as error:
            raise CannotShare(f"{path}: {error.strerror or error}") from error
        return SharedModel(tuple(files))


def library_of(words: Sequence[tuple[str, Path]]) -> Library:
    """Return the library of what was named on the command line.

    Raises ConfigError if a name is no good or given twice, or files cannot be shared.
    """
    models: dict[str, Path] = {}
    for name, path in words:
        try:
            check_model_name(name)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
        if models.setdefault(name, path) != path:
            raise ConfigError(f"{name} is to be shared from {models[name]} and {path}")
    library = Library(models)
    for name in library.names:
        try:
            library.look(name)
        except CannotShare as error:
            raise ConfigError(f"{name} cannot be shared: {error}") from error
    return library


def shareable(words: Sequence[tuple[str, Path]]) -> Library:
    """Return the library of those models that can be shared, and log why others not.

    For models that are offered anyway, whether or not peers can copy them.
    """
    models = {}
    for name, path in words:
        try:
            library_of([(name, path)])
        except ConfigError as error:
            log.warning("not shared model=%s reason=%r", name, str(error))
        else:
            models[name] = path
    return Library(models)


def pieces(model: SharedModel) -> Iterator[Piece]:
    """Read a model, piece by piece.

    An empty file is one empty piece, so that it is not lost.

    Raises CannotShare if a file is not as it was when it was looked at.
    """
    ends = [file.size for file in model.files]
    final = len(ends) - 1
    for number, file in enumerate(model.files):
        try:
            with file.path.open("rb") as stream:
                for offset in range(0, max(file.size, 1), CHUNK):
                    length = min(CHUNK, file.size - offset)
                    data = stream.read(length)
                    if len(data) < length:
                        raise CannotShare(
                            f"{file.path} became shorter while it was sent"
                        )
                    last = number == final and offset + length == file.size
                    yield Piece(file.path.name, offset, data, last)
                if stream.read(1):
                    raise CannotShare(f"{file.path} became longer while it was sent")
        except OSError as error:
            raise CannotShare(f"{file.path}: {error.strerror or error}") from error


def _files_at(path: Path) -> list[Path]:
    """Return the files of the model at a path, in order of their names.

    Hidden files are nobody's business.  Peers that are not ours know no folders within
    a model: rather than a part of it, they get nothing.
    """
    if not path.is_dir():
        files = parts_of(path)
    else:
        files = sorted(
            (each for each in path.iterdir() if not each.name.startswith(".")),
            key=lambda each: each.name,
        )
        if not files:
            raise CannotShare(f"{path} is empty")
    if len(files) > FILES_MAX:
        raise CannotShare(f"{path} has more than {FILES_MAX} files")
    for file in files:
        if file.is_dir():
            raise CannotShare(
                f"{file} is a folder, and only files of one level can be sent; "
                "share a folder without it"
            )
        if not file.is_file():
            raise CannotShare(f"there is no file {file}")
        try:
            check_file_name(file.name)
        except InvalidRequest as error:
            raise CannotShare(f"{error}; rename it") from error
    return files
