"""Pairing codes in the SQLite store."""

import sqlite3

from shoal.store.pairing import PairedWorker, PairingCode
from shoal.store.sqlite.database import SqlRunner

CODE = """SELECT code, owner, user, expires_at, coalesce(public_key, ''), claimed_at
          FROM pairing_codes"""


LAST = "\U0010ffff"  # sorts after everything that a code may go on with


class SqlitePairing:
    """Keeps codes beside the keys."""

    def __init__(self, database: SqlRunner) -> None:
        self._database = database

    async def add(self, code: PairingCode) -> bool:
        def add(sql: sqlite3.Connection) -> bool:
            query = """INSERT OR IGNORE INTO pairing_codes
                       (code, owner, user, expires_at) VALUES (?, ?, ?, ?)"""
            values = (code.code, code.owner, code.user, code.expires_at)
            return sql.execute(query, values).rowcount > 0

        return await self._database.transact(add)

    async def find(self, beginning: str) -> list[PairingCode]:
        def find(sql: sqlite3.Connection) -> list[PairingCode]:
            query = f"{CODE} WHERE code >= ? AND code < ?"
            found = sql.execute(query, (beginning, beginning + LAST))
            return [PairingCode(*row) for row in found]

        return await self._database.read(find)

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        def claim(sql: sqlite3.Connection) -> bool:
            query = """UPDATE pairing_codes SET public_key = ?, claimed_at = ?
                       WHERE code = ? AND claimed_at IS NULL AND expires_at > ?"""
            return sql.execute(query, (public_key, at, code, at)).rowcount > 0

        return await self._database.transact(claim)

    async def count_claimable(self, owner: str, at: float) -> int:
        def count(sql: sqlite3.Connection) -> int:
            query = """SELECT count(*) FROM pairing_codes
                       WHERE owner = ? AND claimed_at IS NULL AND expires_at > ?"""
            ((waiting,),) = sql.execute(query, (owner, at))
            return int(waiting)

        return await self._database.read(count)

    async def count_paired(self, owner: str) -> int:
        def count(sql: sqlite3.Connection) -> int:
            query = "SELECT count(*) FROM trusted WHERE owner = ?"
            ((paired,),) = sql.execute(query, (owner,))
            return int(paired)

        return await self._database.read(count)

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        def partners(sql: sqlite3.Connection) -> list[PairedWorker]:
            query = """SELECT paired_at, public_key FROM trusted
                       WHERE owner = ? AND user = ?"""
            rows = sorted(sql.execute(query, (owner, user)))
            return [PairedWorker(key, paired_at) for paired_at, key in rows]

        return await self._database.read(partners)


def forget_expired(sql: sqlite3.Connection, before: float) -> None:
    """Delete the codes that could not be claimed any more by then."""
    sql.execute("DELETE FROM pairing_codes WHERE expires_at < ?", (before,))
