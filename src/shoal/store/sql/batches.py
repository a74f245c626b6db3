"""Clients' files, batches and the results of their lines, in the store."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from shoal.domain.errors import InvalidRequest, NotFound, QueueFull, TooLarge
from shoal.store import batches
from shoal.store.packing import pack, unpack
from shoal.store.sql.database import Database, Sql, in_steps, select, select_first

FILE_COLUMNS = "id, owner, name, purpose, size, created_at, expires_at"
COLUMNS = """id, owner, endpoint, input_file, time_window, created_at, expires_at,
             metadata, status, model, lines, completed, failed, errors, output_file,
             error_file, times"""

NEXT_NUMBER = """1 + max(coalesce((SELECT max(number) FROM {}), 0),
    coalesce((SELECT max(number) FROM deleted_places), 0))"""
"""SQLite would give the number of the newest row again after its deletion."""

OPEN_BATCHES = "SELECT count(*) FROM batches WHERE owner = ? AND ended_at IS NULL"


class SqlFiles:
    """The files of all owners."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def add(self, new: batches.StoredFile, total_max: int) -> None:
        def add(sql: Sql) -> None:
            _check_room(sql, new.owner, 1, new.size, total_max)
            _write_file(sql, new)

        await self._database.transact(add)

    async def find(self, file_id: str) -> batches.StoredFile | None:
        query = f"SELECT {FILE_COLUMNS} FROM files WHERE id = ?"
        return await self._database.read(select_first(_file, query, file_id))

    async def place(self, file_id: str) -> batches.ListPlace | None:
        return await self._database.read(_find_place("files", file_id))

    async def listed(
        self, wanted: batches.FileFilter, limit: int
    ) -> list[batches.StoredFile]:
        where, values = "owner = ?", list[str | int]([wanted.owner])
        if wanted.purpose is not None:
            where += " AND purpose = ?"
            values.append(wanted.purpose.value)
        order, beyond = ("DESC", "<") if wanted.newest_first else ("ASC", ">")
        if wanted.after is not None:
            where += f" AND number {beyond} ?"
            values.append(wanted.after)
        query = (
            f"SELECT {FILE_COLUMNS} FROM files WHERE {where}"
            f" ORDER BY number {order} LIMIT ?"
        )
        return await self._database.read_list(select(_file, query, *values, limit))

    async def size_of(self, owner: str) -> int:
        return await self._database.read(lambda sql: _count(sql, owner)[1])

    async def remove(self, file_id: str) -> bool:
        used_by = "SELECT id FROM batches WHERE input_file = ? AND ended_at IS NULL"

        def remove(sql: Sql) -> bool:
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
        return await self._database.read(select(str, query, at, limit))

    async def known(self, ids: Collection[str]) -> set[str]:
        query = "SELECT 1 FROM files WHERE id = ?"
        return await self._database.read_list(
            lambda sql: {each for each in ids if sql.execute(query, (each,)).fetchone()}
        )


def _find_place(table: str, id_: str) -> Callable[[Sql], batches.ListPlace | None]:
    query = f"""SELECT owner, number FROM {table} WHERE id = ?1
                UNION ALL SELECT owner, number FROM deleted_places WHERE id = ?1"""
    return select_first(batches.ListPlace, query, id_)


def _check_room(sql: Sql, owner: str, files: int, size: int, total_max: int) -> None:
    """Raise TooLarge if an owner may not have ``files`` more files of ``size`` bytes.

    The files that open batches may write count, but not their bytes.
    """
    count, total = _count(sql, owner)
    ((unended,),) = sql.execute(OPEN_BATCHES, (owner,))
    if count + batches.RESULT_FILES * unended + files > batches.FILES_MAX:
        raise TooLarge(
            f"this key has {count} files, its {unended} open batches may write "
            f"{batches.RESULT_FILES} each, and the limit is {batches.FILES_MAX}: "
            "delete some first"
        )
    if total + size > total_max:
        raise TooLarge(
            f"the files of this key have {total} bytes, and {size} more would exceed "
            f"its limit of {total_max} bytes: delete some first"
        )


def _write_file(sql: Sql, new: batches.StoredFile) -> None:
    """Add a file in the caller's transaction."""
    sql.execute(
        f"INSERT INTO files (number, {FILE_COLUMNS})"
        f" VALUES ({NEXT_NUMBER.format('files')}{', ?' * 7})",
        (
            *(new.id, new.owner, new.name, new.purpose.value, new.size),
            *(new.created_at, new.expires_at),
        ),
    )


def _count(sql: Sql, owner: str) -> tuple[int, int]:
    """Return the number and the bytes of an owner's files."""
    query = "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE owner = ?"
    ((count, total),) = sql.execute(query, (owner,))
    return count, total


def _file(
    id_: str, owner: str, name: str, purpose: str, *rest: Any
) -> batches.StoredFile:
    return batches.StoredFile(id_, owner, name, batches.FilePurpose(purpose), *rest)


class SqlBatches:
    """The batches of all owners."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def add(self, new: batches.StoredBatch, total_max: int) -> None:
        file = "SELECT 1 FROM files WHERE id = ?"

        def add(sql: Sql) -> None:
            ((count,),) = sql.execute(OPEN_BATCHES, (new.owner,))
            if count >= batches.BATCHES_OPEN_MAX:
                raise QueueFull(
                    f"{count} batches of this key have not ended yet: wait for one, or "
                    "cancel it"
                )
            # At the limit itself there is no room for any result.
            _check_room(sql, new.owner, batches.RESULT_FILES, 1, total_max)
            if sql.execute(file, (new.input_file,)).fetchone() is None:
                raise NotFound(f"there is no file {new.input_file}")
            sql.execute(
                f"INSERT INTO batches (number, {COLUMNS})"
                f" VALUES ({NEXT_NUMBER.format('batches')}{', ?' * 17})",
                (
                    *(new.id, new.owner, new.endpoint, new.input_file, new.window),
                    *(new.created_at, new.expires_at),
                    None if new.metadata is None else json.dumps({**new.metadata}),
                    *(new.status.value, new.model, new.lines),
                    *(new.completed, new.failed, _errors_text(new.errors)),
                    *(new.output_file, new.error_file),
                    json.dumps({each.value: at for each, at in new.times.items()}),
                ),
            )

        await self._database.transact(add)

    async def find(self, batch_id: str) -> batches.StoredBatch | None:
        return await self._database.read(_find(batch_id))

    async def place(self, batch_id: str) -> batches.ListPlace | None:
        return await self._database.read(_find_place("batches", batch_id))

    async def listed(
        self, owner: str | None, after: int | None, limit: int
    ) -> list[batches.StoredBatch]:
        where, values = "number > 0", list[str | int]()
        if owner is not None:
            where, values = "owner = ?", [owner]
        if after is not None:
            where += " AND number < ?"
            values.append(after)
        query = (
            f"SELECT {COLUMNS} FROM batches WHERE {where} ORDER BY number DESC LIMIT ?"
        )
        return await self._database.read_list(select(_batch, query, *values, limit))

    async def open(self) -> list[batches.StoredBatch]:
        query = (
            f"SELECT {COLUMNS} FROM batches WHERE ended_at IS NULL ORDER BY created_at"
        )
        return await self._database.read_list(select(_batch, query))

    async def change(
        self,
        batch_id: str,
        change: batches.BatchChange,
        expected: Collection[batches.BatchStatus],
    ) -> bool:
        def update(sql: Sql) -> bool:
            before = _find(batch_id)(sql)
            if before is None or before.status not in expected:
                return False
            for new in (change.output, change.error):
                if new is not None:
                    _write_file(sql, new)
            times = {each.value: at for each, at in before.times.items()}
            times[change.status.value] = change.at
            errors = None if change.errors is None else _errors_text(change.errors)
            sql.execute(
                "UPDATE batches SET status = ?, times = ?, model = coalesce(?, model),"
                " lines = coalesce(?, lines), errors = coalesce(?, errors),"
                " output_file = coalesce(?, output_file),"
                " error_file = coalesce(?, error_file), ended_at = ? WHERE id = ?",
                (
                    *(change.status.value, json.dumps(times)),
                    *(change.model, change.lines, errors),
                    None if change.output is None else change.output.id,
                    None if change.error is None else change.error.id,
                    change.at if change.status in batches.BATCH_ENDED else None,
                    batch_id,
                ),
            )
            return True

        return await self._database.transact(update)

    async def record(
        self, batch_id: str, results: Sequence[batches.LineResult]
    ) -> None:
        insert = (
            "INSERT INTO batch_results (batch_id, line, failed, body)"
            " VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
        )
        count = (
            "UPDATE batches SET completed = completed + ?, failed = failed + ?"
            " WHERE id = ?"
        )

        def record(sql: Sql) -> None:
            counts = [0, 0]
            for each in results:
                row = (batch_id, each.line, each.failed, pack(each.body))
                counts[each.failed] += sql.execute(insert, row).rowcount
            sql.execute(count, (*counts, batch_id))

        await self._database.transact(record)

    async def recorded(self, batch_id: str) -> list[int]:
        query = "SELECT line FROM batch_results WHERE batch_id = ?"
        return await self._database.read_list(select(int, query, batch_id))

    async def begun(self, batch: batches.StoredBatch) -> list[int]:
        query = (
            "SELECT idempotency_key FROM jobs"
            " WHERE owner = ? AND idempotency_key > ? AND idempotency_key < ?"
        )
        # The character after the slash is the zero.
        values = (batch.owner, f"{batch.id}/", f"{batch.id}0")
        lines = range(1, batch.lines + 1)
        found = await self._database.read_list(select(batches.line_of, query, *values))
        return [line for line in found if line in lines]

    async def results(
        self, batch_id: str, after: int, size: int
    ) -> Sequence[batches.LineResult]:
        query = (
            "SELECT line, body, failed FROM batch_results"
            " WHERE batch_id = ? AND line > ? ORDER BY line"
        )

        def read(sql: Sql) -> list[batches.LineResult]:
            found, left = list[batches.LineResult](), size
            for line, body, failed in in_steps(sql, query, batch_id, after):
                found.append(batches.LineResult(line, unpack(body), bool(failed)))
                left -= found[-1].size
                if left <= 0:
                    break
            return found

        return await self._database.read_list(read)

    async def drop_results(self, size: int) -> bool:
        some = "SELECT id FROM batches WHERE has_results AND ended_at IS NOT NULL"
        sizes = (
            "SELECT line, length(body) FROM batch_results"
            " WHERE batch_id = ? AND line > ? ORDER BY line"
        )
        delete = "DELETE FROM batch_results WHERE batch_id = ? AND line <= ?"
        emptied = "UPDATE batches SET has_results = false WHERE id = ?"

        def drop(sql: Sql) -> bool:
            if (found := sql.execute(f"{some} LIMIT 1").fetchone()) is None:
                return False
            (id_,) = found
            last, left = 0, size
            for line, length in in_steps(sql, sizes, id_, 0):
                last = line
                left -= batches.RESULT_COST + length
                if left <= 0:
                    break
            else:
                sql.execute(emptied, (id_,))
            sql.execute(delete, (id_, last))
            return True

        return await self._database.transact(drop)


def _errors_text(errors: Sequence[batches.BatchError]) -> str:
    return json.dumps([asdict(each) for each in errors])


def _find(batch_id: str) -> Callable[[Sql], batches.StoredBatch | None]:
    query = f"SELECT {COLUMNS} FROM batches WHERE id = ?"
    return select_first(_batch, query, batch_id)


def _batch(*row: Any) -> batches.StoredBatch:
    id_, owner, endpoint, input_file, window, created_at, expires_at = row[:7]
    metadata, status, model, lines, completed, failed = row[7:13]
    errors, output_file, error_file, times = row[13:]
    return batches.StoredBatch(
        *(id_, owner, endpoint, input_file, window, created_at, expires_at),
        None if metadata is None else json.loads(metadata),
        batches.BatchStatus(status),
        *(model, lines, completed, failed),
        tuple(batches.BatchError(**each) for each in json.loads(errors)),
        output_file,
        error_file,
        {batches.BatchStatus(each): at for each, at in json.loads(times).items()},
    )
