"""The stores with which the tests of the port run."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from harness.databases import put_new_database
from shoal.store.port import Store
from shoal.store.sqlite.store import SqliteStore
from store.query_plans import check_plans, recorded_statements

STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": lambda folder: SqliteStore(folder / "shoal.db")
}


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Open a store; afterwards, check how SQLite runs what the test made it run."""
    put_new_database(tmp_path / "shoal.db")
    store = STORES[request.param](tmp_path)
    with recorded_statements() as statements:
        await store.open()
        yield store
        await store.close()
    check_plans(tmp_path / "shoal.db", statements)
