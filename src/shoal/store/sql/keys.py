"""API keys, join tokens, pairing codes, usage by key, and sign-ins in the store."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Generic, TypeVar

from shoal.domain.credentials import (
    BrowserSession,
    JoinToken,
    Key,
    KeyUsage,
    Quota,
    Scope,
)
from shoal.domain.job import Priority
from shoal.store.port import PairedWorker, PairingCode, SignInCode
from shoal.store.sql.database import Database, Sql, Texts, execute, select

C = TypeVar("C", Key, JoinToken)

KEY_COLUMNS = """id, name, digest, start, scope, created_at, expires_at, revoked_at,
    requests_per_minute, tokens_per_minute, tokens_per_day, budget, priority_max,
    hosted_after"""
TOKEN_COLUMNS = """id, name, digest, created_at, expires_at, revoked_at, uses_max,
    models"""
KEYS = f"SELECT {KEY_COLUMNS} FROM keys ORDER BY rowid"
TOKENS = f"SELECT {TOKEN_COLUMNS} FROM join_tokens ORDER BY rowid"

CODE = """SELECT code, owner, "user", expires_at, coalesce(public_key, ''), claimed_at
          FROM pairing_codes"""


LAST = "\U0010ffff"  # sorts after everything that a code may go on with
EARLIER_DAYS = -1  # the day of the row with the usage of all earlier days

ADDED = """requests = usage.requests + excluded.requests,
    prompt_tokens = usage.prompt_tokens + excluded.prompt_tokens,
    completion_tokens = usage.completion_tokens + excluded.completion_tokens"""
"""To the row of an owner and day."""

USED = """SELECT owner, sum(requests), sum(prompt_tokens), sum(completion_tokens),
                 sum(CASE WHEN day = ? THEN prompt_tokens + completion_tokens
                          ELSE 0 END)
          FROM usage"""


@dataclass(frozen=True, slots=True)
class CredentialTable(Generic[C]):
    """The table of one kind of credential."""

    name: str
    columns: str
    read: Callable[[Sql], list[C]]  # the oldest first
    values: Callable[[C], tuple[object, ...]]


class SqlCredentials(Generic[C]):
    """Keeps the credentials of one kind."""

    def __init__(self, database: Database[Any], table: CredentialTable[C]) -> None:
        self._database = database
        self._table: CredentialTable[C] = table

    async def all(self) -> list[C]:
        return await self._database.read_list(self._table.read)

    async def add(self, new: C) -> None:
        values = self._table.values(new)
        placeholders = ", ".join("?" * len(values))
        table = f"{self._table.name} ({self._table.columns})"
        query = f"INSERT INTO {table} VALUES ({placeholders})"
        await self._database.transact(lambda sql: sql.execute(query, values))

    async def revoke(self, id_: str, at: float) -> None:
        query = (
            f"UPDATE {self._table.name} SET revoked_at = ?"
            " WHERE id = ? AND revoked_at IS NULL"
        )
        await self._database.transact(lambda sql: sql.execute(query, (at, id_)))


class SqlKeys:
    """Keeps keys, tokens and usage beside the jobs."""

    def __init__(self, database: Database[Any]) -> None:
        self.keys = SqlCredentials(database, KEY_TABLE)
        self.tokens = SqlCredentials(database, TOKEN_TABLE)
        self._database = database

    async def bind_worker(self, token_id: str, worker: str) -> None:
        query = "INSERT INTO join_token_workers VALUES (?, ?) ON CONFLICT DO NOTHING"
        values = (token_id, worker)
        await self._database.transact(lambda sql: sql.execute(query, values))

    async def usage_of(self, owner: str, today: int) -> KeyUsage:
        query = f"{USED} WHERE owner = ? GROUP BY owner"

        def read(sql: Sql) -> KeyUsage:
            row = sql.execute(query, (today, owner)).fetchone()
            return KeyUsage() if row is None else KeyUsage(*row[1:])

        return await self._database.read(read)

    async def usage_by_owner(
        self, today: int, owners: Collection[str]
    ) -> dict[str, KeyUsage]:
        among = "owner IN (SELECT value FROM json_each(?))"
        values = (today, Texts(sorted(owners)))

        def read(sql: Sql) -> dict[str, KeyUsage]:
            rows = sql.execute(f"{USED} WHERE {among} GROUP BY owner", values)
            return {owner: KeyUsage(*sums) for owner, *sums in rows}

        return await self._database.read_list(read)


def add_up_usage(sql: Sql, day: int, first: str, limit: int) -> str | None:
    """Make one row of each owner's usage before a day.

    Does so for ``limit`` owners from ``first`` on, in the order of their names.
    Returns the first of the others; None if there are none.
    """
    query = """SELECT owner FROM usage WHERE owner >= ?
               GROUP BY owner ORDER BY owner LIMIT ?"""
    owners = sql.execute(query, (first, limit + 1)).fetchall()
    others = owners[limit:]
    del owners[limit:]
    sql.executemany(
        f"""INSERT INTO usage
           SELECT owner, ?2, sum(requests), sum(prompt_tokens), sum(completion_tokens)
           FROM usage WHERE owner = ?1 AND day > ?2 AND day < ?3 GROUP BY owner
           ON CONFLICT (owner, day) DO UPDATE SET {ADDED}""",
        [(owner, EARLIER_DAYS, day) for (owner,) in owners],
    )
    sql.executemany(
        "DELETE FROM usage WHERE owner = ? AND day > ? AND day < ?",
        [(owner, EARLIER_DAYS, day) for (owner,) in owners],
    )
    return others[0][0] if others else None


def forget_ended(sql: Sql, before: float) -> None:
    """Delete the keys and tokens for which ``was_unusable_before`` holds."""
    query = "DELETE FROM keys WHERE revoked_at < ? OR expires_at < ?"
    sql.execute(query, (before, before))
    used = "SELECT token_id FROM join_token_workers"
    query = f"""DELETE FROM join_tokens
                WHERE revoked_at < ? OR (expires_at < ? AND id NOT IN ({used}))"""
    sql.execute(query, (before, before))
    known = "SELECT id FROM join_tokens"
    sql.execute(f"DELETE FROM join_token_workers WHERE token_id NOT IN ({known})")


def _read_keys(sql: Sql) -> list[Key]:
    read = [_key(row) for row in sql.execute(KEYS)]
    return sorted(read, key=lambda key: key.created_at)


def _key_values(key: Key) -> tuple[object, ...]:
    return (
        key.id,
        key.name,
        key.digest,
        key.start,
        key.scope.value,
        key.created_at,
        key.expires_at,
        key.revoked_at,
        *astuple(key.quota),
        key.priority_max.value,
        key.hosted_after,
    )


def _key(row: tuple[Any, ...]) -> Key:
    id_, name, digest, start, scope, created_at, expires_at, revoked_at, *more = row
    *quota, priority_max, hosted_after = more
    return Key(
        id_,
        name,
        digest,
        start,
        Scope(scope),
        created_at,
        expires_at,
        revoked_at,
        Quota(*quota),
        Priority(priority_max),
        hosted_after,
    )


def _read_tokens(sql: Sql) -> list[JoinToken]:
    bound: dict[str, set[str]] = {}
    for token_id, worker in sql.execute("SELECT * FROM join_token_workers"):
        bound.setdefault(token_id, set()).add(worker)
    read = [_token(row, bound.get(row[0], set())) for row in sql.execute(TOKENS)]
    return sorted(read, key=lambda token: token.created_at)


def _token_values(token: JoinToken) -> tuple[object, ...]:
    return (
        token.id,
        token.name,
        token.digest,
        token.created_at,
        token.expires_at,
        token.revoked_at,
        token.uses_max,
        json.dumps(token.models),
    )


def _token(row: tuple[Any, ...], workers: set[str]) -> JoinToken:
    id_, name, digest, created_at, expires_at, revoked_at, uses_max, models = row
    return JoinToken(
        id_,
        name,
        digest,
        created_at,
        expires_at,
        revoked_at,
        uses_max,
        tuple(json.loads(models)),
        frozenset(workers),
    )


KEY_TABLE = CredentialTable("keys", KEY_COLUMNS, _read_keys, _key_values)
TOKEN_TABLE = CredentialTable("join_tokens", TOKEN_COLUMNS, _read_tokens, _token_values)


class SqlPairing:
    """Keeps codes beside the keys."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def add(self, code: PairingCode) -> bool:
        query = """INSERT INTO pairing_codes (code, owner, "user", expires_at)
                   VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"""
        values = (code.code, code.owner, code.user, code.expires_at)
        return await self._database.transact(execute(query, *values)) > 0

    async def find(self, beginning: str) -> list[PairingCode]:
        query = f"{CODE} WHERE code >= ? AND code < ? ORDER BY code"
        found = select(PairingCode, query, beginning, beginning + LAST)
        return await self._database.read(found)

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        query = """UPDATE pairing_codes SET public_key = ?, claimed_at = ?
                   WHERE code = ? AND claimed_at IS NULL AND expires_at > ?"""
        claim = execute(query, public_key, at, code, at)
        return await self._database.transact(claim) > 0

    async def count_claimable(self, owner: str, at: float) -> int:
        query = """SELECT count(*) FROM pairing_codes
                   WHERE owner = ? AND claimed_at IS NULL AND expires_at > ?"""
        (waiting,) = await self._database.read(select(int, query, owner, at))
        return waiting

    async def count_paired(self, owner: str) -> int:
        query = "SELECT count(*) FROM trusted WHERE owner = ?"
        (paired,) = await self._database.read(select(int, query, owner))
        return paired

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        query = """SELECT public_key, paired_at FROM trusted
                   WHERE owner = ? AND "user" = ?"""
        found = await self._database.read(select(PairedWorker, query, owner, user))
        return sorted(found, key=lambda each: (each.paired_at, each.public_key))


def forget_expired(sql: Sql, before: float) -> None:
    """Delete the codes that could not be claimed any more by then."""
    sql.execute("DELETE FROM pairing_codes WHERE expires_at < ?", (before,))


SIGN_IN_COLUMNS = "digest, key_digest, expires_at"


class SqlSignIns:
    """Keeps the sessions of browsers beside the keys, and codes that begin one once.

    Both are known by their digests: who reads the database cannot make a cookie or a
    link of them.
    """

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def sessions(self) -> list[BrowserSession]:
        query = f"SELECT {SIGN_IN_COLUMNS} FROM browser_sessions ORDER BY number"
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
                f"""INSERT INTO browser_sessions ({SIGN_IN_COLUMNS}) VALUES (?, ?, ?)
                    ON CONFLICT DO NOTHING""",
                added,
            )

        await self._database.transact(write)

    async def add_code(self, new: SignInCode, count_max: int) -> None:
        def add(sql: Sql) -> None:
            sql.execute(
                f"INSERT INTO sign_in_codes ({SIGN_IN_COLUMNS}) VALUES (?, ?, ?)",
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
        query = (
            f"DELETE FROM sign_in_codes WHERE digest = ? RETURNING {SIGN_IN_COLUMNS}"
        )
        found = await self._database.transact(select(SignInCode, query, digest))
        return found[0] if found else None


def forget_sign_ins(sql: Sql, before: float) -> None:
    """Delete the sessions and codes that had expired by then."""
    for table in ("browser_sessions", "sign_in_codes"):
        sql.execute(f"DELETE FROM {table} WHERE expires_at < ?", (before,))
