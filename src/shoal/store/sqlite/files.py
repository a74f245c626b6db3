"""What describes clients' files, in the SQLite store."""

import sqlite3
from collections.abc import Collection
from typing import Any

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.store.files import (
    FILES_MAX,
    RESULT_FILES,
    FileFilter,
    FilePurpose,
    StoredFile,
)
from shoal.store.sqlite.database import SqlRunner

COLUMNS = "id, owner, name, purpose, size, created_at, expires_at"
OPEN_BATCHES = "SELECT count(*) FROM batches WHERE owner = ? AND ended_at IS NULL"


class SqliteFiles:
    """The files of all owners."""

    def __init__(self, database: SqlRunner) -> None:
        self._database = database

    async def add(self, new: StoredFile, total_max: int) -> None:
        def add(sql: sqlite3.Connection) -> None:
            check_room(sql, new.owner, 1, new.size, total_max)
            write_file(sql, new)

        await self._database.transact(add)

    async def find(self, file_id: str) -> StoredFile | None:
        query = f"SELECT {COLUMNS} FROM files WHERE id = ?"

        def find(sql: sqlite3.Connection) -> StoredFile | None:
            row = sql.execute(query, (file_id,)).fetchone()
            return None if row is None else _file(row)

        return await self._database.read(find)

    async def listed(self, wanted: FileFilter, limit: int) -> list[StoredFile]:
        where, values = "owner = ?", [wanted.owner]
        if wanted.purpose is not None:
            where += " AND purpose = ?"
            values.append(wanted.purpose.value)
        order, beyond = ("DESC", "<") if wanted.newest_first else ("ASC", ">")
        if wanted.after is not None:
            where += f" AND number {beyond} (SELECT number FROM files WHERE id = ?)"
            values.append(wanted.after)
        query = (
            f"SELECT {COLUMNS} FROM files WHERE {where} ORDER BY number {order} LIMIT ?"
        )
        return await self._database.read_list(
            lambda sql: [_file(row) for row in sql.execute(query, (*values, limit))]
        )

    async def size_of(self, owner: str) -> int:
        return await self._database.read(lambda sql: _count(sql, owner)[1])

    async def remove(self, file_id: str) -> bool:
        used_by = "SELECT id FROM batches WHERE input_file = ? AND ended_at IS NULL"

        def remove(sql: sqlite3.Connection) -> bool:
            if (user := sql.execute(used_by, (file_id,)).fetchone()) is not None:
                raise InvalidRequest(
                    f"the batch {user[0]} reads this file: cancel it first"
                )
            found = sql.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return found.rowcount > 0

        return await self._database.transact(remove)

    async def expired(self, at: float, limit: int) -> list[str]:
        query = """SELECT id FROM files WHERE expires_at <= ? AND NOT EXISTS (
                       SELECT 1 FROM batches
                       WHERE input_file = files.id AND ended_at IS NULL)
                   LIMIT ?"""
        return await self._database.read(
            lambda sql: [id_ for (id_,) in sql.execute(query, (at, limit))]
        )

    async def known(self, ids: Collection[str]) -> set[str]:
        query = "SELECT 1 FROM files WHERE id = ?"
        return await self._database.read_list(
            lambda sql: {each for each in ids if sql.execute(query, (each,)).fetchone()}
        )


def check_room(
    sql: sqlite3.Connection, owner: str, files: int, size: int, total_max: int
) -> None:
    """Raise TooLarge if an owner may not have so many more files, of ``size`` bytes.

    The files that open batches may write count, but not their bytes.
    """
    count, total = _count(sql, owner)
    ((batches,),) = sql.execute(OPEN_BATCHES, (owner,))
    if count + RESULT_FILES * batches + files > FILES_MAX:
        raise TooLarge(
            f"this key has {count} files, its {batches} open batches may write "
            f"{RESULT_FILES} each, and the limit is {FILES_MAX}: delete some first"
        )
    if total + size > total_max:
        raise TooLarge(
            f"the files of this key have {total} bytes, and {size} more would exceed "
            f"its limit of {total_max} bytes: delete some first"
        )


def write_file(sql: sqlite3.Connection, new: StoredFile) -> None:
    """Add a file in the caller's transaction."""
    sql.execute(
        f"INSERT INTO files ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(new.id, new.owner, new.name, new.purpose.value, new.size),
            *(new.created_at, new.expires_at),
        ),
    )


def _count(sql: sqlite3.Connection, owner: str) -> tuple[int, int]:
    """Return the number and the bytes of an owner's files."""
    query = "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE owner = ?"
    ((count, total),) = sql.execute(query, (owner,))
    return count, total


def _file(row: tuple[Any, ...]) -> StoredFile:
    id_, owner, name, purpose, *rest = row
    return StoredFile(id_, owner, name, FilePurpose(purpose), *rest)
