"""Stores in memory for one block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shoal.store.sqlite.database import SqliteStore

MEMORY = Path(":memory:")


@asynccontextmanager
async def memory_store() -> AsyncIterator[SqliteStore]:
    """Open a store in memory within the block."""
    store = SqliteStore(MEMORY)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
