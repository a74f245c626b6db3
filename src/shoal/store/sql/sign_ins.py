"""Browsers that are signed in, and codes that sign one in once, in the store.

A session and a code are known by their digests: who reads the database cannot make a
cookie or a link of it.
"""

from collections.abc import Mapping
from typing import Any

from shoal.domain.credentials import BrowserSession
from shoal.store.port import SignInCode
from shoal.store.sql.database import Database, Sql, select

COLUMNS = "digest, key_digest, expires_at"


class SqlSignIns:
    """Keeps sessions and codes beside the keys."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def sessions(self) -> list[BrowserSession]:
        query = f"SELECT {COLUMNS} FROM browser_sessions ORDER BY number"
        return await self._database.read_list(select(BrowserSession, query))

    async def write_sessions(
        self, changes: Mapping[bytes, BrowserSession | None]
    ) -> None:
        ended = [(digest,) for digest, begun in changes.items() if begun is None]
        added = [
            (each.digest, each.key_digest, each.expires_at)
            for each in changes.values()
            if each is not None
        ]

        def write(sql: Sql) -> None:
            sql.executemany("DELETE FROM browser_sessions WHERE digest = ?", ended)
            sql.executemany(
                f"""INSERT INTO browser_sessions ({COLUMNS}) VALUES (?, ?, ?)
                    ON CONFLICT DO NOTHING""",
                added,
            )

        await self._database.transact(write)

    async def add_code(self, new: SignInCode, count_max: int) -> None:
        def add(sql: Sql) -> None:
            sql.execute(
                f"INSERT INTO sign_in_codes ({COLUMNS}) VALUES (?, ?, ?)",
                (new.digest, new.key_digest, new.expires_at),
            )
            sql.execute(
                """DELETE FROM sign_in_codes WHERE number <= (
                       SELECT number FROM sign_in_codes
                       ORDER BY number DESC LIMIT 1 OFFSET ?)""",
                (count_max,),
            )

        await self._database.transact(add)

    async def redeem(self, digest: bytes) -> SignInCode | None:
        query = f"DELETE FROM sign_in_codes WHERE digest = ? RETURNING {COLUMNS}"
        found = await self._database.transact(select(SignInCode, query, digest))
        return found[0] if found else None


def forget_sign_ins(sql: Sql, before: float) -> None:
    """Delete the sessions and codes that had expired by then."""
    for table in ("browser_sessions", "sign_in_codes"):
        sql.execute(f"DELETE FROM {table} WHERE expires_at < ?", (before,))
