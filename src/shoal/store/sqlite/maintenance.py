"""Checks, copies, restores and compacts the file of an SQLite store."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from shoal.config.private_files import create_private, sync_folder
from shoal.domain.errors import StoreError
from shoal.store.ledger import LogHead
from shoal.store.sql.ledger import (
    LAST_HEAD,
    book_problems,
    log_problems,
    size_and_root_in,
)
from shoal.store.sql.schema import VERSION, VERSION_OF_TABLES, version_problems
from shoal.store.sqlite.database import (
    BUSY_TIMEOUT,
    SUFFIXES,
    locked,
    make_private,
    read_only,
)

T = TypeVar("T")

COPIED_AT_ONCE = 1024  # pages, 4 MiB
COPY_PAUSE = 0.005  # seconds between two steps, in which others have the disk
PROBLEMS_MAX = 100  # that SQLite lists


def check(path: Path) -> list[str]:
    """Return what is wrong with a database; empty: nothing.  Other programs may use it.

    Raises StoreError if it cannot be read.
    """
    with _errors_named(path), closing(read_only(path)) as sql:
        query = f"PRAGMA integrity_check({PROBLEMS_MAX})"
        found = [str(row[0]) for row in sql.execute(query)]
        problems = [each for each in found if each != "ok"]
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        if other := version_problems(version):
            return problems + other
        with _snapshot(sql):
            return [*problems, *book_problems(sql), *log_problems(sql)]


def size_and_root(path: Path, size: int) -> tuple[int, bytes | None]:
    """As ``size_and_root_in``.  Raises StoreError."""
    with _errors_named(path), closing(read_only(path)) as sql:
        return size_and_root_in(sql, size)


def back_up(path: Path, copy: Path) -> None:
    """Copy a database to a new file, as of the last commit.  Jobs go on meanwhile.

    Raises StoreError if that fails, or if the file exists; then nothing is left of it.
    """
    if copy.exists():
        raise StoreError(f"{copy} exists: name another file, or delete it")
    with _errors_named(path), closing(read_only(path)) as source:
        size = _size(source)
        with _errors_named(copy):
            _check_space(copy.parent, size, f"{copy}: a backup")
            with _part(copy) as part:
                _copy(source, part, f"{path} to {copy}")
                part.rename(copy)


def restore(copy: Path, path: Path, begin_log: Callable[[LogHead | None], T]) -> T:
    """Put a copy into the place of a database, which is moved aside.

    ``begin_log`` is called with the last checkpoint of the copy before that has its
    place; returns what it returns.  After a crash in between there is no database, so
    that a start is refused, and this can be repeated.

    Raises StoreError if the copy is damaged or from a newer Shoal, or if a coordinator
    uses the database.
    """
    with _errors_named(copy), closing(read_only(copy)) as source:
        ((version,),) = source.execute("PRAGMA user_version")
        if not VERSION_OF_TABLES <= version <= VERSION:
            raise StoreError(f"{copy}: not a database of this Shoal or an earlier one")
        problems = [row[0] for row in source.execute("PRAGMA integrity_check(1)")]
        if problems != ["ok"]:
            raise StoreError(f"{copy} is damaged itself: {problems[0]}")
        row = source.execute(LAST_HEAD).fetchone()
        with locked(path), _errors_named(path):
            _check_space(path.parent, _size(source), f"{path}: restoring it")
            with _part(path) as part:
                _copy(source, part, f"{copy} to {path}")
                _move_aside(path)
                begun = begin_log(None if row is None else LogHead(*row))
                part.rename(path)
            sync_folder(path.parent)
            return begun


def _move_aside(path: Path) -> None:
    """Rename a database and its log, if there are any, to the first free name.

    The database goes first, and has the name itself when its log has: a repetition
    after a crash in between finds the same name, and moves the log beside it.
    """
    log, memory = (path.with_name(path.name + each) for each in SUFFIXES[1:])
    names = (path.with_name(f"{path.stem}.old-{n}{path.suffix}") for n in count(1))
    pairs = ((each, each.with_name(f"{each.name}.moving")) for each in names)
    begun = not path.exists()
    aside, moving = next(
        (each, part)
        for each, part in pairs
        if not each.exists() and (begun or not part.exists())
    )
    for source, target in ((path, moving), (log, f"{aside}-wal"), (moving, aside)):
        with suppress(FileNotFoundError):
            source.rename(target)
    memory.unlink(missing_ok=True)


def compact(path: Path) -> tuple[int, int]:
    """Rewrite a database without its free pages; a later ``prune`` can shrink it.

    Returns the sizes before and after, in bytes.  Needs as much free space as the
    database has.  Raises StoreError, also if a coordinator uses it.
    """
    with _errors_named(path):
        before = path.stat().st_size
        _check_space(path.parent, before, f"{path}: compacting it")
        with (
            locked(path),
            closing(
                sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
            ) as sql,
        ):
            make_private(path)
            sql.execute("PRAGMA auto_vacuum = INCREMENTAL")
            sql.execute("VACUUM")
            sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return before, path.stat().st_size


@contextmanager
def _part(file: Path) -> Iterator[Path]:
    """Create a file to be renamed to ``file``; an error leaves nothing of it."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    create_private(part)
    try:
        yield part
    except BaseException:
        for each in (part, part.with_name(f"{part.name}-journal")):
            with suppress(OSError):
                each.unlink()
        raise


def _copy(source: sqlite3.Connection, file: Path, what: str) -> None:
    """Copy a database as of now, in steps that are on the disk one by one.

    Otherwise gigabytes wait in memory, and a commit of the coordinator waits until they
    are written.
    """
    with (
        _errors_named(what),
        file.open("r+b") as copied,  # closed last: closing it ends SQLite's locks
        closing(sqlite3.connect(file)) as target,
        _snapshot(source),
    ):

        def on_step(*_: int) -> None:
            os.fsync(copied.fileno())
            time.sleep(COPY_PAUSE)

        source.backup(target, pages=COPIED_AT_ONCE, progress=on_step)
        target.execute("PRAGMA journal_mode = DELETE")  # one file


@contextmanager
def _snapshot(sql: sqlite3.Connection) -> Iterator[None]:
    """Let all reads of the block see one commit.

    A copy in steps would begin anew after each commit.
    """
    sql.execute("BEGIN")
    try:
        sql.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        yield
    finally:
        sql.execute("ROLLBACK")


def _size(sql: sqlite3.Connection) -> int:
    """Return the bytes of a database as of its last commit."""
    ((pages,),) = sql.execute("PRAGMA page_count")
    ((page_size,),) = sql.execute("PRAGMA page_size")
    return int(pages) * int(page_size)


def _check_space(folder: Path, needed: int, use: str) -> None:
    """Raise StoreError if a folder has less space than needed, before it is filled."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"{use} needs {needed:,} bytes, and {folder} has {free:,} free: free some "
            "space first"
        )


@contextmanager
def _errors_named(what: object) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{what}: {error}") from error
