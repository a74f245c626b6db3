"""Batches, the results of their lines, and clients' files: the ports.

A result stays until the batch has ended and its results are in files.  Clients upload
files and batches write them; their contents are elsewhere, see ``contents``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

FILES_MAX = 10_000  # of one owner: a list of them is read at once
RESULT_FILES = 2  # that a batch writes at most: they count while it is open


BATCH_ID_LENGTH = 30  # characters of the id of a batch
RESULTS_AT_ONCE = 8 << 20  # bytes that are read or written together
RESULT_COST = 1 << 10  # bytes that a result counts at least: the row has a price, too
BATCHES_OPEN_MAX = 50  # of one owner: each is a task that reads lines


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
    """A filter and order of an owner's files; ``after`` is the last place seen."""

    owner: str
    purpose: FilePurpose | None = None
    after: int | None = None
    newest_first: bool = True


class ListPlace(NamedTuple):
    """The place of an owner's file or batch in lists: a number in their order."""

    owner: str
    number: int


class FileStore(Protocol):
    """The files of all owners.  All methods raise StoreError."""

    async def add(self, new: StoredFile, total_max: int) -> None:
        """Add a file.

        Raises TooLarge if the owner would have more than ``total_max`` bytes, or more
        than FILES_MAX files with those that its open batches may write.
        """

    async def find(self, file_id: str) -> StoredFile | None: ...

    async def place(self, file_id: str) -> ListPlace | None:
        """Return a file's place in lists, also if it was deleted lately."""

    async def listed(self, wanted: FileFilter, limit: int) -> list[StoredFile]:
        """Return the first files that match, in the order of their creation."""

    async def size_of(self, owner: str) -> int:
        """Return the bytes of all files of an owner."""

    async def remove(self, file_id: str) -> bool:
        """Remove a file; return whether it was there.

        Raises InvalidRequest if a batch that has not ended reads it.
        """

    async def expired(self, at: float, limit: int) -> list[str]:
        """Return files that expired before a Unix time, without those in use."""

    async def known(self, ids: Collection[str]) -> set[str]:
        """Return which of these files there are."""


class BatchStatus(Enum):
    """The status of a batch, as OpenAI names it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


BATCH_ENDED = frozenset(
    {
        BatchStatus.FAILED,
        BatchStatus.COMPLETED,
        BatchStatus.EXPIRED,
        BatchStatus.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True)
class BatchError:
    """What is wrong with a batch, or with the line of its input with this number."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch.  Times are Unix seconds, ``times`` those at which it got each status.

    ``lines`` counts the requests in its input once that is validated, ``completed`` and
    ``failed`` those that have a result.
    """

    id: str
    owner: str
    endpoint: str
    input_file: str
    window: str  # as the client wrote it
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    model: str = ""
    lines: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    times: Mapping[BatchStatus, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A batch's next status, and what became known with it; None: no change."""

    status: BatchStatus
    at: float
    model: str | None = None
    lines: int | None = None
    errors: tuple[BatchError, ...] | None = None
    output: StoredFile | None = None
    error: StoredFile | None = None


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line, as a line of the output file or of the error file."""

    line: int
    body: bytes
    failed: bool = False

    @property
    def size(self) -> int:
        """The bytes that it counts."""
        return RESULT_COST + len(self.body)


class BatchStore(Protocol):
    """The batches of all owners.  All methods raise StoreError."""

    async def add(self, new: StoredBatch, total_max: int) -> None:
        """Add a batch.

        Raises QueueFull if the owner has BATCHES_OPEN_MAX open, TooLarge if its files
        have ``total_max`` bytes already, or would be more than FILES_MAX with results,
        or NotFound if the input file was deleted meanwhile.
        """

    async def find(self, batch_id: str) -> StoredBatch | None: ...

    async def place(self, batch_id: str) -> ListPlace | None:
        """Return a batch's place in lists, also if it was deleted lately."""

    async def listed(
        self, owner: str | None, after: int | None, limit: int
    ) -> list[StoredBatch]:
        """Return batches after a place, the newest first.

        ``owner``: only those of one owner.
        """

    async def open(self) -> list[StoredBatch]:
        """Return the batches that have not ended, the oldest first."""

    async def change(
        self, batch_id: str, change: BatchChange, expected: Collection[BatchStatus]
    ) -> bool:
        """Change the status, and add the files with it, in one transaction.

        Returns False, and changes nothing, if the status is not an ``expected`` one.
        """

    async def record(self, batch_id: str, results: Sequence[LineResult]) -> None:
        """Record the results of lines and count them.  Idempotent per line."""

    async def recorded(self, batch_id: str) -> list[int]:
        """Return the lines that have a result."""

    async def begun(self, batch: StoredBatch) -> list[int]:
        """Return the lines of a validated batch that have a job, or one that failed."""

    async def results(
        self, batch_id: str, after: int, size: int
    ) -> Sequence[LineResult]:
        """Return results of about ``size`` bytes, of the lines after one, in order."""

    async def drop_results(self, size: int) -> bool:
        """Delete results of a batch that has ended, of about ``size`` bytes.

        Returns False if there was no such batch.
        """


def line_key(batch_id: str, line: int) -> str:
    """Return the idempotency key of the job of a line: a key may have one such job."""
    return f"{batch_id}/{line:06d}"


def line_of(key: str) -> int:
    """Return the line that a ``line_key`` is of; 0: it is of none, but a client's."""
    line = key.rpartition("/")[2]
    return int(line) if line.isascii() and line.isdigit() else 0
