"""The stores with which the tests of the port run."""

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from harness.contents import contents
from harness.databases import put_new_database
from shoal.store.port import Store
from shoal.store.postgres.database import PostgresStore
from shoal.store.sqlite.database import SqliteStore
from store.query_plans import check_plans, recorded_statements

__all__ = ["contents"]

STORES = ("sqlite", "postgres")

EMPTY = """
    DO $$
    DECLARE name text;
    BEGIN
        FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
            AND tablename NOT IN ('schema_version', 'lease', 'writers')
            ORDER BY tablename = 'deleted_places'
        LOOP EXECUTE format('DELETE FROM %I', name); END LOOP;
        UPDATE writers SET epoch = 0, number = 0;
        PERFORM setval(oid, 1, false) FROM pg_class WHERE relkind = 'S';
    END $$"""
"""Leaves a new database: making one takes ten times as long."""


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Open a store; afterwards, check how SQLite runs what the test made it run."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        store: Store = PostgresStore(server.url())
        await store.open()
        yield store
        await store.close()
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(EMPTY)
        return
    put_new_database(tmp_path / "shoal.db")
    store = SqliteStore(tmp_path / "shoal.db")
    with recorded_statements() as statements:
        await store.open()
        yield store
        await store.close()
    check_plans(tmp_path / "shoal.db", statements)
