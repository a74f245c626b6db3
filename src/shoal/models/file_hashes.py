"""The hashes of models' files, computed once for each file and kept on disk.

All of it blocks on the disk: do not call it on the event loop.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Event

import msgspec

from shoal.models.library import ModelFile, NotShareable, SharedModel
from shoal.models.manifest import CHUNK, DIGEST, ChunkPlace, FileEntry, Manifest

FOLDER = "hashes"  # of the data folder
ENTRIES_MAX = 1000  # files whose hashes are kept


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """The hashes of a file, and what shows that it is still the same."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: bytes
    chunks: bytes


class FileHashes:
    """Hashes of files, kept below a data folder; None: not kept.

    ``close`` ends a computation in another thread, and ``hashed`` counts the bytes that
    all of them have read.
    """

    def __init__(self, data: Path | None = None) -> None:
        self._folder = None if data is None else data / FOLDER
        self._closed = Event()
        self._addresses: dict[tuple[object, ...], str] = {}
        self.hashed = 0

    def close(self) -> None:
        """Let a computation, and later ones, fail."""
        self._closed.set()

    def manifest(self, model: SharedModel) -> Manifest:
        """Return the manifest of a model.

        Raises NotShareable if a file cannot be read, or changes meanwhile.
        """
        return Manifest(tuple(self._entry(file) for file in model.files))

    def address(self, files: Iterable[tuple[str, Path]]) -> str:
        """Return the address of a model of named files; empty: it is not known."""
        named, stamps = sorted(files), list[object]()
        try:
            for _, path in named:
                stamps += [identity(each.stat()) for each in (path, self._file(path))]
        except OSError:
            return ""
        key = (*named, *stamps)
        if key not in self._addresses:  # else large hashes would be read each time
            if len(self._addresses) >= ENTRIES_MAX:
                self._addresses.clear()
            self._addresses[key] = self._address(named)
        return self._addresses[key]

    def _address(self, named: Iterable[tuple[str, Path]]) -> str:
        entries = []
        for name, path in named:
            if (kept := self._kept(path, path.stat())) is None:
                return ""
            entries.append(FileEntry(name, kept.size, kept.sha256, kept.chunks))
        return Manifest(tuple(entries)).address

    def known(self, path: Path) -> bytes | None:
        """Return the hashes of a file's chunks, joined; None: they are not kept."""
        try:
            kept = self._kept(path, path.stat())
        except OSError:
            return None
        return None if kept is None else kept.chunks

    def _entry(self, file: ModelFile) -> FileEntry:
        try:
            with file.path.open("rb") as stream:
                about = os.fstat(stream.fileno())
                kept = self._kept(file.path, about)
                if kept is None:
                    whole, chunks = sha256(), []
                    while data := stream.read(CHUNK):
                        if self._closed.is_set():
                            raise NotShareable(f"{file.path}: this program ends")
                        whole.update(data)
                        chunks.append(sha256(data).digest())
                        self.hashed += len(data)
                    after = os.fstat(stream.fileno())
                    kept = _Kept(
                        *(str(file.path), *identity(about)),
                        *(whole.digest(), b"".join(chunks)),
                    )
                    if identity(after) != identity(about):
                        raise NotShareable(f"{file.path} changes while it is read")
                    self._keep(kept)
        except OSError as error:
            raise NotShareable(f"{file.path}: {error.strerror or error}") from error
        return FileEntry(file.name, kept.size, kept.sha256, kept.chunks)

    def _kept(self, path: Path, about: os.stat_result) -> _Kept | None:
        if self._folder is None:
            return None
        try:
            data = self._file(path).read_bytes()
            kept = msgspec.msgpack.decode(data, type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return None
        same = (kept.path, kept.size, kept.mtime_ns, kept.inode)
        return kept if same == (str(path), *identity(about)) else None

    def _keep(self, kept: _Kept) -> None:
        """Write hashes down; a full disk only means that they are computed again."""
        if self._folder is None:
            return
        file = self._file(Path(kept.path))
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            others = [*self._folder.iterdir()]
            if len(others) >= ENTRIES_MAX:
                min(others, key=lambda each: each.stat().st_mtime_ns).unlink()
            part.write_bytes(msgspec.msgpack.encode(kept))
            part.replace(file)
        except OSError:
            with suppress(OSError):
                part.unlink()

    def _file(self, path: Path) -> Path:
        assert self._folder is not None, "hashes are kept"
        return self._folder / sha256(os.fsencode(path)).hexdigest()[:DIGEST]


def identity(about: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file does: size, time of the change, and number."""
    return about.st_size, about.st_mtime_ns, about.st_ino


def read_chunk(
    path: Path, place: ChunkPlace, expected: tuple[int, int, int], into: memoryview
) -> int:
    """Read a chunk of a file whose identity is as ``expected``; return its size.

    Raises NotShareable if it is not the same file any more, or cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            if identity(os.fstat(stream.fileno())) != expected:
                raise NotShareable(f"{path} has changed")
            stream.seek(place.offset)
            size = stream.readinto(into[: place.size])
    except OSError as error:
        raise NotShareable(f"{path}: {error.strerror or error}") from error
    if size is None or size < place.size:
        raise NotShareable(f"{path} was truncated")
    return size
