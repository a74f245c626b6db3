"""Checks the database of a PostgreSQL server."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from shoal.domain.errors import StoreError
from shoal.store.postgres.database import SNAPSHOT, PostgresDatabase
from shoal.store.postgres.schema import MIGRATIONS, version_of
from shoal.store.postgres.session import Session, connect
from shoal.store.sql.ledger import book_problems, log_problems, size_and_root_in


def check(url: str) -> list[str]:
    """Return what is wrong with a database; empty: nothing.  It may be in use.

    Raises StoreError if it cannot be read.
    """
    with _snapshot(url) as sql:
        version = version_of(sql)
        if version != len(MIGRATIONS):
            return [
                f"version {version}, expected {len(MIGRATIONS)}: `shoal serve` of this "
                "version has not opened it yet, or a newer one has"
            ]
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
