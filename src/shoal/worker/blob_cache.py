"""Caches large arguments of calls in files."""

import asyncio
import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import IO

from shoal.config.private_files import open_lock_file, try_lock
from shoal.domain.errors import Unavailable
from shoal.tasks.limits import BLOB_TIMEOUT, BLOBS_MAX

PREFIX = "shoal-blobs-"
LOCK_FILE = "lock"  # locked for as long as its worker lives
LOCK_TRIES_MAX = 10  # other workers may take new folders for abandoned ones


class BlobCache:
    """Files in a temporary folder, named by the SHA-256 digests of their content.

    All processes map the same file, which is in memory once.  The least recently used
    file is evicted first; a process that has it mapped keeps it.  The folders of killed
    workers are deleted when one is made, which may take long: make it in a thread.
    """

    def __init__(self, size_max: int = BLOBS_MAX) -> None:
        self._size_max = size_max
        _delete_abandoned()
        self._folder, self._lock = _locked_folder()
        self._sizes: dict[bytes, int] = {}  # the latest used is last
        self._size = 0
        self._writing: dict[bytes, asyncio.Task[Path]] = {}
        self._awaited: dict[bytes, asyncio.Future[None]] = {}

    def put(self, digest: bytes, data: memoryview | bytes) -> None:
        """Store a blob; a thread writes it."""
        if digest in self._sizes or digest in self._writing:
            return
        task = asyncio.get_running_loop().create_task(self._write(digest, data))
        self._writing[digest] = task  # awaited by get() and close()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def get(self, digest: bytes, request: Callable[[bytes], None]) -> Path:
        """Return the file of a digest; ``request`` requests a missing one.

        Raises Unavailable if it does not arrive in time, or cannot be stored.
        """
        if digest not in self._sizes:
            await self._wait_for_blob(digest, request)
        if digest not in self._sizes:
            raise Unavailable("a large argument was evicted before it was read")
        self._sizes[digest] = self._sizes.pop(digest)
        return self._path(digest)

    async def close(self) -> None:
        """Delete everything."""
        if self._writing:
            await asyncio.wait([*self._writing.values()])
        self._lock.close()  # Windows deletes no open file
        await asyncio.to_thread(self._folder.cleanup)

    async def _wait_for_blob(
        self, digest: bytes, request: Callable[[bytes], None]
    ) -> None:
        try:
            async with asyncio.timeout(BLOB_TIMEOUT):
                if digest not in self._writing:
                    if digest not in self._awaited:
                        loop = asyncio.get_running_loop()
                        self._awaited[digest] = loop.create_future()
                        request(digest)
                    await asyncio.shield(self._awaited[digest])
                if (writing := self._writing.get(digest)) is not None:
                    await asyncio.shield(writing)
        except TimeoutError as error:
            self._awaited.pop(digest, None)
            raise Unavailable(
                f"a large argument ({digest.hex():.16}...) did not arrive within "
                f"{BLOB_TIMEOUT:g} s"
            ) from error
        except OSError as error:
            raise Unavailable(f"a large argument cannot be stored: {error}") from error

    async def _write(self, digest: bytes, data: memoryview | bytes) -> Path:
        if (awaited := self._awaited.pop(digest, None)) is not None:
            awaited.set_result(None)
        path = self._path(digest)
        try:
            await asyncio.to_thread(path.write_bytes, data)
        finally:
            del self._writing[digest]
        # Here, since waiters resume before the task's callbacks run.
        self._count(digest, len(data))
        return path

    def _count(self, digest: bytes, size: int) -> None:
        self._sizes[digest] = size
        self._size += size
        while self._size > self._size_max and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._size -= self._sizes.pop(oldest)
            # Windows cannot delete a mapped file; cleanup() does later.
            with contextlib.suppress(OSError):
                os.unlink(self._path(oldest))

    def _path(self, digest: bytes) -> Path:
        return Path(self._folder.name) / digest.hex()


def _locked_folder() -> tuple[TemporaryDirectory[str], IO[bytes]]:
    """Make a folder, and lock it."""
    for _ in range(LOCK_TRIES_MAX):
        folder, lock = _new_folder()
        if try_lock(lock) and os.path.exists(lock.name):
            return folder, lock
        lock.close()  # another worker locked it before, and deletes it
        with contextlib.suppress(OSError):
            folder.cleanup()
    return _new_folder()  # a file system without locks: no other worker deletes it


def _new_folder() -> tuple[TemporaryDirectory[str], IO[bytes]]:
    folder = TemporaryDirectory(prefix=PREFIX)
    return folder, open_lock_file(Path(folder.name) / LOCK_FILE)


def _delete_abandoned() -> None:
    """Delete the folders of this user's workers that run no more."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_own(folder) and (folder / LOCK_FILE).exists():
                _delete_unlocked(folder)


def _delete_unlocked(folder: Path) -> None:
    with open_lock_file(folder / LOCK_FILE) as lock:
        if not try_lock(lock):
            return
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # on Windows, the lock file was left


def _is_own(folder: Path) -> bool:
    """Say whether a folder is this user's, and no link: others may write beside it."""
    if sys.platform == "win32":  # each user has a temporary folder
        return folder.is_dir()
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
