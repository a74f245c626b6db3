"""The port for the contents of files: of clients' uploads, and of batches' results."""

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import BinaryIO, Protocol

from shoal.domain.errors import StoreError

PIECE = 1 << 20  # bytes that are copied at a time


class ContentStore(Protocol):
    """Contents by the ids of their files, to which no other process writes.

    All methods block, and may be called in any thread.
    """

    def open(self) -> dict[str, int]:
        """Delete what was not finished; return the sizes of the others, by their ids.

        Raises StoreError.
        """

    def set_aside(self, file_ids: Iterable[str]) -> str:
        """Remove contents that the database does not describe; return where they are.

        Raises StoreError.
        """

    def begin(self, file_id: str) -> "ContentWriter":
        """Begin to write the contents of a file.  Raises StoreError."""

    def has(self, file_id: str) -> bool:
        """Say whether a file has its contents.  Raises StoreError."""

    def read(self, file_id: str) -> BinaryIO:
        """Open the contents of a file to read them.

        Raises StoreError, as what is returned does.
        """

    def remove(self, file_id: str) -> None:
        """Delete the contents of a file; if that fails, the next start does it."""


class ContentWriter(Protocol):
    """Contents that are being written: call ``finish`` or ``discard``.

    All methods block.
    """

    @property
    def id(self) -> str: ...

    @property
    def size(self) -> int:
        """The bytes so far."""

    def write(self, data: bytes | memoryview) -> None:
        """Append to the contents.

        Raises StoreError, also while the disk is full; then discard them.
        """

    def finish(self) -> None:
        """Wait until the contents are on the disk, and can be found by their id.

        Raises StoreError; then discard them.
        """

    def discard(self) -> None:
        """Delete the contents, whether or not they are finished."""


class RangeReader(io.RawIOBase):
    """Reads contents of which any range can be fetched.

    ``read_range`` returns bytes from a place on: up to a number of them, and at least
    one.
    """

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read_range = read_range
        self._position = 0

    def buffered(self, size: int) -> BinaryIO:
        """Return a file that reads about so many bytes at a time."""
        return io.BufferedReader(self, size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = begins[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # RawIOBase
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        data = self._read_range(self._position, length)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def write_contents(
    target: ContentStore, file_id: str, pieces: Iterable[bytes | memoryview]
) -> None:
    """Write the contents of a file.  Blocks.

    Raises StoreError, also that of the pieces; then there are none.
    """
    writer = target.begin(file_id)
    try:
        for each in pieces:
            writer.write(each)
        writer.finish()
    except StoreError:
        writer.discard()
        raise


def copy_contents(source: ContentStore, target: ContentStore) -> int:
    """Copy all contents to another store; return their number.  It can be repeated.

    Blocks.  Raises StoreError.
    """
    ids = source.open()
    for each in ids:
        with source.read(each) as file:
            write_contents(target, each, iter(partial(file.read, PIECE), b""))
    return len(ids)
