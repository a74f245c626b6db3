"""A model that is being fetched: what is held of it on disk, and where the rest goes.

It lies in a hidden folder beside the models, named by its address, and stays there when
the process is killed; at the end it is renamed.  There is no journal: a chunk is held
if its bytes have its hash.

All of it blocks on the disk: do not call it on the event loop.
"""

import os
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import file_digest, sha256
from pathlib import Path

from shoal.config.private_files import try_lock
from shoal.domain.errors import ConfigError, PeerError, Unavailable
from shoal.models.file_hashes import FileHashes
from shoal.models.manifest import CHUNK, DIGEST, UNKNOWN, Manifest, chunks_of
from shoal.models.model_folder import (
    FILES,
    LOCK,
    check_space,
    check_target,
    interrupted,
    move_into_place,
    unwritable,
)
from shoal.models.names import model_folder_name

PARTIAL = ".partial"  # hidden folder beside the models
DIGESTS = "digests"  # of the chunks of which the manifest has none
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class PartialModel:
    """A model of a manifest, on its way into ``folder``.

    The caller must call ``close`` after ``begin``, in any case.  ``replace`` permits
    the replacement of an existing model.
    """

    def __init__(
        self, folder: Path, model: str, manifest: Manifest, *, replace: bool = False
    ) -> None:
        self.target = folder / model_folder_name(model)
        self.manifest = manifest
        self._folder = folder
        self._name = model_folder_name(model)
        self._staged = folder / PARTIAL / manifest.root.hex()
        self._replace = replace
        self._open: tuple[int, int] | None = None  # a file's index, and its descriptor
        self._lock = ExitStack()

    @property
    def wanted(self) -> range:
        """All chunks, by number."""
        return range(self.manifest.chunks)

    def begin(self, donors: Iterable[Path], hashes: FileHashes) -> set[int]:
        """Open the partial model; return the chunks that are held already.

        ``donors`` are files that may have chunks of it, which are copied: those of the
        size of one of its files, and those whose ``hashes`` are known.

        Raises ConfigError if the model exists and must not be replaced, another process
        fetches it, the disk is too full, or the folder is not writable.
        """
        check_target(self.target, replace=self._replace)
        try:
            (self._staged / FILES).mkdir(parents=True, exist_ok=True)
            for _ in interrupted(self._folder / PARTIAL):
                pass  # its chunks stay
            lock_file = self._lock.enter_context(
                (self._staged / LOCK).open("a+b", buffering=0)
            )
            if not try_lock(lock_file):
                raise ConfigError(
                    f"another process is fetching {self._name} into {self._folder}: "
                    "wait for it, or stop it"
                )
            lock_file.truncate(0)
            lock_file.write(self._name.encode())
            held = self._held()
            size = self.manifest.place
            check_space(
                self._folder,
                self.manifest.size - sum(size(each).size for each in held),
            )
            held |= self._copy_chunks(held, [*donors, *self._earlier_files()], hashes)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        return held

    def write(
        self,
        chunks: Iterable[tuple[int, bytes | memoryview]],
        checked: Container[int] = (),
    ) -> set[int]:
        """Write the chunks that have their hashes; return those.

        Those ``checked`` are known to have them.

        Raises ConfigError if the disk fails or is full.
        """
        right = set()
        for chunk, data in chunks:
            if chunk in checked or self.manifest.has_hash(chunk, data):
                self._write(chunk, data)
                right.add(chunk)
        return right

    def read(self, chunk: int, into: memoryview) -> int:
        """Read a chunk that is held; return its size.  Raises Unavailable."""
        file, offset, size = self.manifest.place(chunk)
        try:
            with self._path(file).open("rb", buffering=0) as stream:
                stream.seek(offset)
                return stream.readinto(into[:size]) or 0
        except OSError as error:
            raise Unavailable(f"it cannot read the chunk: {error.strerror}") from error

    def commit(self) -> Path:
        """Move the complete model to its folder; return that.

        Raises ConfigError if the disk fails, or the model exists by now; PeerError if
        its files are not those of a manifest that lacks hashes of chunks, and then
        deletes what was fetched.
        """
        try:
            for number, file in enumerate(self.manifest.files):
                descriptor = self._descriptor(number)
                os.ftruncate(descriptor, file.size)
                os.fsync(descriptor)
            self._close_file()
            if self.manifest.is_checked_late:
                self._check_files()
            (self._staged / DIGESTS).unlink(missing_ok=True)
            move_into_place(self._staged, self.target, replace=self._replace)
            self._remove_earlier()
            self._lock.close()  # Windows cannot remove an open file
            shutil.rmtree(self._staged, ignore_errors=True)
            with suppress(OSError):  # others are fetched
                (self._folder / PARTIAL).rmdir()
        except OSError as error:
            raise unwritable(self._folder, error) from error
        return self.target

    def close(self) -> None:
        """Close all files; what was not committed stays, for the next fetch."""
        with suppress(OSError):
            self._close_file()
        self._lock.close()

    def _check_files(self) -> None:
        for number, file in enumerate(self.manifest.files):
            with self._path(number).open("rb") as stream:
                digest = file_digest(stream, "sha256").digest()
            if digest != file.sha256:
                shutil.rmtree(self._staged / FILES, ignore_errors=True)
                raise PeerError(
                    f"{file.name} arrived damaged: its SHA-256 is {digest.hex()}, "
                    f"expected {file.sha256.hex()}"
                )

    def _noted_digest(self, notes: bytes, chunk: int, digest: bytes) -> bytes:
        """Return the hash of a chunk: that in the manifest, or of what was written."""
        if digest != UNKNOWN:
            return digest
        return notes[chunk * DIGEST : (chunk + 1) * DIGEST]

    def _note_digest(self, chunk: int, data: bytes | memoryview) -> None:
        """Note the hash of a chunk of which the manifest has none, for a restart."""
        if self.manifest.digest(chunk) == UNKNOWN:
            descriptor = os.open(
                self._staged / DIGESTS, os.O_WRONLY | os.O_CREAT, 0o666
            )
            try:
                os.lseek(descriptor, chunk * DIGEST, os.SEEK_SET)
                os.write(descriptor, sha256(data).digest())
            finally:
                os.close(descriptor)

    def _held(self) -> set[int]:
        """Return the chunks whose bytes are there, after a process was killed."""
        names = {each.name for each in self.manifest.files}
        for path in (self._staged / FILES).iterdir():
            if path.name not in names or path.is_symlink():
                path.unlink()
        held: set[int] = set()
        notes, first = b"", 0
        with suppress(FileNotFoundError):
            notes = (self._staged / DIGESTS).read_bytes()
        for number, file in enumerate(self.manifest.files):
            with suppress(FileNotFoundError), self._path(number).open("rb") as stream:
                for at in range(chunks_of(file.size)):
                    data = stream.read(min(CHUNK, file.size - at * CHUNK))
                    digest = file.chunks[at * DIGEST : (at + 1) * DIGEST]
                    digest = self._noted_digest(notes, first + at, digest)
                    if sha256(data).digest() == digest:
                        held.add(first + at)
            first += chunks_of(file.size)
        return held

    def _copy_chunks(
        self, held: set[int], donors: Sequence[Path], hashes: FileHashes
    ) -> set[int]:
        """Copy chunks that are not held from other files; return their numbers."""
        wanted: dict[bytes, list[int]] = {}
        for chunk, _ in self.manifest.places():
            if chunk not in held and self.manifest.digest(chunk) != UNKNOWN:
                wanted.setdefault(self.manifest.digest(chunk), []).append(chunk)
        sizes = {each.size for each in self.manifest.files}
        copied: set[int] = set()
        for donor in donors:
            if not wanted:
                break
            known = hashes.known(donor)
            with suppress(OSError), donor.open("rb", buffering=0) as stream:
                if known is None and donor.stat().st_size not in sizes:
                    continue
                for data in _pieces(stream.fileno(), known, wanted):
                    chunks = wanted.pop(sha256(data).digest(), ())
                    copied |= self.write((each, data) for each in chunks)
        return copied

    def _write(self, chunk: int, data: bytes | memoryview) -> None:
        try:
            file, offset, _ = self.manifest.place(chunk)
            descriptor = self._descriptor(file)
            os.lseek(descriptor, offset, os.SEEK_SET)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            _begin_writing_out(descriptor, offset, len(data))
            self._note_digest(chunk, data)
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def _earlier_files(self) -> Iterator[Path]:
        """Yield the files of what was fetched of the model with other contents."""
        if self.target.is_dir():
            yield from (each for each in self.target.iterdir() if each.is_file())
        for staged in self._earlier():
            yield from (staged / FILES).iterdir()

    def _earlier(self) -> Iterator[Path]:
        for staged in (self._folder / PARTIAL).iterdir():
            with suppress(OSError):
                if (
                    staged != self._staged
                    and (staged / LOCK).read_text() == self._name
                    and (staged / FILES).is_dir()
                ):
                    yield staged

    def _remove_earlier(self) -> None:
        for staged in [*self._earlier()]:
            with suppress(OSError), (staged / LOCK).open("r+b") as lock_file:
                if try_lock(lock_file):
                    shutil.rmtree(staged, ignore_errors=True)

    def _descriptor(self, file: int) -> int:
        if self._open is None or self._open[0] != file:
            self._close_file()
            flags = os.O_RDWR | os.O_CREAT | _NO_LINKS
            self._open = (file, os.open(self._path(file), flags, 0o666))
        return self._open[1]

    def _close_file(self) -> None:
        if self._open is not None:
            _, descriptor = self._open
            self._open = None
            os.close(descriptor)

    def _path(self, file: int) -> Path:
        return self._staged / FILES / self.manifest.files[file].name


def remove_partial(folder: Path, model: str) -> bool:
    """Delete what was fetched of a model, unless a process fetches it now.

    Returns whether there was any.
    """
    removed = False
    for lock in [*folder.glob(f"{PARTIAL}/*/{LOCK}")]:
        with suppress(OSError), lock.open("r+b") as lock_file:
            name = lock_file.read().decode()
            if name == model.replace(":", "-") and try_lock(lock_file):
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed = True
    return removed


def _begin_writing_out(descriptor: int, offset: int, size: int) -> None:
    """Let the system begin to write what is in its memory to the disk."""
    if sys.platform == "linux":
        # Of what is not on the disk yet, nothing is forgotten.  It is only advice.
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _pieces(
    descriptor: int, known: bytes | None, wanted: dict[bytes, list[int]]
) -> Iterator[bytes]:
    """Yield the chunks of a file that may be wanted: all, if its hashes are unknown."""
    size = os.fstat(descriptor).st_size
    for number in range(chunks_of(size)):
        digest = None if known is None else known[number * DIGEST :][:DIGEST]
        if digest is None or digest in wanted:
            os.lseek(descriptor, number * CHUNK, os.SEEK_SET)
            yield os.read(descriptor, CHUNK)
