"""Large values by their SHA-256, in files: the least recently used go when it is full.

A value stands in ``FOLDER/<2 hex>/<62 hex>``, the hexadecimal digits of its digest.
"""

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from itertools import count
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Protocol

from shoal.domain.errors import InvalidRequest, NotFound, StoreError

SIZE_MAX = 8 << 30  # bytes of all values, unless told otherwise
BLOB_MAX = 256 << 20  # bytes of one
TEMPORARY = ".part"


class BlobStore(Protocol):
    """Where large values are kept.  Whatever takes long is for another thread."""

    def has(self, digest: bytes) -> bool:
        """Say whether a value is here; it counts as used, so that it stays."""
        ...

    def read(self, digest: bytes) -> memoryview:
        """Return a value, without a copy.  Raises NotFound."""
        ...

    def keep(self, data: bytes | memoryview, expected: bytes | None = None) -> bytes:
        """Keep a value; return its digest.  Takes long; for any thread.

        Raises InvalidRequest if it is not the ``expected`` one, StoreError.
        """
        ...

    def pin(self, digest: bytes) -> None:
        """Let nothing make a value go, as often as it is pinned more than unpinned."""
        ...

    def unpin(self, digest: bytes) -> None:
        """Take back one ``pin``."""
        ...


def check_blob(data: bytes | memoryview, expected: bytes | None) -> bytes:
    """Return the digest of a value.  Raises InvalidRequest if another is expected."""
    digest = hashlib.sha256(data).digest()
    if expected is not None and digest != expected:
        raise InvalidRequest(
            f"what came has the SHA-256 {digest.hex()}, expected {expected.hex()}"
        )
    return digest


def blob_not_found(digest: bytes) -> NotFound:
    """Return the error for a value that is not here."""
    return NotFound(
        f"{digest.hex()} is not here: it never was, or made room for others"
    )


class BlobFiles:
    """Values in a folder that no other process writes to.

    Args:
        size_max: bytes that all values may have together, with those pinned.
    """

    def __init__(self, folder: Path, size_max: int = SIZE_MAX) -> None:
        self._folder = folder
        self._size_max = size_max
        # The index is looked at by the event loop while the store's thread keeps what
        # is too large for a row, so that neither waits for the other's disk.
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the unused first
        self._size = 0
        self._pins: Counter[bytes] = Counter()
        self._numbers = count()  # of files that are being written

    def open(self) -> None:
        """Find what an earlier process kept.  Takes long.  Raises StoreError."""
        found = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._folder.glob("??/*"):
                if path.name.endswith(TEMPORARY):
                    path.unlink()
                    continue
                about = path.stat()
                digest = bytes.fromhex(path.parent.name + path.name)
                found.append((about.st_mtime, digest, about.st_size))
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder}: {error}") from error
        for _, digest, size in sorted(found):
            self._enter(digest, size)

    def has(self, digest: bytes) -> bool:
        with self._lock:
            known = digest in self._sizes
            if known:
                self._sizes.move_to_end(digest)
            return known

    def read(self, digest: bytes) -> memoryview:
        if not self.has(digest):
            raise blob_not_found(digest)
        try:
            with self._path(digest).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped.
                return memoryview(
                    mmap(file.fileno(), 0, access=ACCESS_READ) if size else b""
                )
        except OSError as error:
            raise blob_not_found(digest) from error

    def keep(self, data: bytes | memoryview, expected: bytes | None = None) -> bytes:
        digest = check_blob(data, expected)
        if not self.has(digest):
            try:
                self._write(self._path(digest), data)
            except OSError as error:
                raise StoreError(f"{self._folder}: {error}") from error
            for each in self._enter(digest, len(data)):
                self._path(each).unlink(missing_ok=True)
        return digest

    def pin(self, digest: bytes) -> None:
        with self._lock:
            self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        with self._lock:
            self._pins[digest] -= 1
            if self._pins[digest] <= 0:
                del self._pins[digest]

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        part = path.with_name(f"{next(self._numbers)}{TEMPORARY}")
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                # Jobs that are accepted are on disk, with all that they need.
                os.fsync(file.fileno())
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _enter(self, digest: bytes, size: int) -> list[bytes]:
        """Note a value; return those that are to go for it."""
        with self._lock:
            if digest not in self._sizes:
                self._size += size
            self._sizes[digest] = size
            self._sizes.move_to_end(digest)
            leaving: list[bytes] = []
            if self._size > self._size_max:
                for each, its in self._sizes.items():
                    if each in self._pins or each == digest:
                        continue
                    leaving.append(each)
                    self._size -= its
                    if self._size <= self._size_max:
                        break
                for each in leaving:
                    del self._sizes[each]
            return leaving

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name[2:]


class MemoryBlobs:
    """Keeps values in a dictionary until the process ends, and evicts none."""

    def __init__(self) -> None:
        self._blobs: dict[bytes, bytes] = {}

    def has(self, digest: bytes) -> bool:
        return digest in self._blobs

    def read(self, digest: bytes) -> memoryview:
        if digest not in self._blobs:
            raise blob_not_found(digest)
        return memoryview(self._blobs[digest])

    def keep(self, data: bytes | memoryview, expected: bytes | None = None) -> bytes:
        digest = check_blob(data, expected)
        self._blobs.setdefault(digest, bytes(data))
        return digest

    def pin(self, digest: bytes) -> None:
        pass

    def unpin(self, digest: bytes) -> None:
        pass
