"""The contents of clients' files: a folder with a file for each, named by its id."""

import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoal.config.private_files import FOLDER_MODE, open_private, restrict, sync_folder
from shoal.domain.errors import StoreError
from shoal.store.blobs import PART, disk_error

FILES_FOLDER = "files"  # in the data folder
UNKNOWN = "unknown"  # the folder for contents that the database does not describe
SPACE_KEPT = 16 << 20  # bytes of the disk that are left to the commits of the database

log = logging.getLogger("shoal.store")


class FileFolder:
    """A folder to which no other process writes.

    A file has its name once all of it is on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> dict[str, int]:
        """Create the folder, too."""
        try:
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            restrict(self._folder)
            found = {}
            for path in self._folder.iterdir():
                if path.name.endswith(PART):
                    path.unlink()
                elif path.name != UNKNOWN:
                    found[path.name] = path.stat().st_size
        except OSError as error:
            raise disk_error(error, self._folder) from error
        return found

    def set_aside(self, file_ids: Iterable[str]) -> str:
        # Within this folder, which may be a file system of its own.
        aside = self._folder / UNKNOWN
        try:
            aside.mkdir(mode=FOLDER_MODE, exist_ok=True)
            for each in file_ids:
                (self._folder / each).replace(aside / each)
        except OSError as error:
            raise disk_error(error, aside) from error
        return (
            f"moved to {aside}; delete them, or move them back if you put back a "
            "database that has them"
        )

    def begin(self, file_id: str) -> "FolderWriter":
        return FolderWriter(self._folder / file_id)

    def has(self, file_id: str) -> bool:
        return (self._folder / file_id).is_file()

    def read(self, file_id: str) -> BinaryIO:
        path = self._folder / file_id
        try:
            return path.open("rb")
        except OSError as error:
            raise disk_error(error, path) from error

    def remove(self, file_id: str) -> None:
        path = self._folder / file_id
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be deleted: %s", path, error)


class FolderWriter:
    """A file that is being written: call ``finish`` or ``discard``."""

    def __init__(self, path: Path) -> None:
        """Create the file.  Raises StoreError."""
        self.id = path.name
        self.size = 0
        self._path = path
        self._part = path.with_name(path.name + PART)
        try:
            self._file = open(self._part, "xb", opener=open_private)  # noqa: SIM115
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, data: bytes | memoryview) -> None:
        try:
            free = shutil.disk_usage(self._path.parent).free
            if free < SPACE_KEPT + len(data):
                # If files used it up, no job could be accepted or completed.
                raise StoreError(
                    f"{free} bytes are free on the disk, of which {SPACE_KEPT} are "
                    "left to the database: free some space",
                    str(self._path),
                    temporary=True,
                )
            self._file.write(data)
        except OSError as error:
            raise disk_error(error, self._path) from error
        self.size += len(data)

    def finish(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise disk_error(error, self._path) from error

    def discard(self) -> None:
        with suppress(OSError):  # of what was not written yet
            self._file.close()
        for path in (self._part, self._path):
            path.unlink(missing_ok=True)
