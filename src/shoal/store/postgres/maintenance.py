"""Checks the database of a PostgreSQL server, and fills it with an SQLite file's."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from shoal.domain.errors import StoreBroken, StoreError
from shoal.store.blobs import BLOBS_FOLDER, BlobFiles
from shoal.store.contents import copy_contents, write_contents
from shoal.store.file_folder import FILES_FOLDER, FileFolder
from shoal.store.postgres.contents import BLOBS, FILES, ContentRows, ContentSessions
from shoal.store.postgres.database import SNAPSHOT, PostgresDatabase
from shoal.store.postgres.schema import version_of
from shoal.store.postgres.session import Session, connect
from shoal.store.sql.ledger import book_problems, log_problems, size_and_root_in
from shoal.store.sql.schema import VERSION, version_problems
from shoal.store.sqlite.database import locked, read_only

ROWS_AT_ONCE = 64  # each may have a megabyte

COLUMNS = """SELECT table_name, column_name, data_type, is_identity = 'YES'
             FROM information_schema.columns
             WHERE table_schema = current_schema()
             AND table_name NOT IN ('schema_version', 'lease', 'nodes', 'secrets',
                                    'contents', 'content_parts')
             ORDER BY table_name, ordinal_position"""
FILLED = """SELECT EXISTS (SELECT 1 FROM jobs) OR EXISTS (SELECT 1 FROM keys)
            OR EXISTS (SELECT 1 FROM checkpoints) OR EXISTS (SELECT 1 FROM facts)"""


def check(url: str) -> list[str]:
    """Return what is wrong with a database; empty: nothing.  It may be in use.

    Raises StoreError if it cannot be read.
    """
    with _snapshot(url) as sql:
        version = version_of(sql)
        if other := version_problems(version):
            return other
        return [*book_problems(sql), *log_problems(sql)]


def size_and_root(url: str, size: int) -> tuple[int, bytes | None]:
    """As ``size_and_root_in``.  Raises StoreError."""
    with _snapshot(url) as sql:
        return size_and_root_in(sql, size)


@contextmanager
def _snapshot(url: str) -> Iterator[Session]:
    """Read the database as of one commit within the block.  Raises StoreError."""
    database = PostgresDatabase(url)
    try:
        sql = Session(connect(url))
        try:
            sql.execute(SNAPSHOT)
            yield sql
        finally:
            sql.close()
    except psycopg.Error as error:
        failed = database.translated(error)
        raise StoreError(failed.located) from error


class _Column(NamedTuple):
    name: str
    kind: str
    is_numbered: bool  # by a sequence


async def copy(path: Path, url: str) -> dict[str, int]:
    """Copy the database of a stopped coordinator; return the rows of each table.

    The file stays as it is, and so do the folders beside it, which are copied first;
    ``contents`` counts clients' files.  The rows are copied in one transaction: an
    error leaves none.

    Raises StoreError, also if the file is in use, missing, or of another version, or if
    the other database is not empty.
    """
    if not await asyncio.to_thread(path.exists):
        raise StoreBroken("is missing", str(path))
    database = PostgresDatabase(url)
    with locked(path), closing(read_only(path)) as source:
        try:
            ((version,),) = source.execute("PRAGMA user_version")
            if version != VERSION:
                raise StoreError(
                    f"{path} has version {version}, expected {VERSION}: start "
                    "`shoal serve` of this version once without --store"
                )
            await database.open()
            try:
                await database.transact(_check_empty)
                files = await asyncio.to_thread(_copy_files, path, url)
                rows = await database.transact(partial(_copy, source=source))
                return rows | {"contents": files}
            finally:
                await database.close()
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from error


def _check_empty(sql: Session) -> None:
    if sql.execute(FILLED).fetchone()[0]:
        raise StoreError("the database is not empty: create another one")


def _copy_files(path: Path, url: str) -> int:
    folder = FileFolder(path.with_name(FILES_FOLDER))
    values = BlobFiles(path.with_name(BLOBS_FOLDER))
    values.open()
    with closing(ContentSessions(url)) as sessions:
        rows = ContentRows(sessions, BLOBS)
        for digest in values.digests():
            write_contents(rows, digest.hex(), [values.read(digest)])
        return copy_contents(folder, ContentRows(sessions, FILES))


def _copy(sql: Session, source: sqlite3.Connection) -> dict[str, int]:
    tables: dict[str, list[_Column]] = {}
    for table, *column in sql.execute(COLUMNS).fetchall():
        tables.setdefault(table, []).append(_Column(*column))
    return {
        table: _copy_table(sql, source, table, columns)
        for table, columns in tables.items()
    }


def _copy_table(
    sql: Session, source: sqlite3.Connection, table: str, columns: Sequence[_Column]
) -> int:
    names = [f'"{each.name}"' for each in columns]
    listed, marks = ", ".join(names), ", ".join("?" * len(names))
    # In this order, numbers that are not copied are given in it, too.
    order = " ORDER BY rowid" if '"rowid"' in names else ""
    insert = f"INSERT INTO {table} ({listed}) VALUES ({marks})"
    flags = [each.kind == "boolean" for each in columns]
    sql.execute(f"DELETE FROM {table}")  # the first rows of a new database
    rows = source.execute(f"SELECT {listed} FROM {table}{order}")
    count = 0
    for some in _chunks(rows):
        sql.executemany(insert, [_converted(row, flags) for row in some])
        count += len(some)
    for each in columns:
        if each.is_numbered:
            query = f"""SELECT setval(pg_get_serial_sequence('{table}', '{each.name}'),
                        (SELECT coalesce(max("{each.name}"), 0) FROM {table}) + 1,
                        false)"""
            sql.execute(query)
    return count


def _chunks(rows: sqlite3.Cursor) -> Iterator[list[Any]]:
    while some := rows.fetchmany(ROWS_AT_ONCE):
        yield some


def _converted(row: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """Return a row for PostgreSQL of one of SQLite, which has no type for flags."""
    return [
        bool(value) if flag else value for flag, value in zip(flags, row, strict=True)
    ]
