"""The large tensors of some layers of a model, in the form of rpc-server's cache.

That names a tensor by the FNV-1a-64 of its bytes, which protects from nothing, and does
not look at what it reads.  So this folder is for this program alone to write, and it
has only what has the hashes of a manifest.  Smaller tensors are no part of the cache:
the machine that runs the model sends them.

All of it blocks on the disk: do not call it on the event loop.  Source: llama.cpp,
``ggml-rpc.cpp`` (``HASH_THRESHOLD``, ``fnv_hash``, ``get_cached_file``).
"""

import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from shoal.config.private_files import open_lock_file, replace_private, try_lock
from shoal.domain.errors import ConfigError, PeerError
from shoal.engines.gguf_header import InvalidGguf, TensorPlace, layer_of, tensors_in
from shoal.models.file_hashes import FileHashes
from shoal.models.manifest import CHUNK, Manifest
from shoal.models.model_folder import check_space, unwritable

LARGE = 10 << 20  # bytes; larger tensors are cached
CACHE = "rpc"  # the folder in which rpc-server looks for them
INDEX, LOCK, PART = "index.json", "lock", ".part"
HEADER_FIRST = 1  # chunks of a file that are read first, then four times as many
GROWTH = 4
SUFFIX = ".gguf"


def is_installed() -> bool:
    """Return whether the package is there that hashes as llama.cpp does."""
    return find_spec("fnv_c") is not None


class _Index(msgspec.Struct, frozen=True):
    """The tensors of a manifest that are whole: their names in the cache, by key."""

    root: str  # hexadecimal
    tensors: dict[str, str]


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor; ``missing`` are the chunks of it that have not been written."""

    key: str
    place: TensorPlace
    missing: set[int]


class TensorCache:
    """The tensors of ``layers`` that are fetched into a folder, as a ``ChunkStore``.

    Which they are is read from the headers of the files, which are fetched first.
    Together they have at most ``room`` bytes.  A tensor that is whole stays for later
    fetches, until other layers are fetched.  ``progress`` receives, in the thread that
    calls ``begin``, the bytes that donors had, and those that are wanted; what it
    raises ends that.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        layers: range,
        room: int,
        progress: Callable[[int, int], None] = lambda copied, wanted: None,
    ) -> None:
        self.manifest = manifest
        self.wanted: set[int] = set()
        self._folder = folder
        self._layers = layers
        self._room = room
        self._progress = progress
        self._lock = ExitStack()
        self._index: dict[str, str] = {}  # names in the cache, by key
        self._headers: dict[int, list[bytes | None]] = {}  # chunks of files, in order
        self._of_chunk: dict[int, list[_Tensor]] = {}

    def begin(self, donors: Iterable[Path], hashes: FileHashes) -> set[int]:
        """Open the folder; return the chunks that were copied from ``donors``.

        These are files that may be those of the manifest.  Raises ConfigError if the
        folder is in use or not writable, and PeerError if the manifest has no hashes.
        """
        if self.manifest.is_checked_late:
            raise PeerError("the manifest has no hashes of the model's chunks")
        try:
            (self._folder / CACHE).mkdir(parents=True, exist_ok=True)
            lock_file = self._lock.enter_context(open_lock_file(self._folder / LOCK))
            if not try_lock(lock_file):
                raise ConfigError(f"another process fetches layers into {self._folder}")
            self._read_index()
        except OSError as error:
            raise unwritable(self._folder, error) from error
        for number, file in enumerate(self.manifest.files):
            if file.name.endswith(SUFFIX) and file.size:
                self._want_header(number, HEADER_FIRST)
        held: set[int] = set()
        for donor in donors:
            held |= self._copy(donor, held)
        return held

    def write(
        self,
        chunks: Iterable[tuple[int, bytes | memoryview]],
        checked: Container[int] = (),
    ) -> set[int]:
        """Keep the chunks that have their hashes, or are ``checked``; return those.

        Raises ConfigError if the disk fails or is full, a header is damaged, or there
        is no room for the tensors.
        """
        right = set()
        try:
            for chunk, data in chunks:
                if chunk in checked or self.manifest.has_hash(chunk, data):
                    self._write(chunk, data)
                    right.add(chunk)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        return right

    def commit(self) -> Path:
        """Return the folder, which has all the tensors."""
        return self._folder

    def close(self) -> None:
        """Close the folder; tensors that are whole stay."""
        self._lock.close()

    def _read_index(self) -> None:
        """Read which tensors are whole; remove all that is no part of them."""
        root = self.manifest.root.hex()
        with suppress(FileNotFoundError, ValueError):
            kept = msgspec.json.decode((self._folder / INDEX).read_bytes(), type=_Index)
            if kept.root == root:
                self._index = kept.tensors
        names = {*self._index.values()}
        for path in (self._folder / CACHE).iterdir():
            if path.name not in names:
                path.unlink()

    def _want_header(self, file: int, count: int) -> None:
        chunks = self.manifest.chunks_at(file, 0, self.manifest.files[file].size)
        chunks = chunks[:count]
        before = self._headers.get(file, [])
        self._headers[file] = [*before, *[None] * (len(chunks) - len(before))]
        self.wanted.update(chunks)

    def _copy(self, donor: Path, held: set[int]) -> set[int]:
        """Copy the wanted chunks that a file has in their places; return those."""
        copied: set[int] = set()
        with suppress(OSError), donor.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            while todo := [
                (chunk, place)
                for chunk in sorted(self.wanted - held - copied)
                if self.manifest.files[(place := self.manifest.place(chunk)).file].size
                == size
            ]:
                for chunk, place in todo:
                    stream.seek(place.offset)
                    if not self.write([(chunk, stream.read(place.size))]):
                        return copied  # it is another file
                    copied.add(chunk)
                    self._progress(len(copied) * CHUNK, len(self.wanted) * CHUNK)
        return copied

    def _write(self, chunk: int, data: bytes | memoryview) -> None:
        place = self.manifest.place(chunk)
        if (header := self._headers.get(place.file)) is None:
            self._store(chunk, data)
        else:
            header[place.offset // CHUNK] = bytes(data)
            self._read_header(place.file, header)

    def _read_header(self, file: int, header: list[bytes | None]) -> None:
        """Find the tensors, if the header is there, or want more of the file."""
        chunks = [each for each in header if each is not None]
        if len(chunks) < len(header):
            return
        entry = self.manifest.files[file]
        try:
            places = tensors_in(b"".join(chunks), entry.size)
        except InvalidGguf as error:
            raise InvalidGguf(f"{entry.name} {error}") from None
        if places is None:
            self._want_header(file, GROWTH * len(header))
            return
        del self._headers[file]
        self._plan(file, places)
        numbers = self.manifest.chunks_at(file, 0, len(chunks) * CHUNK)
        for chunk, data in zip(numbers, chunks, strict=True):
            self._store(chunk, data)

    def _plan(self, file: int, places: Mapping[str, TensorPlace]) -> None:
        """Want the tensors of a file, and forget those of other layers."""
        wanted = {
            f"{file}:{place.offset}:{place.size}": place
            for name, place in places.items()
            if place.size > LARGE and layer_of(name) in self._layers
        }
        for key in [*self._index]:
            if key.partition(":")[0] == str(file) and key not in wanted:
                name = self._index.pop(key)
                (self._folder / CACHE / name).unlink(missing_ok=True)
        self._room -= sum(place.size for place in wanted.values())
        if self._room < 0:
            raise ConfigError("the layers are larger than what is lent to the model")
        missing = {k: place for k, place in wanted.items() if k not in self._index}
        check_space(self._folder, sum(each.size for each in missing.values()))
        for key, place in missing.items():
            chunks = self.manifest.chunks_at(file, *place)
            tensor = _Tensor(key, place, {*chunks})
            for chunk in chunks:
                self._of_chunk.setdefault(chunk, []).append(tensor)
            self.wanted.update(chunks)

    def _store(self, chunk: int, data: bytes | memoryview) -> None:
        """Write what a chunk has of tensors."""
        offset = self.manifest.place(chunk).offset
        for tensor in self._of_chunk.pop(chunk, ()):
            begin, size = tensor.place
            skipped = max(0, begin - offset)
            part = self._part(tensor)
            with part.open("r+b" if part.exists() else "xb") as stream:
                stream.seek(max(0, offset - begin))
                stream.write(memoryview(data)[skipped : begin + size - offset])
            tensor.missing.discard(chunk)
            if not tensor.missing:
                self._finish(tensor)

    def _finish(self, tensor: _Tensor) -> None:
        """Name a tensor that is whole as rpc-server does."""
        from fnv_c import fnv1a_64

        part = self._part(tensor)
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
            # Whole in memory, as rpc-server has it, too, which has not begun.
            name = f"{fnv1a_64(stream.read()):016x}"
        part.replace(self._folder / CACHE / name)
        self._index[tensor.key] = name
        kept = _Index(self.manifest.root.hex(), self._index)
        replace_private(self._folder / INDEX, msgspec.json.encode(kept).decode())

    def _part(self, tensor: _Tensor) -> Path:
        return self._folder / CACHE / (tensor.key.replace(":", "-") + PART)
