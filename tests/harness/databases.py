"""New databases, copied from one that a store has made: migrating takes much longer."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.store.sqlite.database import SqliteStore


def put_new_database(path: Path) -> None:
    """Put a database without jobs at the path, if nothing is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_new_database())


@cache
def _new_database() -> bytes:
    # In a thread, since a loop may run in this one.
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder) / "shoal.db"
        thread.submit(asyncio.run, _open_and_close(path)).result()
        return path.read_bytes()


async def _open_and_close(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.close()
