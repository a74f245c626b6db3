"""Usage in the SQLite store: by key for its limits, and by model and node."""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.credentials import (
    day_of,
    estimated_usage,
    partial_usage,
    reported_usage,
    tokens_to_read,
)
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import JobKind
from shoal.store import codec, ledger
from shoal.store.codec import head_of
from shoal.store.sqlite.database import Database, select

CALLS = frozenset({JobKind.CALL.value, JobKind.CALL_STREAM.value})
"""Kinds whose model is the name of a function, which clients may choose."""

NO_TOKENS = Usage(0, 0)
COLUMNS: Mapping[ledger.UsageField, str] = {
    "day": "day",
    "key": "owner",
    "model": "model",
    "node": "node",
}

BITS: Mapping[ledger.UsageField, int] = {"key": 1, "model": 2, "node": 4}
ALL_BITS = 7
"""What ``usage_by_model`` tells apart; ``usage_sums`` has the rows of some bits."""

ADD_UP = """INSERT INTO usage_sums
    SELECT value, day, iif(value & 1, owner, ''), iif(value & 2, model, ''),
           iif(value & 4, node, ''), sum(requests), sum(prompt_tokens),
           sum(completion_tokens), sum(cost)
    FROM usage_by_model, json_each('[0,1,2,3,4,5,6]') WHERE day = ?
    GROUP BY 1, 2, 3, 4, 5"""
OPEN = "SELECT coalesce(max(day) + 1, 0) FROM usage_sums WHERE fields = 0"
"""The first day that is not added up: each day before that has usage is."""

DAYS = "day BETWEEN :since AND :until"
SUMMED = f"""(
    SELECT sums.day, sums.owner, sums.model, sums.node, sums.requests,
           sums.prompt_tokens, sums.completion_tokens, sums.cost
    FROM usage_sums AS days CROSS JOIN usage_sums AS sums
    WHERE days.fields = 0 AND days.{DAYS}
          AND sums.fields = :fields AND sums.day = +days.day{{only_sums}}
    UNION ALL SELECT * FROM usage_by_model
    WHERE day BETWEEN max(:since, ({OPEN})) AND :until{{only}})"""
"""The sums of the days that are added up, and the rows of the others."""

EXAMINED_MAX = 20_000  # rows added up for a page, before the last day of it

Row: TypeAlias = tuple[int, str, str, str]  # day, owner, model, node


@dataclass(slots=True)
class UsageDays:
    """Bounds the table: the rows of a day, and the days.

    The rows are counted in memory, and read again when the day changes, or when the
    batch before was rolled back.  The days before are added up, as nothing more is
    written to them.
    """

    rows_max: int = ledger.ROWS_PER_DAY_MAX
    _day: int = -1
    _rows: int = 0
    _begun: int = 0  # batches
    _committed: int = 0  # the last of them that is known to be

    def begin_batch(self) -> int:
        """Return the number of a batch, which begins; the one before has ended."""
        if self._committed != self._begun:
            self._day = -1
        self._begun += 1
        return self._begun

    def on_committed(self, batch: int) -> None:
        """Record that a batch, by its number, was committed."""
        self._committed = batch

    def bounded(self, sql: sqlite3.Connection, row: Row) -> Row:
        """Return the row to count a new key, model and node in."""
        day, owner, _, _ = row
        if self._rows >= self.rows_max:
            return day, owner, "", ""
        self._rows += 1
        return row

    def add_up(self, sql: sqlite3.Connection) -> bool:
        """Add up the first day that is over; return whether there was one."""
        until = self._day
        if until < 0:
            ((until,),) = sql.execute("SELECT max(day) FROM usage_by_model")
        query = f"""SELECT min(day) FROM usage_by_model
                    WHERE day >= ({OPEN}) AND day < ?"""
        ((day,),) = sql.execute(query, (until,))
        if day is None:
            return False
        sql.execute(ADD_UP, (day,))
        return True

    def begin(self, sql: sqlite3.Connection, day: int) -> None:
        """Prepare for writing to a day, which may be any if the clock was set."""
        if day == self._day:
            return
        query = "SELECT count(*) FROM usage_by_model WHERE day = ?"
        ((self._rows,),) = sql.execute(query, (day,))
        self._day = day
        # A day's rows at a time: another day has begun since.
        oldest = day - ledger.USAGE_DAYS
        sql.execute("DELETE FROM usage_by_model WHERE day < ?", (oldest,))
        for fields in range(ALL_BITS):
            query = "DELETE FROM usage_sums WHERE fields = ? AND day < ?"
            sql.execute(query, (fields, oldest))
            # What is written to now is not over.
            query = "DELETE FROM usage_sums WHERE fields = ? AND day >= ?"
            sql.execute(query, (fields, day))


@dataclass(slots=True)
class UsageBatch:
    """The usage of the jobs that end in one batch; each row is written once."""

    sql: sqlite3.Connection
    days: UsageDays
    places: Mapping[JobId, ledger.JobPlace]
    _rows: dict[Row, list[int]] = field(default_factory=dict)
    _called: dict[int, list[JobId]] = field(default_factory=dict)  # by day
    _minutes: dict[int, list[int]] = field(default_factory=dict)  # jobs and tokens

    def add(self, job_id: JobId, end: Outcome | int, at: float) -> None:
        """Count the end of a job, which is written already.

        ``end`` is its outcome, or the number of characters written before it was given
        up.
        """
        minute = self._minutes.setdefault(int(at // 60), [0, 0])
        minute[0] += isinstance(end, Outcome)
        if isinstance(end, Outcome) and end.value:
            self._called.setdefault(day_of(at), []).append(job_id)
            if (priced := self.places.get(job_id)) is not None:
                self._add_cost(job_id, priced.cost, at)
            return
        query = "SELECT owner, kind, model FROM jobs WHERE id = ?"
        ((owner, kind, model),) = self.sql.execute(query, (job_id,))
        counted = None if isinstance(end, int) else reported_usage(end)
        used = counted or _estimate(self.sql, job_id, end)
        if used is None:
            return
        minute[1] += used.completion_tokens
        place = self.places.get(job_id, ledger.NO_PLACE)
        row = (day_of(at), owner, "" if kind in CALLS else model, place.node)
        tokens = (used.prompt_tokens, used.completion_tokens)
        self._count(row, 1, *tokens, place.cost)

    def refund(self, owner: str, model: str, node: str, amount: int, at: float) -> None:
        """Take a cost back that was counted before."""
        self._count((day_of(at), owner, model, node), 0, 0, 0, -amount)

    def write(self) -> None:
        """Write what was counted."""
        for day, job_ids in self._called.items():
            # Calls of functions use no tokens, and there may be thousands a second.
            among = "id IN (SELECT value FROM json_each(?))"
            query = f"SELECT owner FROM jobs WHERE {among}"
            owners = self.sql.execute(query, (json.dumps(job_ids),))
            for owner, calls in Counter(name for (name,) in owners).items():
                self._count((day, owner, "", ""), calls, 0, 0, 0)
        self.sql.executemany(
            """INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
               requests = requests + excluded.requests,
               prompt_tokens = prompt_tokens + excluded.prompt_tokens,
               completion_tokens = completion_tokens + excluded.completion_tokens""",
            [
                (owner, day, *counts[:3])
                for (day, owner, _, _), counts in self._rows.items()
                if counts[0]  # else it is a refund
            ],
        )
        for row, counts in self._rows.items():
            self._write_row(row, counts)
        for minute, (jobs, tokens) in self._minutes.items():
            self._write_minute(minute, jobs, tokens)

    def _add_cost(self, job_id: JobId, cost: int, at: float) -> None:
        """Add the cost of a function call, which is counted with the others."""
        ((owner,),) = self.sql.execute("SELECT owner FROM jobs WHERE id = ?", (job_id,))
        self._count((day_of(at), owner, "", ""), 0, 0, 0, cost)

    def _count(
        self, row: Row, requests: int, read: int, written: int, cost: int
    ) -> None:
        counts = self._rows.setdefault(row, [0, 0, 0, 0])
        counts[0] += requests
        counts[1] += read
        counts[2] += written
        counts[3] += cost

    def _write_row(self, row: Row, counts: list[int]) -> None:
        self.days.begin(self.sql, row[0])
        query = """UPDATE usage_by_model SET
                       requests = requests + ?,
                       prompt_tokens = prompt_tokens + ?,
                       completion_tokens = completion_tokens + ?,
                       cost = cost + ?
                   WHERE day = ? AND owner = ? AND model = ? AND node = ?"""
        if self.sql.execute(query, (*counts, *row)).rowcount:
            return
        row = self.days.bounded(self.sql, row)
        if not self.sql.execute(query, (*counts, *row)).rowcount:
            query = "INSERT INTO usage_by_model VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            self.sql.execute(query, (*row, *counts))

    def _write_minute(self, minute: int, jobs: int, tokens: int) -> None:
        query = """UPDATE usage_by_minute SET jobs = jobs + ?, tokens = tokens + ?
                   WHERE minute = ?"""
        if self.sql.execute(query, (jobs, tokens, minute)).rowcount:
            return
        query = "INSERT INTO usage_by_minute VALUES (?, ?, ?)"
        self.sql.execute(query, (minute, jobs, tokens))
        query = "DELETE FROM usage_by_minute WHERE minute <= ?"
        self.sql.execute(query, (minute - ledger.MINUTES_KEPT,))


class SqliteUsage:
    """Reads what ``UsageBatch`` has written."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def minutes(self, since: int) -> list[ledger.MinuteUsage]:
        query = """SELECT minute, jobs, tokens FROM usage_by_minute
                   WHERE minute >= ? ORDER BY minute"""
        return await self._database.read(select(ledger.MinuteUsage, query, since))

    async def sums(
        self,
        since: int,
        until: int,
        by: Collection[ledger.UsageField],
        limit: int,
        owner: str | None = None,
        place: ledger.UsagePlace | None = None,
    ) -> ledger.UsagePage:
        wanted = _WantedSums(since, until, by, limit, owner)
        begin = place or ledger.UsagePlace(since, 0)
        if "day" in by:
            return await self._database.read_list(lambda sql: wanted.days(sql, begin))
        return await self._database.read_list(lambda sql: wanted.whole(sql, begin))


@dataclass(frozen=True, slots=True)
class _WantedSums:
    """A query for sums of usage."""

    since: int
    until: int
    by: Collection[ledger.UsageField]
    limit: int
    owner: str | None

    def whole(
        self, sql: sqlite3.Connection, begin: ledger.UsagePlace
    ) -> ledger.UsagePage:
        """Read a page that adds up all days."""
        found, _ = self._read(sql, self.since, self.until, self.limit + 1, begin.skip)
        if len(found) <= self.limit:
            return ledger.UsagePage(found, None)
        place = ledger.UsagePlace(self.since, begin.skip + self.limit)
        return ledger.UsagePage(found[: self.limit], place)

    def days(
        self, sql: sqlite3.Connection, begin: ledger.UsagePlace
    ) -> ledger.UsagePage:
        """Read a page, a day at a time, until it is full or has added up many rows."""
        found: list[ledger.UsageSum] = []
        examined = 0
        day, skip = self._day(sql, max(begin.day, self.since)), begin.skip
        if day != begin.day:
            skip = 0  # that day is not kept any more
        while day is not None:
            left = self.limit - len(found)
            if not left or examined >= EXAMINED_MAX:
                return ledger.UsagePage(found, ledger.UsagePlace(day, skip))
            sums, rows = self._read(sql, day, day, left + 1, skip)
            found += sums[:left]
            examined += rows
            if len(sums) > left:
                return ledger.UsagePage(found, ledger.UsagePlace(day, skip + left))
            day, skip = self._day(sql, day + 1), 0
        return ledger.UsagePage(found, None)

    def _day(self, sql: sqlite3.Connection, since: int) -> int | None:
        """Return the first day with usage, from one on."""
        only = "" if self.owner is None else "owner = ? AND "
        query = f"SELECT min(day) FROM usage_by_model WHERE {only}day BETWEEN ? AND ?"
        owner = () if self.owner is None else (self.owner,)
        ((day,),) = sql.execute(query, (*owner, since, self.until))
        found: int | None = day
        return found

    def _read(
        self, sql: sqlite3.Connection, since: int, until: int, limit: int, skip: int
    ) -> tuple[list[ledger.UsageSum], int]:
        """Return sums of some days, and the number of the rows that were added up."""
        shown = ", ".join(
            column if each in self.by else "NULL" for each, column in COLUMNS.items()
        )
        grouped = ", ".join(
            column for each, column in COLUMNS.items() if each in self.by
        )
        only = "" if self.owner is None else " AND owner = :owner"
        group = f" GROUP BY {grouped} ORDER BY {grouped}" if grouped else ""
        fields = sum(bit for each, bit in BITS.items() if each in self.by)
        if self.owner is not None:
            fields |= BITS["key"]
        table = f"usage_by_model WHERE {DAYS}{only}"
        if fields != ALL_BITS:
            only_sums = only.replace("owner", "sums.owner", 1)
            table = SUMMED.format(only=only, only_sums=only_sums)
        query = f"""SELECT {shown}, sum(requests), sum(prompt_tokens),
                           sum(completion_tokens), sum(cost), count(*)
                    FROM {table}{group}
                    LIMIT :limit OFFSET :skip"""
        values = {"since": since, "until": until, "owner": self.owner, "fields": fields}
        rows = sql.execute(query, values | {"limit": limit, "skip": skip})
        # Without anything to group by there is a row of nulls for nothing.
        found = [row for row in rows if row[4] is not None]
        sums = [ledger.UsageSum(*row[:-1]) for row in found]
        return sums, sum(row[-1] for row in found)


def _estimate(
    sql: sqlite3.Connection, job_id: JobId, end: Outcome | int
) -> Usage | None:
    """Estimate the usage of a job from its work, which this decodes unless large."""
    query = "SELECT kind, coalesce(packed_work, work) FROM jobs WHERE id = ?"
    ((kind, stored),) = sql.execute(query, (job_id,))
    if (head := head_of(stored)) is not None:
        read = head.tokens
    else:
        work, _ = codec.decode_work(kind, stored)
        if work is None:
            return NO_TOKENS  # a function call
        read = tokens_to_read(work)
    if isinstance(end, int):
        return partial_usage(read, end)
    return estimated_usage(read, JobKind(kind), end)
