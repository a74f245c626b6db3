"""Large values by their SHA-256, in files; the least recently used are evicted.

A value is stored in ``FOLDER/<2 hex>/<62 hex>``, the hexadecimal digits of its digest.
"""

import errno
import hashlib
import os
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from heapq import heapify, heappop, heapreplace
from itertools import count
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Protocol

from shoal.config.private_files import FOLDER_MODE, open_private, restrict, sync_folder
from shoal.domain.errors import InvalidRequest, NotFound, StoreError

BLOBS_FOLDER = "blobs"  # in the data folder
SIZE_MAX = 8 << 30  # bytes of all values, by default
BLOB_MAX = 256 << 20  # bytes of one
PART = ".part"  # of the name of a file that is being written

# Errors of the file system after which the same may succeed later.
TEMPORARY = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)


class BlobStore(Protocol):
    """A store of large values, by their SHA-256."""

    def open(self) -> None:
        """Find the values that there are.  Blocks.  Raises StoreError."""

    def has(self, digest: bytes) -> bool:
        """Return whether a value is stored; marks it as used."""

    def is_near(self, digest: bytes) -> bool:
        """Return whether reading a value does not wait for another machine."""

    def read(self, digest: bytes) -> memoryview:
        """Return a value without copying it.

        Blocks unless it is near.  Raises NotFound, StoreError.
        """

    def keep(
        self, data: bytes | memoryview, expected: bytes | None = None, owner: str = ""
    ) -> bytes:
        """Store a value of an owner; return its digest.  Blocks; thread-safe.

        Raises InvalidRequest if its digest is not the ``expected`` one, StoreError.
        """

    def pin(self, digest: bytes) -> None:
        """Protect a value from eviction until each ``pin`` has its ``unpin``."""

    def unpin(self, digest: bytes) -> None:
        """Undo one ``pin``."""


def check_blob(data: bytes | memoryview, expected: bytes | None) -> bytes:
    """Return the digest of a value.  Raises InvalidRequest if another is expected."""
    digest = hashlib.sha256(data).digest()
    if expected is not None and digest != expected:
        raise InvalidRequest(
            f"the received data has the SHA-256 {digest.hex()}, expected "
            f"{expected.hex()}"
        )
    return digest


def blob_not_found(digest: bytes) -> NotFound:
    """Return the error for a value that is not stored."""
    return NotFound(f"{digest.hex()} is not stored: it never was, or it was evicted")


def disk_error(error: OSError, path: Path) -> StoreError:
    """Return the error for a file or folder that cannot be read or written."""
    temporary = error.errno in TEMPORARY
    return StoreError(error.strerror or str(error), str(path), temporary=temporary)


class BlobIndex:
    """Which values there are, their sizes, and which ones make room for others.

    Those of the owner with the most bytes go first: no key evicts what is another's as
    long as it has more itself.  Thread-safe: the event loop reads the index while the
    store's thread writes large values.

    Args:
        size_max: total bytes of all values, including the pinned.
    """

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._lock = threading.Lock()  # never held during disk access
        self._owners: dict[bytes, str] = {}
        # By owner, least recently used first.
        self._sizes: defaultdict[str, OrderedDict[bytes, int]] = defaultdict(
            OrderedDict
        )
        self._totals: Counter[str] = Counter()
        self._pins: Counter[bytes] = Counter()

    def digests(self) -> list[bytes]:
        """Return the digests of all values."""
        with self._lock:
            return [*self._owners]

    def has(self, digest: bytes) -> bool:
        """Return whether there is a value; marks it as used."""
        with self._lock:
            owner = self._owners.get(digest)
            if owner is None:
                return False
            self._sizes[owner].move_to_end(digest)
            return True

    def pin(self, digest: bytes) -> None:
        with self._lock:
            self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        with self._lock:
            self._pins[digest] -= 1
            if self._pins[digest] <= 0:
                del self._pins[digest]

    def add(self, digest: bytes, size: int, owner: str) -> None:
        """Add a value; those found at a start have no owner."""
        with self._lock:
            # Two threads may have written it.
            owner = self._owners.setdefault(digest, owner)
            if digest not in self._sizes[owner]:
                self._totals[owner] += size
            self._sizes[owner][digest] = size
            self._sizes[owner].move_to_end(digest)

    def enter(self, digest: bytes, size: int, owner: str) -> list[bytes]:
        """Add a value; return those that are evicted, which the caller deletes."""
        self.add(digest, size, owner)
        with self._lock:
            leaving: list[bytes] = []
            excess = self._totals.total() - self._size_max
            candidates = self._evictable(digest)
            while excess > 0 and (each := next(candidates, None)) is not None:
                leaving.append(each)
                excess -= self._sizes[self._owners[each]][each]
            for each in leaving:
                its = self._owners.pop(each)
                self._totals[its] -= self._sizes[its].pop(each)
                if not self._sizes[its]:
                    del self._sizes[its], self._totals[its]
            return leaving

    def _evictable(self, new: bytes) -> Iterator[bytes]:
        """Yield values that are not pinned, in the order in which they are evicted."""
        heap = [
            (-total, owner, iter(self._sizes[owner]))
            for owner, total in self._totals.items()
        ]
        heapify(heap)
        while heap:
            left, owner, values = heap[0]
            # Each value is examined once: many may be pinned, and many may leave.
            each = next((x for x in values if x not in self._pins and x != new), None)
            if each is None:
                heappop(heap)
            else:
                size = self._sizes[owner][each]
                heapreplace(heap, (left + size, owner, values))
                yield each


class BlobFiles:
    """Values in a folder to which no other process writes.

    Args:
        size_max: total bytes of all values, including the pinned.
    """

    def __init__(self, folder: Path, size_max: int = SIZE_MAX) -> None:
        self._folder = folder
        self._index = BlobIndex(size_max)
        self._numbers = count()  # of files that are being written

    def open(self) -> None:
        found = []
        try:
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            for folder in (self._folder, *self._folder.glob("??")):
                restrict(folder)
            for path in self._folder.glob("??/*"):
                if path.name.endswith(PART):
                    path.unlink()
                    continue
                restrict(path)
                about = path.stat()
                digest = bytes.fromhex(path.parent.name + path.name)
                found.append((about.st_mtime, digest, about.st_size))
        except (OSError, ValueError) as error:
            raise StoreError(str(error), str(self._folder)) from error
        for _, digest, size in sorted(found):
            self._index.add(digest, size, "")

    def digests(self) -> list[bytes]:
        """Return the digests of all values."""
        return self._index.digests()

    def has(self, digest: bytes) -> bool:
        return self._index.has(digest)

    def is_near(self, digest: bytes) -> bool:
        return True

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

    def keep(
        self, data: bytes | memoryview, expected: bytes | None = None, owner: str = ""
    ) -> bytes:
        digest = check_blob(data, expected)
        if not self.has(digest):
            try:
                self._write(self._path(digest), data)
            except OSError as error:
                raise disk_error(error, self._folder) from error
            for each in self._index.enter(digest, len(data), owner):
                self._path(each).unlink(missing_ok=True)
        return digest

    def pin(self, digest: bytes) -> None:
        self._index.pin(digest)

    def unpin(self, digest: bytes) -> None:
        self._index.unpin(digest)

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        with suppress(FileExistsError):
            path.parent.mkdir(mode=FOLDER_MODE)
            sync_folder(self._folder)
        part = path.with_name(f"{next(self._numbers)}{PART}")
        try:
            with open(part, "xb", opener=open_private) as file:
                file.write(data)
                file.flush()
                # An accepted job is on disk together with its large values.
                os.fsync(file.fileno())
            part.rename(path)
            sync_folder(path.parent)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name[2:]


class MemoryBlobs:
    """Keeps values in a dictionary until the process ends, and evicts none."""

    def __init__(self) -> None:
        self._blobs: dict[bytes, bytes] = {}

    def open(self) -> None:
        pass

    def has(self, digest: bytes) -> bool:
        return digest in self._blobs

    def is_near(self, digest: bytes) -> bool:
        return True

    def read(self, digest: bytes) -> memoryview:
        if digest not in self._blobs:
            raise blob_not_found(digest)
        return memoryview(self._blobs[digest])

    def keep(
        self, data: bytes | memoryview, expected: bytes | None = None, owner: str = ""
    ) -> bytes:
        digest = check_blob(data, expected)
        self._blobs.setdefault(digest, bytes(data))
        return digest

    def pin(self, digest: bytes) -> None:
        pass

    def unpin(self, digest: bytes) -> None:
        pass
