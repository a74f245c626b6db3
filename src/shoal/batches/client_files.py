"""The files of clients: what describes them in the store, and their contents."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from shoal.domain.errors import InvalidRequest, NotFound, QueueFull, TooLarge
from shoal.store.batches import FileFilter, FilePurpose, FileStore, StoredFile
from shoal.store.contents import ContentStore, ContentWriter
from shoal.store.run_to_end import run_to_end

UPLOADS_MAX = 16  # of one owner at a time: each has an open file and a connection
EXPIRED_AT_ONCE = 100

log = logging.getLogger("shoal.batches")


class UploadedFile:
    """A file that arrives in pieces; ``claim`` is called before each is written."""

    def __init__(
        self, writer: ContentWriter, size_max: int, claim: Callable[[int], None]
    ) -> None:
        self.writer = writer
        self.kept = False
        self._size_max = size_max
        self._claim = claim

    @property
    def size(self) -> int:
        """The bytes so far."""
        return self.writer.size

    async def write(self, data: bytes) -> None:
        """Append a piece.  Raises TooLarge, StoreError."""
        if self.size + len(data) > self._size_max:
            raise TooLarge(f"the file exceeds the limit of {self._size_max} bytes")
        self._claim(len(data))
        await asyncio.to_thread(self.writer.write, data)


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """All files of all owners; the two limits are in bytes."""

    store: FileStore
    contents: ContentStore
    new_id: Callable[[], str]
    size_max: int
    total_max: int
    _uploads: Counter[str] = field(default_factory=Counter)  # their number, by owner
    _arriving: Counter[str] = field(default_factory=Counter)  # their bytes, by owner

    async def open(self) -> None:
        """Set the contents aside that are not in the store.  Raises StoreError.

        They are of a commit that was interrupted, or of a newer database than this one.
        """
        found = await asyncio.to_thread(self.contents.open)
        if unknown := {*found} - await self.store.known(found):
            done = await asyncio.to_thread(self.contents.set_aside, unknown)
            log.warning("files=%d are not in the database: %s", len(unknown), done)

    def next_id(self) -> str:
        """Return the id of a new file."""
        return f"file-{self.new_id()}"

    @asynccontextmanager
    async def uploading(self, owner: str) -> AsyncIterator[UploadedFile]:
        """Receive a file within the block; it is deleted unless ``keep`` keeps it.

        Raises TooLarge as soon as the owner has too many bytes, with those that are
        arriving, QueueFull if too many files are, StoreError.
        """
        with self._counted(owner):
            async with self._receiving(owner) as uploaded:
                yield uploaded

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        """Count an upload within the block.  Raises QueueFull."""
        if self._uploads[owner] >= UPLOADS_MAX:
            raise QueueFull(
                f"{UPLOADS_MAX} uploads of this key are in progress: wait for one to "
                "finish"
            )
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    @asynccontextmanager
    async def _receiving(self, owner: str) -> AsyncIterator[UploadedFile]:
        stored = await self.store.size_of(owner)
        claimed = 0

        def claim(size: int) -> None:
            nonlocal claimed
            self._check_room(stored + self._arriving[owner] + size)
            claimed += size
            self._arriving[owner] += size

        self._check_room(stored + self._arriving[owner] + 1)
        writer = await asyncio.to_thread(self.contents.begin, self.next_id())
        uploaded = UploadedFile(writer, self.size_max, claim)
        try:
            yield uploaded
        finally:
            self._arriving[owner] -= claimed
            if not self._arriving[owner]:
                del self._arriving[owner]
            if not uploaded.kept:
                await asyncio.to_thread(writer.discard)

    def _check_room(self, total: int) -> None:
        if total > self.total_max:
            raise TooLarge(
                f"the files of this key exceed the limit of {self.total_max} bytes: "
                "delete some first"
            )

    async def keep(
        self,
        uploaded: UploadedFile,
        owner: str,
        name: str,
        purpose: FilePurpose,
        at: float,
        expires_at: float | None,
    ) -> StoredFile:
        """Keep a file that has arrived.  Raises TooLarge, StoreError."""
        writer = uploaded.writer
        await asyncio.to_thread(writer.finish)
        new = StoredFile(writer.id, owner, name, purpose, writer.size, at, expires_at)

        async def add() -> None:
            await self.store.add(new, self.total_max)
            uploaded.kept = True

        await run_to_end(add())
        return new

    async def find(self, file_id: str, at: float) -> StoredFile | None:
        """Return a file that has not expired.  Raises StoreError."""
        found = await self.store.find(file_id)
        if found is None or (found.expires_at is not None and found.expires_at <= at):
            return None
        return found

    async def listed(self, wanted: FileFilter, limit: int) -> list[StoredFile]:
        """Return the first files that match.  Raises StoreError."""
        return await self.store.listed(wanted, limit)

    async def read(self, file_id: str) -> BinaryIO:
        """Open the contents of a file.

        Raises NotFound if they are missing, as in a restored backup; StoreError.
        """
        if not await asyncio.to_thread(self.contents.has, file_id):
            raise NotFound(f"the contents of {file_id} are missing")
        return await asyncio.to_thread(self.contents.read, file_id)

    async def remove(self, file_id: str) -> bool:
        """Delete a file; return whether it was there.

        Raises InvalidRequest if a batch that has not ended reads it, StoreError.
        """

        async def remove() -> bool:
            removed = await self.store.remove(file_id)
            if removed:
                await asyncio.to_thread(self.contents.remove, file_id)
            return removed

        return await run_to_end(remove())

    async def remove_expired(self, at: float) -> int:
        """Delete the files that have expired; return their number.

        Raises StoreError.
        """
        removed = 0
        while ids := await self.store.expired(at, EXPIRED_AT_ONCE):
            for each in ids:
                with suppress(InvalidRequest):  # a batch has begun to read it meanwhile
                    removed += await self.remove(each)
        return removed
