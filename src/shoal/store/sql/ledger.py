"""Receipts, their log, and accounts in the store, and what is wrong with them."""

import heapq
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from shoal.domain.errors import StoreBroken
from shoal.domain.facts import AccountLimited
from shoal.domain.ids import JobId
from shoal.domain.money import Micros
from shoal.domain.outcome import Usage
from shoal.ledger.accounts import Transfer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier, NodePosition
from shoal.ledger.receipts import read
from shoal.store import ledger
from shoal.store.packing import pack, unpack
from shoal.store.sql.database import Database, Sql, in_steps, select, select_first

RECEIPT = "SELECT leaf, body, signature, at FROM receipts"
LAST = 2**63 - 1  # not below any number of a row
HEAD = "SELECT size, root, note, at FROM checkpoints"
LAST_HEAD = f"{HEAD} ORDER BY size DESC LIMIT 1"


class SqlLedger:
    """Reads what ``write_entries`` has written beside the jobs."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def load(self) -> ledger.LedgerOpening:
        def opening(sql: Sql) -> ledger.LedgerOpening:
            rows = sql.execute("SELECT name, balance, budget FROM accounts")
            accounts = {name: ledger.Account(name, *rest) for name, *rest in rows}
            return ledger.LedgerOpening(accounts, _head(sql, None))

        return await self._database.read_list(opening)

    async def nodes(self, wanted: Sequence[NodePosition]) -> dict[NodePosition, bytes]:
        query = "SELECT hash FROM tree WHERE number = ?"

        def nodes(sql: Sql) -> dict[NodePosition, bytes]:
            found = {
                place: sql.execute(query, (_number(*place),)).fetchone()
                for place in wanted
            }
            return {place: row[0] for place, row in found.items() if row is not None}

        return await self._database.read(nodes)

    async def receipts_of(self, job_id: JobId) -> list[ledger.LoggedReceipt]:
        query = f"{RECEIPT} WHERE job_id = ? ORDER BY leaf"
        return await self._database.read(select(_receipt, query, job_id))

    async def receipt_owner(self, job_id: JobId) -> str | None:
        query = "SELECT owner FROM receipts WHERE job_id = ? AND owner IS NOT NULL"
        return await self._database.read(select_first(str, query, job_id))

    async def recent_receipts(
        self, owner: str | None, limit: int, before: int | None = None
    ) -> list[ledger.LoggedReceipt]:
        where, owners = ("", ()) if owner is None else ("owner = ? AND", (owner,))
        query = f"{RECEIPT} WHERE {where} leaf < ? ORDER BY leaf DESC LIMIT ?"
        values = (*owners, LAST if before is None else before, limit)
        return await self._database.read_list(select(_receipt, query, *values))

    async def claim_payment(
        self, names: Collection[str], job_id: JobId, at: float
    ) -> bool:
        def claim(sql: Sql) -> bool:
            find = "SELECT 1 FROM payments WHERE reference = ?"
            if any(sql.execute(find, (name,)).fetchone() for name in names):
                return False
            rows = [(name, job_id, at) for name in set(names)]
            sql.executemany("INSERT INTO payments VALUES (?, ?, ?)", rows)
            return True

        return await self._database.transact(claim)

    async def head(self, size: int | None = None) -> ledger.LogHead | None:
        return await self._database.read(lambda sql: _head(sql, size))

    async def head_after(self, index: int) -> ledger.LogHead | None:
        query = f"{HEAD} WHERE size > ? ORDER BY size LIMIT 1"
        return await self._database.read(select_first(ledger.LogHead, query, index))

    async def transfers(
        self, account: str, limit: int, before: int | None = None
    ) -> list[ledger.PostedTransfer]:
        query = """SELECT number, at, debit, credit, amount, why, job_id FROM transfers
                   WHERE {} = ? AND number < ? ORDER BY number DESC LIMIT ?"""
        values = (account, LAST if before is None else before, limit)

        def transfers(sql: Sql) -> list[ledger.PostedTransfer]:
            sides = (
                sql.execute(query.format(side), values) for side in ("debit", "credit")
            )
            rows = heapq.merge(*sides, key=lambda row: row[0], reverse=True)
            return [_transfer(row) for row in islice(rows, limit)]

        return await self._database.read_list(transfers)


def write_entries(sql: Sql, entries: ledger.LedgerEntries, at: float) -> None:
    """Write what belongs to a batch of facts, in the transaction that writes them."""
    if entries.transfers:  # most jobs are free
        _write_transfers(sql, entries.transfers, at)
    if entries.head is not None:
        head = entries.head
        sql.executemany(
            "INSERT INTO receipts (leaf, job_id, at, body, signature, owner)"
            " VALUES (?1, ?2, ?3, ?4, ?5, (SELECT owner FROM jobs WHERE id = ?2))",
            [
                (each.index, each.claims.job_id, at, pack(each.body), each.signature)
                for each in entries.receipts
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


def write_limit(sql: Sql, fact: AccountLimited) -> None:
    """Write how far an account may go."""
    sql.execute(
        "INSERT INTO accounts (name, balance, budget) VALUES (?, 0, ?)"
        " ON CONFLICT (name) DO UPDATE SET budget = excluded.budget",
        (fact.account, fact.budget),
    )


def _write_transfers(sql: Sql, transfers: Sequence[Transfer], at: float) -> None:
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
        " ON CONFLICT (name) DO UPDATE"
        " SET balance = accounts.balance + excluded.balance",
        changes.items(),
    )


def _number(level: int, position: int) -> int:
    """Return how many nodes of the log become complete before this one.

    A leaf completes as many nodes above it as its number has ones at its end.
    """
    leaf = (position + 1 << level) - 1  # with which it is complete
    return 2 * leaf - leaf.bit_count() + level


def _head(sql: Sql, size: int | None) -> ledger.LogHead | None:
    if size is None:
        query = f"{HEAD} WHERE size <= ? ORDER BY size DESC LIMIT 1"
        return select_first(ledger.LogHead, query, LAST)(sql)
    return select_first(ledger.LogHead, f"{HEAD} WHERE size = ?", size)(sql)


def _receipt(
    index: int, packed: bytes, signature: bytes, at: float
) -> ledger.LoggedReceipt:
    body = unpack(packed)
    return ledger.LoggedReceipt(index, read(body).claims, body, signature, at)


def read_usage(sql: Sql, job_id: JobId) -> Usage | None:
    """Read the token counts of a job's newest receipt; None: there are none."""
    query = "SELECT body FROM receipts WHERE job_id = ? ORDER BY leaf DESC LIMIT 1"
    for (packed,) in sql.execute(query, (job_id,)):
        claims = read(unpack(packed)).claims
        if claims.prompt_tokens is not None and claims.completion_tokens is not None:
            return Usage(claims.prompt_tokens, claims.completion_tokens)
    return None


def _transfer(row: tuple[Any, ...]) -> ledger.PostedTransfer:
    number, at, debit, credit, amount, why, job_id = row
    transfer = Transfer(debit, credit, Micros(amount), why, job_id)
    return ledger.PostedTransfer(number, at, transfer)


def book_problems(sql: Sql) -> list[str]:
    """Return why the accounts are wrong."""
    ((total,),) = sql.execute("SELECT coalesce(sum(balance), 0) FROM accounts")
    if not total:
        return []
    return [f"the accounts sum to {total} micro-dollars, expected 0"]


def log_problems(sql: Sql) -> list[str]:
    """Return why the receipts are not those of the last checkpoint.

    Makes the log anew from them: about 10 s for a million.
    """
    row = sql.execute(LAST_HEAD).fetchone()
    frontier = Frontier()
    query = "SELECT number, hash FROM tree WHERE number > ? ORDER BY number"
    nodes = in_steps(sql, query, -1)
    query = "SELECT leaf, body FROM receipts WHERE leaf > ? ORDER BY leaf"
    for leaf, packed in in_steps(sql, query, -1):
        if leaf != frontier.size:
            return [f"receipt {frontier.size} is missing"]
        try:
            made = frontier.append(unpack(packed))
        except StoreBroken as error:
            return [f"receipt {leaf}: {error}"]
        if any(next(nodes, (0, None))[1] != each for _, _, each in made):
            return [f"receipt {leaf} is not the one in the log"]
    found = frontier.size, frontier.root()
    if found != ((0, EMPTY_ROOT) if row is None else row[:2]):
        return [f"the {frontier.size} receipts are not those of the last checkpoint"]
    return []


def size_and_root_in(sql: Sql, size: int) -> tuple[int, bytes | None]:
    """Return how many receipts a database has, and the log's root at a size.

    None: there is no checkpoint of that size.
    """
    query = """SELECT (SELECT max(size) FROM checkpoints),
                      (SELECT root FROM checkpoints WHERE size = ?)"""
    head, root = sql.execute(query, (size,)).fetchone()
    return head or 0, root
