"""Receipts, their log, and accounts in the SQLite store."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from shoal.domain.facts import AccountLimited
from shoal.domain.ids import JobId
from shoal.domain.money import Micros
from shoal.ledger.accounts import Transfer
from shoal.ledger.merkle import NodePosition
from shoal.ledger.receipts import read
from shoal.store.ledger import (
    Account,
    LedgerEntries,
    LedgerOpening,
    LoggedReceipt,
    LogHead,
    PostedTransfer,
)
from shoal.store.sqlite.database import SqlRunner

RECEIPT = "SELECT leaf, body, signature, at FROM receipts"
TRANSFERS_SEARCHED = 100_000  # the newest ones, when an account is shown
HEAD = "SELECT size, root, note, at FROM checkpoints"


class SqliteLedger:
    """Reads what ``write_entries`` has written beside the jobs."""

    def __init__(self, database: SqlRunner) -> None:
        self._database = database

    async def load(self) -> LedgerOpening:
        def opening(sql: sqlite3.Connection) -> LedgerOpening:
            rows = sql.execute("SELECT name, balance, budget FROM accounts")
            accounts = {name: Account(name, *rest) for name, *rest in rows}
            return LedgerOpening(accounts, _head(sql, None))

        return await self._database.read_list(opening)

    async def nodes(self, wanted: Sequence[NodePosition]) -> dict[NodePosition, bytes]:
        query = "SELECT hash FROM tree WHERE number = ?"

        def nodes(sql: sqlite3.Connection) -> dict[NodePosition, bytes]:
            found = {
                place: sql.execute(query, (_number(*place),)).fetchone()
                for place in wanted
            }
            return {place: row[0] for place, row in found.items() if row is not None}

        return await self._database.read(nodes)

    async def receipts_of(self, job_id: JobId) -> list[LoggedReceipt]:
        query = f"{RECEIPT} WHERE job_id = ? ORDER BY leaf"
        return await self._database.read(lambda sql: _receipts(sql, query, job_id))

    async def recent_receipts(
        self, owner: str | None, limit: int
    ) -> list[LoggedReceipt]:
        where, values = "", []
        if owner is not None:
            where = "WHERE job_id IN (SELECT id FROM jobs WHERE owner = ?)"
            values = [owner]
        query = f"{RECEIPT} {where} ORDER BY leaf DESC LIMIT ?"
        return await self._database.read_list(
            lambda sql: _receipts(sql, query, *values, limit)
        )

    async def claim_payment(self, reference: str, job_id: JobId, at: float) -> bool:
        query = "INSERT OR IGNORE INTO payments VALUES (?, ?, ?)"

        def claim(sql: sqlite3.Connection) -> bool:
            return sql.execute(query, (reference, job_id, at)).rowcount == 1

        return await self._database.transact(claim)

    async def head(self, size: int | None = None) -> LogHead | None:
        return await self._database.read(lambda sql: _head(sql, size))

    async def transfers(self, account: str, limit: int) -> list[PostedTransfer]:
        # Without an index, which each transfer would have to be put into, twice.
        query = """
            SELECT number, at, debit, credit, amount, why, job_id FROM transfers
            WHERE number > (SELECT max(number) FROM transfers) - :newest
              AND (debit = :account OR credit = :account)
            ORDER BY number DESC LIMIT :most"""

        def transfers(sql: sqlite3.Connection) -> list[PostedTransfer]:
            values = {"account": account, "most": limit, "newest": TRANSFERS_SEARCHED}
            rows = sql.execute(query, values)
            return [_transfer(row) for row in rows]

        return await self._database.read_list(transfers)


def write_entries(sql: sqlite3.Connection, entries: LedgerEntries, at: float) -> None:
    """Write what belongs to a batch of facts, in the transaction that writes them."""
    if entries.transfers:
        _write_transfers(sql, entries.transfers, at)
    if entries.head is not None:
        head = entries.head
        sql.executemany(
            "INSERT INTO receipts VALUES (?, ?, ?, ?, ?)",
            [
                (filed.index, filed.claims.job_id, at, filed.body, filed.signature)
                for filed in entries.receipts
            ],
        )
        sql.executemany(
            "INSERT INTO tree VALUES (?, ?)",
            [(_number(level, place), node) for level, place, node in entries.nodes],
        )
        sql.execute(
            "INSERT INTO checkpoints VALUES (?, ?, ?, ?)",
            (head.size, head.root, at, head.note),
        )


def write_limit(sql: sqlite3.Connection, fact: AccountLimited) -> None:
    """Write how far an account may go."""
    sql.execute(
        "INSERT INTO accounts (name, balance, budget) VALUES (?, 0, ?)"
        " ON CONFLICT DO UPDATE SET budget = excluded.budget",
        (fact.account, fact.budget),
    )


def _write_transfers(
    sql: sqlite3.Connection, transfers: Sequence[Transfer], at: float
) -> None:
    changes: dict[str, int] = {}
    for each in transfers:
        changes[each.debit] = changes.get(each.debit, 0) - each.amount
        changes[each.credit] = changes.get(each.credit, 0) + each.amount
    sql.executemany(
        "INSERT INTO transfers (at, job_id, debit, credit, amount, why)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        [
            (at, each.job_id, each.debit, each.credit, each.amount, each.why)
            for each in transfers
        ],
    )
    # One row for each account that a batch touches, however often.
    sql.executemany(
        "INSERT INTO accounts (name, balance) VALUES (?, ?)"
        " ON CONFLICT DO UPDATE SET balance = balance + excluded.balance",
        changes.items(),
    )


def _number(level: int, position: int) -> int:
    """Return how many nodes of the log become complete before this one.

    A leaf completes as many nodes above it as its number has ones at its end.
    """
    leaf = (position + 1 << level) - 1  # with which it is complete
    return 2 * leaf - leaf.bit_count() + level


def _head(sql: sqlite3.Connection, size: int | None) -> LogHead | None:
    if size is None:
        row = sql.execute(f"{HEAD} ORDER BY size DESC LIMIT 1").fetchone()
    else:
        row = sql.execute(f"{HEAD} WHERE size = ?", (size,)).fetchone()
    return None if row is None else LogHead(*row)


def _receipts(
    sql: sqlite3.Connection, query: str, *values: object
) -> list[LoggedReceipt]:
    return [_receipt(row) for row in sql.execute(query, values)]


def _receipt(row: tuple[Any, ...]) -> LoggedReceipt:
    index, body, signature, at = row
    return LoggedReceipt(index, read(body).claims, body, signature, at)


def _transfer(row: tuple[Any, ...]) -> PostedTransfer:
    number, at, debit, credit, amount, why, job_id = row
    transfer = Transfer(debit, credit, Micros(amount), why, job_id)
    return PostedTransfer(number, at, transfer)
