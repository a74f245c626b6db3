"""One SQLite file: a connection that writes, and others that read beside it.

No transaction waits for a read.  A read waits for the transactions that were begun
before it, so that it sees what they wrote.  Reads of a few rows have a connection of
their own: they do not wait for lists.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

from shoal.config import private_files
from shoal.domain.errors import InvalidRequest, StoreBroken, StoreError
from shoal.store.sqlite.schema import migrate

T = TypeVar("T")

DATABASE = "shoal.db"  # in a coordinator's data folder
MEMORY = Path(":memory:")
LOCK_ATTEMPTS = 100  # to lock the file: another coordinator may just be stopping
LOCK_PAUSE = 0.05  # seconds between them
BUSY_TIMEOUT = 5.0  # seconds to wait for other programs that use the file
HEAD = "SELECT count(*), (SELECT max(size) FROM checkpoints) FROM sqlite_schema"
LIST_READERS = 2  # lists at once; the interpreter runs their Python code in turn

LOG_HEADER, FRAME_HEADER = 32, 24  # bytes, in the log; each frame has a page
WAL_KEPT = 16 << 20  # bytes of the log's file that are kept for reuse
WAL_MAX = 64 << 20  # bytes of the log from which on a commit waits for readers
WAL_WAIT = 0.1  # seconds of that


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


# What reading a damaged row raises.
UNDECODABLE = (ValueError, KeyError, TypeError, InvalidRequest)
# All texts were written as UTF-8, and all JSON here: these errors have no code.
MALFORMED_TEXTS = ("Could not decode to UTF-8", "malformed JSON")
# Kinds whose message is the same for several causes.
UNNAMED = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
# Kinds after which nothing but a repair helps.
MALFORMED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


_identity = attrgetter("st_dev", "st_ino")  # of a file, whatever its name
TRANSLATED = (sqlite3.Error, UnicodeDecodeError, StoreBroken)
_QueuedCall: TypeAlias = tuple[
    Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]
]


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
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except (AttributeError, OSError):  # not on Windows
        return False


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's extended code, whose low byte is the kind."""
    # Errors of the module itself have none.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code


def decode(make: Callable[..., T], *values: object) -> T:
    """Return what ``make`` makes of values from rows.

    Raises StoreBroken if it cannot: this program has written them.
    """
    try:
        return make(*values)
    except UNDECODABLE as error:
        # Without its text, which may have a prompt.
        name = type(error).__name__
        raise StoreBroken(f"a row of the database is damaged ({name})") from error


def select(
    make: Callable[..., T], query: str, *values: object
) -> Callable[[sqlite3.Connection], list[T]]:
    """Return what reads the rows of a query; ``make`` takes the columns of each."""
    return lambda sql: [decode(make, *row) for row in sql.execute(query, values)]


def select_first(
    make: Callable[..., T], query: str, *values: object
) -> Callable[[sqlite3.Connection], T | None]:
    """Return what reads the first row of a query; None: there is none."""

    def read(sql: sqlite3.Connection) -> T | None:
        row = sql.execute(query, values).fetchone()
        return None if row is None else decode(make, *row)

    return read


def execute(query: str, *values: object) -> Callable[[sqlite3.Connection], int]:
    """Return what carries a statement out, and returns how many rows it changed."""
    return lambda sql: sql.execute(query, values).rowcount


class Database:
    """An SQLite file that one process at a time may write.

    The lock is a file of its own, so that other programs can read and copy the
    database while it is in use.  A database in memory has one connection only.  What
    runs SQL raises StoreError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._in_memory = path == MEMORY
        # What needs no disk needs no thread.
        self._thread = _Threads(0 if self._in_memory else 1, "shoal-store")
        self._writer: sqlite3.Connection | None = None
        self._last_write: asyncio.Future[Any] | None = None
        self._readers = _Readers(1, "shoal-read")
        self._list_readers = _Readers(LIST_READERS, "shoal-list")
        self._closing = ExitStack()
        self._paths = [f"{path}{suffix}" for suffix in SUFFIXES]
        self._wal_max = WAL_MAX
        self._files: dict[str, os.stat_result] = {}  # as the last transaction left them
        self._damage: asyncio.Future[StoreBroken] | None = None

    async def open(self, *, create: bool = True) -> None:
        """Open the file, and migrate it; ``create``: make it if there is none.

        Raises StoreError; StoreBroken if it is damaged, or missing or empty and not to
        be created.
        """
        self._damage = asyncio.get_running_loop().create_future()
        await self._run(self._thread, lambda: self._open(create=create))

    async def check_files(self) -> None:
        """Look whether the files are what they were, and can be opened.

        Raises StoreBroken if they were deleted, replaced or truncated, or if what
        another program would read first is damaged.
        """
        if self._path != MEMORY:
            await self._run(self._thread, self._check_opening)

    async def wait_damaged(self) -> StoreBroken:
        """Wait until a read, a transaction or a check finds damage; return it."""
        if self._damage is None:
            raise self._not_open()
        return await asyncio.shield(self._damage)

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in one transaction, after all that were begun before."""
        self._last_write = write = self._thread.run(lambda: self._transact(work))
        return await self._result(write)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work``, which reads a few rows by a key."""
        return await self._read(self._readers, work)

    async def read_list(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work``, which reads many rows."""
        return await self._read(self._list_readers, work)

    async def close(self) -> None:
        await self._run(self._thread, self._closing.close)
        self._thread.close()

    async def _run(self, threads: "_Threads", call: Callable[[], T]) -> T:
        return await self._result(threads.run(call))

    async def _result(self, future: asyncio.Future[T]) -> T:
        try:
            return await future
        except TRANSLATED as error:
            translated = self._translated(error)
            if translated is error:
                raise
            raise translated from error

    async def _read(
        self, readers: "_Readers", work: Callable[[sqlite3.Connection], T]
    ) -> T:
        if self._in_memory:
            return await self._run(
                self._thread, lambda: _read_snapshot(self._opened, work)
            )
        if self._writer is None:
            raise self._not_open()
        if self._last_write is not None and not self._last_write.done():
            await asyncio.wait([self._last_write])
        return await self._run(readers.threads, lambda: readers.read(work))

    def _translated(
        self, error: "sqlite3.Error | UnicodeDecodeError | StoreBroken"
    ) -> StoreError:
        """Turn SQLite's errors into StoreError, and note damage."""
        path = str(self._path)
        if isinstance(error, sqlite3.Error):
            reason = reason_of(error, self._path)
            if not is_damage(error):
                return StoreError(reason, path, temporary=is_temporary(error))
            broken = StoreBroken(reason, path)
        elif isinstance(error, UnicodeDecodeError):  # of the module itself
            broken = StoreBroken("a text of the database is damaged", path)
        else:
            broken = error
            broken.path = broken.path or path
        if self._damage is not None and not self._damage.done():
            self._damage.set_result(broken)
        return broken

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
            if self._path != MEMORY:
                for readers in (self._readers, self._list_readers):
                    undo.callback(readers.close)
                    readers.open(self._path)
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

    def _forget(self) -> None:
        self._writer = None

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._writer is None:
            raise self._not_open()
        return self._writer

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

    # Errors.

    def _not_open(self) -> StoreError:
        return StoreError("the database is not open", str(self._path))


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


class _Threads:
    """Threads that run calls, each one at a time; without threads they run at once.

    Each commit passes here, twice for a chat: the way to an executor of the standard
    library and back takes several locks, and ten times the calls.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._started = self._closed = False

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call; one that is cancelled before its turn is left out.

        Raises StoreError after the end.
        """
        if self._closed:
            raise StoreError("the database is not open")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._threads:
            self._calls.put((call, loop, future))
        else:
            _finish(future, *_outcome_of(call))
        return future

    def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        self._closed = True
        if self._started:
            for _ in self._threads:
                self._calls.put(None)
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            call, loop, future = queued
            if future.cancelled():
                continue
            result, error = _outcome_of(call)
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(_finish, future, result, error)
            del queued, call, future, result, error  # not until the next call


def _outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call; return the result, and what was raised."""
    try:
        return call(), None
    except BaseException as error:  # for who waits
        return None, error


def _finish(
    future: asyncio.Future[Any], result: object, error: BaseException | None
) -> None:
    if future.done():
        return  # its caller has left
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class _Readers:
    """Connections that only read, and a thread for each."""

    def __init__(self, count: int, name: str) -> None:
        self.threads = _Threads(count, name)
        self._count = count
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()

    def open(self, path: Path) -> None:
        for _ in range(self._count):
            self._idle.put(read_only(path))

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in one of the threads."""
        reader = self._idle.get_nowait()  # there is one for each thread
        try:
            return _read_snapshot(reader, work)
        finally:
            self._idle.put(reader)

    def close(self) -> None:
        """Wait for the reads under way, and close the connections."""
        self.threads.close()
        while not self._idle.empty():
            self._idle.get_nowait().close()


def _read_snapshot(
    sql: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]
) -> T:
    """Run ``work`` so that all its statements see the same commit."""
    sql.execute("BEGIN")
    try:
        return work(sql)
    finally:
        sql.execute("ROLLBACK")  # there is nothing to commit


def _in_use(path: Path) -> StoreError:
    return StoreError(
        f"{path} is in use: stop the other `shoal serve`, or give this one another "
        "--data-dir"
    )
