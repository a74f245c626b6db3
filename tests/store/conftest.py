"""The stores with which the tests of the port run."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shoal.store.port import Store
from shoal.store.sqlite.store import SqliteStore

STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": lambda folder: SqliteStore(folder / "shoal.db")
}


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store = STORES[request.param](tmp_path)
    await store.open()
    yield store
    await store.close()
