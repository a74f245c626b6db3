"""The contents of files as rows of a PostgreSQL database, in parts."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore
from typing import BinaryIO, TypeVar

import psycopg

from shoal.domain.errors import StoreError
from shoal.store.contents import RangeReader
from shoal.store.postgres.database import PostgresDatabase
from shoal.store.postgres.session import Session, connect

FILES = "file"  # the kind of what clients upload and batches write
BLOBS = "blob"  # the kind of large values of calls
RANGE = """SELECT substring(data FROM CAST(? AS integer) FOR CAST(? AS integer))
           FROM content_parts WHERE number = ? AND part = ?"""
FINISH_LOCK = 3  # 1 and 2 are of the database: who writes, and who migrates
PART_SIZE = 1 << 20  # bytes
SESSIONS_MAX = 4  # at once; further calls wait

T = TypeVar("T")

log = logging.getLogger("shoal.store")


class ContentSessions:
    """Sessions for calls in any thread, beside those of the store."""

    def __init__(self, url: str) -> None:
        """Raises StoreError if the URL is none."""
        self._database = PostgresDatabase(url)  # which knows its errors
        self._url = url
        self._permits = BoundedSemaphore(SESSIONS_MAX)
        self._idle: SimpleQueue[Session] = SimpleQueue()

    def run(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in one transaction; it is on the disk when this returns.

        Blocks.  Raises StoreError.
        """
        try:
            with self._permits:
                session = self._begin()
                try:
                    result = work(session)
                    session.execute("COMMIT")
                except BaseException:
                    with suppress(psycopg.Error):
                        session.execute("ROLLBACK")
                    raise
                finally:
                    self._idle.put(session)
        except psycopg.Error as error:
            raise self._database.translated(error) from error
        return result

    def close(self) -> None:
        """End the sessions, of which none is in use."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _begin(self) -> Session:
        """Return a session in a transaction."""
        with suppress(Empty, psycopg.OperationalError, psycopg.InterfaceError):
            session = self._idle.get_nowait()
            try:
                session.execute("BEGIN")
            except BaseException:
                session.close()  # it was lost, as in a restart of the server
                raise
            return session
        session = Session(connect(self._url))
        try:
            # "Accepted" means on disk, whatever the server's default is.
            session.execute("SELECT set_config('synchronous_commit', 'on', false)")
            session.execute("BEGIN")
        except BaseException:
            session.close()
            raise
        return session


class ContentRows:
    """Contents of one kind, to which one coordinator at a time writes.

    Those that are not finished have no id.
    """

    def __init__(self, sessions: ContentSessions, kind: str) -> None:
        self._sessions = sessions
        self._kind = kind

    def open(self) -> dict[str, int]:
        query = "SELECT id, size FROM contents WHERE kind = ? ORDER BY number"

        def read(sql: Session) -> dict[str, int]:
            delete = "DELETE FROM contents WHERE kind = ? AND id IS NULL"
            sql.execute(delete, (self._kind,))
            return dict(sql.execute(query, (self._kind,)))

        return self._sessions.run(read)

    def set_aside(self, file_ids: Iterable[str]) -> str:
        # The same backup has them and what describes them: nothing else ever will.
        for each in file_ids:
            self._delete(each)
        return "deleted"

    def begin(self, file_id: str) -> "RowsWriter":
        return RowsWriter(self._sessions, self._kind, file_id)

    def has(self, file_id: str) -> bool:
        return self._find(file_id) is not None

    def read(self, file_id: str) -> BinaryIO:
        found = self._find(file_id)
        if found is None:
            raise StoreError(f"the contents of {file_id} are missing")
        number, size = found

        def read_range(begin: int, length: int) -> bytes:
            part, first = divmod(begin, PART_SIZE)
            values = (first + 1, length, number, part)
            row = self._sessions.run(lambda sql: sql.execute(RANGE, values).fetchone())
            if row is None:
                raise StoreError(
                    f"the contents of {file_id} were deleted while they were read"
                )
            data: bytes = row[0]
            return data

        return RangeReader(size, read_range).buffered(PART_SIZE)

    def remove(self, file_id: str) -> None:
        try:
            self._delete(file_id)
        except StoreError as error:
            log.warning("%s could not be deleted: %s", file_id, error.located)

    def _find(self, file_id: str) -> tuple[int, int] | None:
        """Return the number and the size of contents."""
        query = "SELECT number, size FROM contents WHERE kind = ? AND id = ?"
        values = (self._kind, file_id)
        found: tuple[int, int] | None
        found = self._sessions.run(lambda sql: sql.execute(query, values).fetchone())
        return found

    def _delete(self, file_id: str) -> None:
        query = "DELETE FROM contents WHERE kind = ? AND id = ?"
        self._sessions.run(lambda sql: sql.execute(query, (self._kind, file_id)))


class RowsWriter:
    """Contents that are being written: call ``finish`` or ``discard``."""

    def __init__(self, sessions: ContentSessions, kind: str, file_id: str) -> None:
        """Begin the contents.  Raises StoreError."""
        self.id = file_id
        self.size = 0
        self._sessions = sessions
        self._kind = kind
        self._parts = 0  # that are stored
        self._rest = bytearray()  # that is not, less than a part
        query = "INSERT INTO contents (kind) VALUES (?) RETURNING number"
        self._number: int = sessions.run(
            lambda sql: sql.execute(query, (kind,)).fetchone()[0]
        )

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        left = memoryview(data)
        while left:
            taken = left[: PART_SIZE - len(self._rest)]
            self._rest += taken
            left = left[len(taken) :]
            if len(self._rest) == PART_SIZE:
                self._write_part()

    def finish(self) -> None:
        if self._rest:
            self._write_part()
        lock = f"SELECT pg_advisory_xact_lock({FINISH_LOCK}, hashtext(?))"
        delete = "DELETE FROM contents WHERE kind = ? AND id = ?"
        name = "UPDATE contents SET id = ?, size = ? WHERE number = ?"

        def finish(sql: Session) -> None:
            # Two threads may write the same value, of which either one may stay.
            sql.execute(lock, (self.id,))
            sql.execute(delete, (self._kind, self.id))
            sql.execute(name, (self.id, self.size, self._number))

        self._sessions.run(finish)

    def discard(self) -> None:
        query = "DELETE FROM contents WHERE number = ?"
        try:
            self._sessions.run(lambda sql: sql.execute(query, (self._number,)))
        except StoreError as error:  # the next start does it
            log.warning("%s could not be deleted: %s", self.id, error.located)

    def _write_part(self) -> None:
        query = "INSERT INTO content_parts (number, part, data) VALUES (?, ?, ?)"
        values = (self._number, self._parts, bytes(self._rest))
        self._sessions.run(lambda sql: sql.execute(query, values))
        self._parts += 1
        self._rest.clear()
