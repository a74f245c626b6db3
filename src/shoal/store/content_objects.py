"""The contents of files as objects in an S3-compatible store."""

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, BinaryIO

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from shoal.domain.errors import StoreError
from shoal.store.contents import RangeReader

UNKNOWN = "unknown/"  # before the names of contents that the database does not describe
SPOOLED_MAX = 8 << 20  # bytes of contents in memory; more of them go to a file
READ_SIZE = 4 << 20  # bytes that are read at a time
CONNECT_TIMEOUT, TIMEOUT = timedelta(seconds=5), timedelta(seconds=60)
RETRIES_MAX = 3

log = logging.getLogger("shoal.store")


class ContentObjects:
    """Objects below a prefix of a bucket, to which no other coordinator writes.

    An object is there as a whole, or not at all.
    """

    def __init__(self, url: str, kind: str) -> None:
        """Name the bucket, as s3://BUCKET/PREFIX; ``kind`` is a further prefix.

        Where it is, and the keys to it, are in the variables AWS_….  Raises StoreError.
        """
        self._url = f"{url.rstrip('/')}/{kind}"
        with self._errors():
            self._store = S3Store.from_url(
                self._url,
                client_options={
                    "connect_timeout": CONNECT_TIMEOUT,
                    "timeout": TIMEOUT,
                    "allow_http": True,  # where AWS_ENDPOINT_URL says so
                },
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": TIMEOUT},
            )

    def open(self) -> dict[str, int]:
        with self._errors():
            return {
                each["path"]: each["size"]
                for page in obstore.list(self._store)
                for each in page
                if not each["path"].startswith(UNKNOWN)
            }

    def set_aside(self, file_ids: Iterable[str]) -> str:
        with self._errors():
            for each in file_ids:
                obstore.rename(self._store, each, UNKNOWN + each)
        return (
            f"moved to {self._url}/{UNKNOWN}; delete them, or move them back if you "
            "put back a database that has them"
        )

    def begin(self, file_id: str) -> "ObjectWriter":
        return ObjectWriter(self, file_id)

    def has(self, file_id: str) -> bool:
        return self._size(file_id) is not None

    def read(self, file_id: str) -> BinaryIO:
        size = self._size(file_id)
        if size is None:
            raise StoreError(f"the contents of {file_id} are missing", self._url)

        def read_range(begin: int, length: int) -> bytes:
            with self._errors():
                found = obstore.get_range(
                    self._store, file_id, start=begin, length=length
                )
                return bytes(found)

        return RangeReader(size, read_range).buffered(READ_SIZE)

    def remove(self, file_id: str) -> None:
        try:
            with self._errors():
                obstore.delete(self._store, file_id)
        except StoreError as error:
            log.warning("%s could not be deleted: %s", file_id, error.located)

    def put(self, file_id: str, content: IO[bytes]) -> None:
        """Store contents as a whole.  Raises StoreError."""
        with self._errors():
            obstore.put(self._store, file_id, content)

    def _size(self, file_id: str) -> int | None:
        with self._errors():
            try:
                size: int = obstore.head(self._store, file_id)["size"]
            except FileNotFoundError:
                return None
        return size

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            reason, _, _ = str(error).partition("\n")  # further lines are for debugging
            raise StoreError(reason, self._url, temporary=True) from error


class ObjectWriter:
    """Contents that are being written: call ``finish`` or ``discard``."""

    def __init__(self, objects: ContentObjects, file_id: str) -> None:
        self.id = file_id
        self.size = 0
        self._objects = objects
        # What was sent in part would have to be found and deleted there later.
        self._file = tempfile.SpooledTemporaryFile(SPOOLED_MAX)  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(reason, tempfile.gettempdir(), temporary=True) from error
        self.size += len(data)

    def finish(self) -> None:
        self._file.seek(0)
        self._objects.put(self.id, self._file)
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self._objects.remove(self.id)
