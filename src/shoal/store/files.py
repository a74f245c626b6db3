"""Files that clients upload and that batches write: the port of what describes them.

Their contents are in a folder, see ``file_folder``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

FILES_MAX = 10_000  # of one owner: a list of them is read at once
RESULT_FILES = 2  # that a batch writes at most: they count while it is open


class FilePurpose(Enum):
    """What a file is for, as OpenAI names it."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of an owner.  Its size is in bytes, times are Unix seconds."""

    id: str
    owner: str
    name: str
    purpose: FilePurpose
    size: int
    created_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class FileFilter:
    """A filter and order of an owner's files; ``after`` is the last one seen."""

    owner: str
    purpose: FilePurpose | None = None
    after: str | None = None
    newest_first: bool = True


class FileStore(Protocol):
    """The files of all owners.  All methods raise StoreError."""

    async def add(self, new: StoredFile, total_max: int) -> None:
        """Add a file.

        Raises TooLarge if the owner would have more than ``total_max`` bytes, or more
        than FILES_MAX files with those that its open batches may write.
        """
        ...

    async def find(self, file_id: str) -> StoredFile | None: ...

    async def listed(self, wanted: FileFilter, limit: int) -> list[StoredFile]:
        """Return the first files that match, in the order of their creation."""
        ...

    async def size_of(self, owner: str) -> int:
        """Return the bytes of all files of an owner."""
        ...

    async def remove(self, file_id: str) -> bool:
        """Remove a file; return whether it was there.

        Raises InvalidRequest if a batch that has not ended reads it.
        """
        ...

    async def expired(self, at: float, limit: int) -> list[str]:
        """Return files that expired before a Unix time, without those in use."""
        ...

    async def known(self, ids: Collection[str]) -> set[str]:
        """Return which of these files there are."""
        ...
