"""Usage in the store: by key for its limits, and by model and node."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
from shoal.store.sql.database import AMONG, Database, Numbers, Sql, Texts, select
from shoal.store.sql.keys import ADDED

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
"""The fields of ``usage_by_model``; ``usage_sums`` has the rows of some bits."""

ADD_UP = """INSERT INTO usage_sums
    SELECT value, day, CASE WHEN value & 1 > 0 THEN owner ELSE '' END,
           CASE WHEN value & 2 > 0 THEN model ELSE '' END,
           CASE WHEN value & 4 > 0 THEN node ELSE '' END, sum(requests),
           sum(prompt_tokens), sum(completion_tokens), sum(cost)
    FROM usage_by_model, json_each(?) WHERE day = ?
    GROUP BY 1, 2, 3, 4, 5"""
OPEN = "SELECT coalesce(max(day) + 1, 0) FROM usage_sums WHERE fields = 0"
"""The first day that is not added up: each day before that has usage is."""

SUMS = "usage_sums WHERE fields = :fields"
OTHERS = "usage_by_model WHERE true"

EXAMINED_MAX = 15_000  # rows added up for a page

Row: TypeAlias = tuple[int, str, str, str]  # day, owner, model, node
UsageNames: TypeAlias = tuple[str, str, str]  # owner, model, node


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

    def bounded(self, sql: Sql, row: Row) -> Row:
        """Return the row to count a new key, model and node in."""
        day, owner, _, _ = row
        if self._rows >= self.rows_max:
            return day, owner, "", ""
        self._rows += 1
        return row

    def add_up(self, sql: Sql) -> bool:
        """Add up the first day that is over; return whether there was one."""
        until = self._day
        if until < 0:
            ((until,),) = sql.execute("SELECT max(day) FROM usage_by_model")
        query = f"""SELECT min(day) FROM usage_by_model
                    WHERE day >= ({OPEN}) AND day < ?"""
        ((day,),) = sql.execute(query, (until,))
        if day is None:
            return False
        sql.execute(ADD_UP, (Numbers(range(ALL_BITS)), day))
        return True

    def begin(self, sql: Sql, day: int) -> None:
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
            # The present day is not complete yet.
            query = "DELETE FROM usage_sums WHERE fields = ? AND day >= ?"
            sql.execute(query, (fields, day))


@dataclass(slots=True)
class UsageBatch:
    """The usage of the jobs that end in one batch; each row is written once."""

    sql: Sql
    days: UsageDays
    places: Mapping[JobId, ledger.JobPlace]
    _rows: dict[Row, list[int]] = field(default_factory=dict)
    _called: dict[int, list[JobId]] = field(default_factory=dict)  # by day
    _minutes: dict[int, list[int]] = field(default_factory=dict)  # jobs and tokens

    def add(self, ends: Collection[tuple[JobId, Outcome | int, float]]) -> None:
        """Count the ends of jobs, which are written already, and when they ended.

        An end is an outcome, or the number of characters written before the job was
        given up.
        """
        # Calls of functions use no tokens.
        counted = Texts(
            job_id for job_id, end, _ in ends if isinstance(end, int) or not end.value
        )
        jobs: dict[str, Sequence[str]] = {}
        if counted:
            query = f"SELECT id, owner, kind, model FROM jobs WHERE {AMONG}"
            rows = self.sql.execute(query, (counted,))
            jobs = {id_: columns for id_, *columns in rows}
        for job_id, end, at in ends:
            self._add(job_id, end, at, jobs.get(job_id, ()))

    def _add(
        self, job_id: JobId, end: Outcome | int, at: float, job: Sequence[str]
    ) -> None:
        minute = self._minutes.setdefault(int(at // 60), [0, 0])
        minute[0] += isinstance(end, Outcome)
        if isinstance(end, Outcome) and end.value:
            self._called.setdefault(day_of(at), []).append(job_id)
            if (priced := self.places.get(job_id)) is not None:
                self._add_cost(job_id, priced.cost, at)
            return
        owner, kind, model = job
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
            query = f"SELECT owner FROM jobs WHERE {AMONG}"
            owners = self.sql.execute(query, (Texts(job_ids),))
            for owner, calls in Counter(name for (name,) in owners).items():
                self._count((day, owner, "", ""), calls, 0, 0, 0)
        self.sql.executemany(
            f"""INSERT INTO usage VALUES (?, ?, ?, ?, ?)
                ON CONFLICT (owner, day) DO UPDATE SET {ADDED}""",
            [
                (owner, day, *counts[:3])
                for (day, owner, _, _), counts in self._rows.items()
                if counts[0]  # else it is a refund
            ],
        )
        for row, counts in self._rows.items():
            self._write_row(row, counts)
        for minute, (jobs, tokens) in self._minutes.items():
            _write_minute(self.sql, ledger.MinuteUsage(minute, jobs, tokens))

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


def _write_minute(sql: Sql, used: ledger.MinuteUsage) -> None:
    query = """UPDATE usage_by_minute
               SET jobs = jobs + ?, tokens = tokens + ?,
                   running = max(running, ?), queued = max(queued, ?)
               WHERE minute = ?"""
    if sql.execute(query, (*used[1:], used.minute)).rowcount:
        return
    query = """INSERT INTO usage_by_minute (minute, jobs, tokens, running, queued)
               VALUES (?, ?, ?, ?, ?)"""
    sql.execute(query, used)
    query = "DELETE FROM usage_by_minute WHERE minute <= ?"
    sql.execute(query, (used.minute - ledger.MINUTES_KEPT,))


class SqlUsage:
    """Reads what ``UsageBatch`` has written."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def minutes(self, since: int) -> list[ledger.MinuteUsage]:
        query = """SELECT minute, jobs, tokens, running, queued FROM usage_by_minute
                   WHERE minute >= ? ORDER BY minute"""
        return await self._database.read(select(ledger.MinuteUsage, query, since))

    async def record_open_jobs(self, minute: int, running: int, queued: int) -> None:
        used = ledger.MinuteUsage(minute, 0, 0, running, queued)
        await self._database.transact(lambda sql: _write_minute(sql, used))

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
        return await self._database.read_list(lambda sql: wanted.page(sql, place))


@dataclass(frozen=True, slots=True)
class _WantedSums:
    """A query for sums of usage."""

    since: int
    until: int
    by: Collection[ledger.UsageField]
    limit: int
    owner: str | None

    def page(self, sql: Sql, place: ledger.UsagePlace | None) -> ledger.UsagePage:
        """Read a page, until it is full or has added up many rows."""
        begin = place or ledger.UsagePlace(self.since)
        if "day" not in self.by:
            sums, _, following = self._read(
                sql, self._days(sql, self.since), begin, self.limit
            )
            return ledger.UsagePage(sums, following)
        found: list[ledger.UsageSum] = []
        examined = 0
        for day in self._days(sql, max(begin.day, self.since)):
            if day != begin.day:
                # The page begins with this day, or the other is not kept any more.
                begin = ledger.UsagePlace(day)
            left = self.limit - len(found)
            if not left or examined >= EXAMINED_MAX:
                return ledger.UsagePage(found, begin)
            sums, rows, following = self._read(sql, [day], begin, left)
            found += sums
            examined += rows
            if following is not None:
                return ledger.UsagePage(found, following)
        return ledger.UsagePage(found, None)

    def _days(self, sql: Sql, since: int) -> list[int]:
        """Return the days with usage from one on, in order."""
        query = """SELECT day FROM usage_sums
                   WHERE fields = 0 AND day BETWEEN ? AND ? ORDER BY day"""
        days = [day for (day,) in sql.execute(query, (since, self.until))]
        query = f"""SELECT min(day) FROM usage_by_model
                    WHERE day BETWEEN max(?, ({OPEN})) AND ?"""
        while True:
            ((day,),) = sql.execute(query, (since, self.until))
            if day is None:
                return days
            days.append(day)
            since = day + 1

    def _read(
        self, sql: Sql, days: Sequence[int], begin: ledger.UsagePlace, limit: int
    ) -> tuple[list[ledger.UsageSum], int, ledger.UsagePlace | None]:
        """Return sums of some days, the number of their rows, and the next place."""
        fields = sum(bit for each, bit in BITS.items() if each in self.by)
        if self.owner is not None:
            fields |= BITS["key"]
        ((opened,),) = sql.execute(OPEN)
        others = [day for day in days if day >= opened or fields == ALL_BITS]
        sums = days[: len(days) - len(others)]
        values: dict[str, object] = {
            "sums": Numbers(sums),
            "others": Numbers(others),
            "fields": fields,
            "key": begin.key if self.owner is None else self.owner,
            "model": begin.model,
            "skip": begin.skip,
            "limit": limit + 1,
        }
        one = self.owner is not None
        # Of these days each row is a sum, and they are read in the order of the list.
        table, ordered = (OTHERS, others) if fields == ALL_BITS else (SUMS, sums)
        end = _end(sql, ordered, _rows(table, ":day", ALL_BITS, one), values)
        if end is not None:
            values |= zip(("end_key", "end_model", "end_node"), end, strict=True)
        tables = [
            _rows(f"json_each(:{days}) CROSS JOIN {table}", "value", bits, one, end)
            for days, table, bits in (
                ("sums", SUMS, ALL_BITS),
                ("others", OTHERS, fields),
            )
        ]
        query = self._added_up(" UNION ALL ".join(tables))
        # Without anything to group by there is a row of nulls for nothing.
        found = [row for row in sql.execute(query, values) if row[4] is not None]
        page = [ledger.UsageSum(*row[:-1]) for row in found[:limit]]
        more = end is not None or len(found) > limit
        following = _place_after(page, begin) if more else None
        return page, sum(row[-1] for row in found), following

    def _added_up(self, rows: str) -> str:
        """Return what adds rows up, and counts them."""
        shown = ", ".join(
            column if each in self.by else "NULL" for each, column in COLUMNS.items()
        )
        grouped = ", ".join(
            column for each, column in COLUMNS.items() if each in self.by
        )
        group = f" GROUP BY {grouped} ORDER BY {grouped}" if grouped else ""
        return f"""SELECT {shown}, sum(requests), sum(prompt_tokens),
                          sum(completion_tokens), sum(cost), count(*)
                   FROM ({rows}) AS added{group} LIMIT :limit OFFSET :skip"""


def _rows(
    table: str, day: str, fields: int, one: bool, end: UsageNames | None = None
) -> str:
    """Return what selects the rows of a day between the place and the end of a page.

    Columns that are not among the ``fields`` are empty.  ``one``: of one key.
    """
    owner, model, node = (
        COLUMNS[each] if fields & bit else "''" for each, bit in BITS.items()
    )
    begin = f"({owner}, {model}) >= (:key, :model)"
    if one:
        begin = f"{owner} = :key AND {model} >= :model"
    until = f"({owner}, {model}, {node}) <= (:end_key, :end_model, :end_node)"
    bounds = f"{begin} AND {until}" if end is not None else begin
    return f"""
        SELECT {day} AS day, {owner} AS owner, {model} AS model, {node} AS node,
               requests, prompt_tokens, completion_tokens, cost
        FROM {table} AND day = {day} AND {bounds}"""


def _end(
    sql: Sql, days: Sequence[int], rows: str, values: Mapping[str, Any]
) -> UsageNames | None:
    """Return the key, model and node until which each day has the rows of a page.

    None: no day has more.
    """
    query = f"""SELECT owner, model, node FROM ({rows}) AS listed
                ORDER BY owner, model, node LIMIT 1 OFFSET :rows"""
    found = []
    for day in days:
        count = values["skip"] + min(values["limit"], EXAMINED_MAX // len(days))
        found += sql.execute(query, {**values, "day": day, "rows": count}).fetchall()
    return min(found, default=None)


def _place_after(
    page: Sequence[ledger.UsageSum], begin: ledger.UsagePlace
) -> ledger.UsagePlace:
    """Return the place behind a page, by its last key and model."""
    last = page[-1]
    names = (last.key or "", last.model or "")
    skip = sum((each.key or "", each.model or "") == names for each in page)
    if names == (begin.key, begin.model):
        skip += begin.skip
    return ledger.UsagePlace(begin.day, *names, skip)


def _estimate(sql: Sql, job_id: JobId, end: Outcome | int) -> Usage | None:
    """Estimate the usage of a job from its work, which this decodes unless large."""
    query = "SELECT kind, packed_work FROM jobs WHERE id = ?"
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
