"""A store that counts what each of its transactions writes."""

import sqlite3
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from shoal.store.sqlite.database import SqliteStore

T = TypeVar("T")


class MeteredStore(SqliteStore):
    """A store whose log only grows, up to 64 MiB."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._log = path.with_name(f"{path.name}-wal")
        self._begun: list[int] = []  # the size of the log when a transaction began
        transact = self.database.transact

        async def metered(work: Callable[[sqlite3.Connection], T]) -> T:
            def run(sql: sqlite3.Connection) -> T:
                self._begun.append(self._log.stat().st_size)
                return work(sql)

            return await transact(run)

        self.database.transact = metered  # type: ignore[method-assign]  # to count

    async def open(self, *, create: bool = True) -> None:
        await super().open(create=create)
        await self.database.transact(
            lambda sql: sql.execute("PRAGMA wal_autocheckpoint = 0").fetchone()
        )

    def forget(self) -> None:
        """Count from now on."""
        self._begun.clear()

    @property
    def written(self) -> list[int]:
        """The bytes that each transaction has written."""
        sizes = [*self._begun, self._log.stat().st_size]
        return [after - before for before, after in pairwise(sizes)]
