"""The database of a coordinator that was killed: as it is found, and at each commit.

Source of the formats: "Database File Format" of SQLite, sections 1.3 and 4.1.
"""

import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import psycopg
from psycopg import sql

NAME = "shoal.db"
HEADER = struct.Struct(">8I")  # of the log; the third is the size of a page
FRAME = struct.Struct(">6I")  # a page's number, and of commits the pages there are then
CHECKPOINT_AT = 1000  # frames from which on SQLite moves them into the database


def copied(data: Path, to: Path) -> Path:
    """Copy the database of a data folder, with its log; return where it is now.

    What reads it leaves its mark on it, and the next coordinator is to find what the
    last one has left.
    """
    to.mkdir()
    for file in data.glob(f"{NAME}*"):
        shutil.copy(file, to)
    return to / NAME


@contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a database as the next coordinator does: up to its last commit."""
    with closing(sqlite3.connect(file)) as database:
        yield database


def commits(file: Path) -> Iterator[sqlite3.Connection]:
    """Yield a database as it was after each commit that is in its log alone.

    There is none of them while the log is being moved into the database: then pages of
    later commits are mixed with those of earlier ones.  Works on a copy beside it.
    """
    frames = _frames(file.with_name(f"{NAME}-wal"))
    if len(frames) >= CHECKPOINT_AT:
        return
    at = file.with_suffix(".at")
    shutil.copy(file, at)
    with at.open("r+b") as pages:
        for page, pages_then, content in frames:
            pages.seek((page - 1) * len(content))
            pages.write(content)
            if pages_then:
                pages.truncate(pages_then * len(content))
                pages.flush()
                with _as_it_stands(at) as database:
                    yield database


def _frames(log: Path) -> list[tuple[int, int, bytes]]:
    """Return page numbers, how many pages there are after a commit, and pages."""
    found: list[tuple[int, int, bytes]] = []
    data = log.read_bytes() if log.exists() else b""
    if len(data) < HEADER.size:
        return found
    _, _, size, _, *salts = HEADER.unpack_from(data)[:6]
    step = FRAME.size + size
    for at in range(HEADER.size, len(data) - step + 1, step):
        page, pages_then, *more = FRAME.unpack_from(data, at)
        if more[:2] != salts:
            break  # of an earlier log, which is overwritten from its beginning
        found.append((page, pages_then, data[at + FRAME.size : at + step]))
    return found


@contextmanager
def _as_it_stands(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a database file alone, whatever is in its log."""
    with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as database:
        yield database


def copied_from_server(url: str, to: Path) -> Path:
    """Copy the database of a PostgreSQL server, as of one commit, into a file.

    The tables have the same names and columns, but no keys and indexes.
    """
    with psycopg.connect(url) as server, closing(sqlite3.connect(to)) as file:
        server.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        tables = server.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        ).fetchall()
        for (name,) in tables:
            table = sql.Identifier(name)
            rows = server.execute(sql.SQL("SELECT * FROM {}").format(table))
            assert rows.description is not None
            columns = ", ".join(f'"{each.name}"' for each in rows.description)
            file.execute(f"CREATE TABLE {name} ({columns})")
            marks = ", ".join("?" * len(rows.description))
            values = ([*map(_plain, row)] for row in rows)
            file.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
        file.commit()
    return to


def _plain(value: object) -> object:
    return str(value) if isinstance(value, datetime) else value
