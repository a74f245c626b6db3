"""One SQLite file as the database of a store."""

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from shoal.config import private_files
from shoal.domain.errors import StoreBroken, StoreError
from shoal.store.blobs import BlobStore
from shoal.store.sql.database import Database, Sql
from shoal.store.sql.schema import MIGRATIONS, VERSION, first_migration
from shoal.store.sql.store import SqlStore

T = TypeVar("T")

DATABASE = "shoal.db"  # in a coordinator's data folder
MEMORY = Path(":memory:")
LOCK_ATTEMPTS = 100  # to lock the file: another coordinator may just be stopping
LOCK_PAUSE = 0.05  # seconds between them
BUSY_TIMEOUT = 5.0  # seconds to wait for other programs that use the file
HEAD = "SELECT count(*), (SELECT max(size) FROM checkpoints) FROM sqlite_schema"

LOG_HEADER, FRAME_HEADER = 32, 24  # bytes, in the log; each frame has a page
WAL_KEPT = 16 << 20  # bytes of the log's file that are kept for reuse
WAL_MAX = 64 << 20  # bytes of the log from which on a commit waits for readers
WAL_WAIT = 0.1  # seconds of that


PAGES_AT_ONCE = 200  # given back in one transaction, of a few milliseconds
FREE_SHARE = 0.25  # of the file's pages that are kept for new rows

SUFFIXES = ("", "-wal", "-shm")  # of the names of a database's files

# After these, the same may succeed later: the disk was full or failed, or another
# program had locked the file.
TEMPORARY = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,  # as with too many open files
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
    }
)
# Not after these, which are kinds of SQLITE_IOERR: the file is damaged, or no longer
# the same.
DAMAGED = frozenset(
    {
        sqlite3.SQLITE_IOERR_CORRUPTFS,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_VNODE,
    }
)


# All texts were written as UTF-8, and all JSON here: these errors have no code.
MALFORMED_TEXTS = ("Could not decode to UTF-8", "malformed JSON")
# Kinds whose message is the same for several causes.
UNNAMED = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
# Kinds after which nothing but a repair helps.
MALFORMED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


_identity = attrgetter("st_dev", "st_ino")  # of a file, whatever its name


def is_temporary(error: sqlite3.Error) -> bool:
    """Say whether the same may succeed later."""
    code = _code(error)
    return code & 0xFF in TEMPORARY and code not in DAMAGED


def is_damage(error: sqlite3.Error) -> bool:
    """Say whether an error shows that the files are damaged."""
    code = _code(error)
    malformed = code & 0xFF in MALFORMED or str(error).startswith(MALFORMED_TEXTS)
    return malformed or code in DAMAGED


def reason_of(error: sqlite3.Error, path: Path) -> str:
    """Return what SQLite says, and what it does not name: EROFS or EIO."""
    kind = _code(error) & 0xFF
    if kind in UNNAMED and _is_read_only(path):
        return f"{error}: its file system is read-only (EROFS), as after a disk error"
    if kind == sqlite3.SQLITE_IOERR and not is_damage(error):
        name = error.sqlite_errorname
        return f"{error} ({name}): mostly EIO, of a failing disk: see the system's log"
    return str(error)


def _is_read_only(path: Path) -> bool:
    if sys.platform != "win32":
        with suppress(OSError):
            return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    return False


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's extended code, whose low byte is the kind."""
    # Errors of the module itself have none.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code


class SqliteDatabase(Database[sqlite3.Connection]):
    """An SQLite file that one process at a time may write.

    The lock is a file of its own, so that other programs can read and copy the
    database while it is in use.  One in memory has one connection only.
    """

    errors = (sqlite3.Error, UnicodeDecodeError, StoreBroken)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._in_memory = path == MEMORY
        super().__init__(str(path), threads=not self._in_memory)
        self._closing = ExitStack()
        self._paths = [f"{path}{suffix}" for suffix in SUFFIXES]
        self._wal_max = WAL_MAX
        self._files: dict[str, os.stat_result] = {}  # as the last transaction left them

    async def check(self) -> None:
        """Look whether the files are what they were, and can be opened.

        Raises StoreBroken if they were deleted, replaced or truncated, or if what
        another program would read first is damaged.
        """
        if self._path != MEMORY:
            await self.run(self._check_opening)

    async def give_back(self) -> None:
        while await self.transact(_shrink):
            pass

    def translated(
        self, error: sqlite3.Error | UnicodeDecodeError | StoreBroken
    ) -> StoreError:
        """Turn SQLite's errors into StoreError."""
        if isinstance(error, sqlite3.Error):
            reason = reason_of(error, self._path)
            if is_damage(error):
                return StoreBroken(reason)
            return StoreError(reason, self.name, temporary=is_temporary(error))
        if isinstance(error, UnicodeDecodeError):  # of the module itself
            return StoreBroken("a text of the database is damaged")
        return error

    # The methods below run in the writer's thread.

    def _open(self, *, create: bool) -> None:
        with ExitStack() as undo:
            if self._path != MEMORY:
                undo.enter_context(locked(self._path))
                if not create and not self._path.exists():
                    raise StoreBroken("is missing", str(self._path))
                make_private(self._path)
            try:
                writer = self._connect(undo, create=create)
            except sqlite3.OperationalError as error:
                if "locked" in str(error):
                    raise _in_use(self._path) from error
                raise
            for readers in (self._readers, self._list_readers):
                if readers is not None:
                    undo.callback(readers.close, sqlite3.Connection.close)
                    readers.open(partial(read_only, self._path))
            self._closing = undo.pop_all()
        self._writer = writer
        self._files = self._current_files()
        self._closing.callback(self._forget)

    def _connect(self, undo: ExitStack, *, create: bool) -> sqlite3.Connection:
        writer = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        undo.callback(writer.close)
        if not create and writer.execute("PRAGMA user_version").fetchone() == (0,):
            raise StoreBroken("is empty", str(self._path))
        # Of a new file; pages that ``prune`` frees can be given back.
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA journal_mode = WAL")
        # "Accepted" means on disk, so each commit waits for the disk.
        writer.execute("PRAGMA synchronous = FULL")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_KEPT}")
        if self._path == MEMORY:
            writer.deserialize(_empty_database())
        migrate(writer)
        return writer

    def _close(self) -> None:
        self._closing.close()

    def _forget(self) -> None:
        self._writer = None

    def _read_snapshot(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            connection.execute("ROLLBACK")  # there is nothing to commit

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        writer = self._opened
        self._check_files()
        if writer.in_transaction:  # a rollback has failed, as on a failing disk
            writer.execute("ROLLBACK")
        writer.execute("BEGIN IMMEDIATE")
        try:
            result = work(writer)
            writer.execute("COMMIT")
        except BaseException:
            # Some errors, as of a full disk, have ended the transaction already.
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise
        self._note_sizes()
        if not self._in_memory:
            self._limit_wal(writer)
        return result

    def _current_files(self) -> dict[str, os.stat_result]:
        """Return the files that there are, by their paths."""
        found: dict[str, os.stat_result] = {}
        if self._in_memory:
            return found
        for path in self._paths:  # twice for each commit, so without any detour
            try:
                found[path] = os.stat(path)
            except OSError:  # some file systems have no log
                continue
        return found

    def _note_sizes(self) -> None:
        """Note what a transaction has left, but no file that came in meanwhile."""
        present = self._current_files()
        self._files |= {
            path: present[path]
            for path, known in self._files.items()
            if path in present and _identity(present[path]) == _identity(known)
        }

    def _check_files(self) -> None:
        """Raise StoreBroken unless each file is the one that is open, and whole.

        What is written to a file without a name is lost at the end of the process, and
        another program would begin a log of its own.
        """
        present = self._current_files()
        shrunk = False
        for path, known in self._files.items():
            now = present.get(path)
            if now is None or _identity(now) != _identity(known):
                self._save_log(present)
                raise StoreBroken("was deleted or replaced while in use", path)
            shrunk |= now.st_size < known.st_size
        if shrunk:
            self._check_sizes(present)
            self._note_sizes()

    def _check_sizes(self, present: dict[str, os.stat_result]) -> None:
        """Raise StoreBroken if a file is shorter than its contents.

        It is not where another program has moved the log into the database or compacted
        it.
        """
        writer = self._opened
        ((pages,),) = writer.execute("PRAGMA page_count")
        ((page_size,),) = writer.execute("PRAGMA page_size")
        # Reads each frame that is not in the database yet, which may fail.
        ((_, frames, _),) = writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        log = LOG_HEADER + frames * (FRAME_HEADER + page_size) if frames > 0 else 0
        for path, size in zip(self._paths, (pages * page_size, log), strict=False):
            if path in present and present[path].st_size < size:
                raise StoreBroken("was truncated while in use", path)

    def _check_opening(self) -> None:
        self._check_files()
        with closing(read_only(self._path)) as sql:
            sql.execute(HEAD).fetchone()  # it has no page in memory yet

    def _save_log(self, present: dict[str, os.stat_result]) -> None:
        """Move the log, whose file is open still, into the database.

        Then nothing is lost if only the log's files were deleted.
        """
        known, now = self._files.get(self._paths[0]), present.get(self._paths[0])
        if self._writer is None or known is None or now is None:
            return
        if _identity(now) == _identity(known):
            with suppress(sqlite3.Error):
                self._writer.execute("PRAGMA wal_checkpoint(FULL)").fetchone()

    def _limit_wal(self, writer: sqlite3.Connection) -> None:
        """Let the log begin anew if it has grown, as it does while reads overlap.

        Waits for those that read from it; later ones read the database alone.
        """
        log = self._files.get(self._paths[1])
        if log is None:
            return  # some file systems have none
        size = log.st_size
        if size < WAL_MAX:
            self._wal_max = WAL_MAX  # the log has begun anew
        if size < self._wal_max:
            return
        # A long read by another program, as of a backup, delays only a few commits.
        self._wal_max = size + WAL_MAX
        writer.execute(f"PRAGMA busy_timeout = {int(WAL_WAIT * 1e3)}")
        # The commit has succeeded, whatever happens here.
        with suppress(sqlite3.Error):
            writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        writer.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT * 1e3)}")
        self._note_sizes()


def migrate(database: sqlite3.Connection) -> None:
    """Migrate a database to the present version, in one transaction.

    A new database waits for the disk once, not once for each step.

    Raises StoreError if a newer Shoal wrote it, or one from before the first release.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if steps := MIGRATIONS[first_migration(version) :]:
        database.executescript(
            f"BEGIN IMMEDIATE; {' '.join(steps)}"
            f"PRAGMA user_version = {VERSION}; COMMIT;"
        )


@cache
def _empty_database() -> bytes:
    """Return a new database in the present version.

    Those in memory begin as its copy: making one takes ten times as long.
    """
    with closing(sqlite3.connect(MEMORY, isolation_level=None)) as made:
        migrate(made)
        return made.serialize()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a database: two coordinators would hand out the same jobs twice.

    Raises StoreError if another process has locked it.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        file = private_files.open_lock_file(lock)
    except OSError as error:
        raise StoreError(f"{lock}: unable to open: {error.strerror}") from error
    with file:
        for _ in range(LOCK_ATTEMPTS):
            if private_files.try_lock(file):
                break
            time.sleep(LOCK_PAUSE)
        else:
            raise _in_use(path)
        yield


def make_private(path: Path) -> None:
    """Restrict a database, which is created if it is missing, to its owner.

    SQLite creates its other files with the permissions of the database.

    Raises StoreError.
    """
    try:
        private_files.create_private(path)
        for suffix in SUFFIXES[1:]:
            with suppress(FileNotFoundError):
                private_files.restrict(path.with_name(path.name + suffix))
    except OSError as error:
        raise StoreError(f"{path}: unable to open: {error.strerror}") from error


def read_only(path: Path) -> sqlite3.Connection:
    """Open a connection that cannot write.  Raises sqlite3.Error."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_TIMEOUT,
        isolation_level=None,
        check_same_thread=False,
    )


def _in_use(path: Path) -> StoreError:
    return StoreError(
        f"{path} is in use: stop the other `shoal serve`, or give this one another "
        "--data-dir"
    )


def _shrink(sql: Sql) -> bool:
    """Give free pages back to the file system; return whether there may be more.

    A file that was made before it could shrink stays as large as it is.
    """
    ((free,),) = sql.execute("PRAGMA freelist_count")
    ((pages,),) = sql.execute("PRAGMA page_count")
    if free <= pages * FREE_SHARE:
        return False
    for _ in range(PAGES_AT_ONCE):
        # A larger number would free one page as well: Python's module takes one step
        # of a statement without columns.
        sql.execute("PRAGMA incremental_vacuum(1)")
    ((left,),) = sql.execute("PRAGMA freelist_count")
    return bool(left < free)


class SqliteStore(SqlStore):
    """Stores everything in one file, which one process at a time may use."""

    def __init__(self, path: Path, blobs: BlobStore | None = None) -> None:
        """Name the file; values too large for a row go to ``blobs``."""
        super().__init__(SqliteDatabase(path), blobs)
