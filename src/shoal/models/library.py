"""Models on this machine: the library shared with peers, and the models folder.

Names from peers are only keys of the library's table: they never become paths.
"""

import logging
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ConfigError, InvalidRequest, ShoalError
from shoal.engines.gguf_files import ModelFolder as Files
from shoal.engines.gguf_files import find_models, parts_of, projector_of
from shoal.models.names import PARTS_MAX, check_file_name, check_model_name

CHUNK = 1_048_576  # bytes; other programs send the same
FILES_MAX = 1000  # of one model

log = logging.getLogger("shoal.models")


class NotShareable(ShoalError):
    """The model's files cannot be shared; the message says why."""


class UnshareableContents(NotShareable):
    """A file or folder in the model's folder keeps the model from being shared."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model, sent under ``name``; ``size`` is in bytes.

    ``path`` has no links.
    """

    name: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model to send: its files, ordered by name."""

    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A part of a model's file; ``last`` marks the last one of the file."""

    file_name: str
    offset: int
    data: bytes
    last: bool


class Library:
    """The shared models, each a file or a folder.

    Files may be links that stay inside the model's folder, or that lead into one of the
    ``caches``: folders in which programs keep models.  Whatever else lies on this
    machine is not shared, even if a link in a model's folder points to it.

    Methods block on the disk: do not call them on the event loop.
    """

    def __init__(self, models: Mapping[str, Path], caches: Iterable[Path] = ()) -> None:
        self._models = dict(models)
        self._others: Mapping[str, Path] = {}
        self._caches = tuple(caches)

    def share(self, models: Mapping[str, Path]) -> None:
        """Share other models beside those that were given at first, which go before."""
        self._others = dict(models)

    @property
    def names(self) -> Sequence[str]:
        """The names of all models."""
        return sorted({*self._models, *self._others})

    def find(self, name: str) -> SharedModel | None:
        """Return a model's current files, or None if it is not shared.

        Raises NotShareable if they are missing, or cannot be sent.
        """
        path = self._models.get(name) or self._others.get(name)
        if path is None:
            return None
        try:
            files = [
                ModelFile(name, file, file.stat().st_size)
                for name, file in _files_at(path, self._caches)
            ]
        except OSError as error:
            raise NotShareable(f"{path}: {error.strerror or error}") from error
        return SharedModel(tuple(files))


def open_library(
    named: Sequence[tuple[str, Path]], caches: Iterable[Path] = ()
) -> Library:
    """Return the library of the models given on the command line.

    Contents that keep a model from being shared are logged: they change while the
    coordinator runs, and must not keep it from starting.

    Raises ConfigError if a name is invalid or repeated, or files are missing.
    """
    models: dict[str, Path] = {}
    for name, path in named:
        try:
            check_model_name(name)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
        if models.setdefault(name, path) != path:
            raise ConfigError(
                f"--share {name}: given twice, for {models[name]} and {path}"
            )
    library = Library(models, caches)
    for name in library.names:
        try:
            library.find(name)
        except UnshareableContents as error:
            log.warning("not shared model=%s reason=%r", name, str(error))
        except NotShareable as error:
            raise ConfigError(f"{name} cannot be shared: {error}") from error
    return library


def shareable_library(
    named: Sequence[tuple[str, Path]], caches: Iterable[Path] = ()
) -> Library:
    """Return the library of the models that can be shared; log why others cannot.

    A worker offers its models whether or not peers can copy them.
    """
    caches = tuple(caches)
    models = {}
    for name, path in named:
        try:
            open_library([(name, path)], caches)
        except ConfigError as error:
            log.warning("not shared model=%s reason=%r", name, str(error))
        else:
            models[name] = path
    return Library(models, caches)


def read_pieces(model: SharedModel) -> Generator[FilePiece, None, None]:
    """Yield the pieces of a model.

    An empty file is one empty piece, so that the peer creates it.

    Raises NotShareable if a file has changed in the meantime.
    """
    for file in model.files:
        try:
            with file.path.open("rb") as stream:
                for offset in range(0, max(file.size, 1), CHUNK):
                    length = min(CHUNK, file.size - offset)
                    data = stream.read(length)
                    if len(data) < length:
                        raise NotShareable(
                            f"{file.path} was truncated during the transfer"
                        )
                    last = offset + length == file.size
                    yield FilePiece(file.name, offset, data, last)
                if stream.read(1):
                    raise NotShareable(f"{file.path} has grown during the transfer")
        except OSError as error:
            raise NotShareable(f"{file.path}: {error.strerror or error}") from error


def _files_at(path: Path, caches: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return the files of the model at a path, ordered by name, without links.

    Omits hidden files.  Rejects models with folders, which other programs cannot
    receive.
    """
    if not path.is_dir():
        projector = projector_of(path)
        files = sorted([*parts_of(path), *([projector] if projector else ())])
        if missing := [each for each in files if not each.exists()]:
            raise NotShareable(f"{missing[0]}: no such file")
        # The user named the file itself, whatever it links to.
        folders = [path.parent, path.resolve().parent]
    else:
        files = sorted(
            (each for each in path.iterdir() if not each.name.startswith(".")),
            key=lambda each: each.name,
        )
        folders = [path]
        if not files:
            raise NotShareable(f"{path} is empty")
    if len(files) > FILES_MAX:
        raise UnshareableContents(f"{path} has more than {FILES_MAX} files")
    shared = [each.resolve() for each in (*folders, *caches, *_hub_blobs(path))]
    return [(file.name, _shared_file(file, shared)) for file in files]


def _shared_file(file: Path, folders: Sequence[Path]) -> Path:
    """Return the path of a file without links, which is below one of the folders."""
    if file.is_dir():
        raise UnshareableContents(
            f"{file} is a folder, and a shared model must be a folder of files; "
            "share one without it"
        )
    if not file.is_file():
        raise UnshareableContents(f"{file} is not a file")
    try:
        check_file_name(file.name)
    except InvalidRequest as error:
        raise UnshareableContents(f"{error}; rename it") from error
    target = file.resolve()
    if not any(target.is_relative_to(folder) for folder in folders):
        raise UnshareableContents(
            f"{file} is a link to {target}, outside the folder and all known caches of "
            "models; copy the file"
        )
    return target


def _hub_blobs(path: Path) -> list[Path]:
    """Return where the files of a snapshot of Hugging Face's hub lie.

    Source: huggingface_hub, "Understand caching": ``models--ORG--NAME/snapshots/
    REVISION`` has links to ``models--ORG--NAME/blobs``.  The hub may be in any folder.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    snapshots, repository = folder.parent, folder.parent.parent
    in_hub = snapshots.name == "snapshots" and repository.name.startswith("models--")
    return [repository / "blobs"] if in_hub else []


MODELS_MAX = 10_000  # models that are listed


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine; ``gguf`` is its file for the embedded engine."""

    name: str
    path: Path
    size: int  # bytes
    files: int
    gguf: Path | None


def stored_models(folder: Path) -> list[StoredModel]:
    """Return the models in a folder, ordered by name: folders of files, and files.

    Raises ConfigError if it is not readable.
    """
    try:
        found = list(_models_below(folder, "", PARTS_MAX)) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(found, key=lambda each: each.name)[:MODELS_MAX]


def loadable_files(
    folder: Path, folders: Iterable[Files]
) -> Iterator[tuple[str, Path]]:
    """Yield the GGUF files of this machine, with their models' names.

    These are the names of ``stored_models(folder)``, and elsewhere those of the files.

    Raises ConfigError if ``folder`` is not readable.
    """
    stored = {each.gguf: each.name for each in stored_models(folder)}
    for path, name in stored.items():
        if path is not None:
            yield name, path
    for path in find_models(folders):
        if path not in stored:
            yield path.stem, path


def stored_model(path: Path, name: str) -> StoredModel:
    """Return the model in a folder of its own."""
    files = [each for each in _visible(path) if each.is_file()][:FILES_MAX]
    gguf = sorted(find_models([Files(path, "*.gguf")]))
    return StoredModel(
        name,
        path,
        sum(each.stat().st_size for each in files),
        len(files),
        gguf[0] if gguf else None,
    )


def remove_model(folder: Path, model: StoredModel) -> None:
    """Delete a model of ``stored_models(folder)``, and folders that it leaves empty.

    A link is deleted, and what it leads to stays.  Raises ConfigError if its folder has
    folders, which may be other models, or if it cannot be deleted.
    """
    try:
        if model.path.is_file():
            for each in parts_of(model.path):
                each.unlink()
        elif model.path.is_symlink():
            model.path.unlink()
        elif inner := [each for each in _visible(model.path) if each.is_dir()]:
            raise ConfigError(
                f"{model.path} has the folder {inner[0].name}, which may be another "
                "model: delete it yourself"
            )
        else:
            shutil.rmtree(model.path)
        for parent in list(model.path.parents)[: len(Path(model.name).parts) - 1]:
            if parent != folder and not any(parent.iterdir()):
                parent.rmdir()
    except OSError as error:
        raise ConfigError(f"cannot delete {model.path}: {error.strerror}") from error


def _models_below(folder: Path, prefix: str, depth: int) -> Iterator[StoredModel]:
    for each in _visible(folder):
        name = prefix + each.name
        if each.is_file() and each.suffix == ".gguf" and not prefix:
            parts = parts_of(each)
            if each == parts[0] and all(part.is_file() for part in parts):
                size = sum(part.stat().st_size for part in parts)
                yield StoredModel(each.stem, each, size, len(parts), each)
        elif each.is_dir() and _is_name(name):
            if any(inner.is_file() for inner in _visible(each)):
                yield stored_model(each, name)
            elif depth > 1:
                yield from _models_below(each, f"{name}/", depth - 1)


def _visible(folder: Path) -> Iterator[Path]:
    return (each for each in folder.iterdir() if not each.name.startswith("."))


def _is_name(name: str) -> bool:
    try:
        check_model_name(name)
    except InvalidRequest:
        return False
    return True
