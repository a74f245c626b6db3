"""The plans of SQL statements: none reads a whole table that grows, and none sorts."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

Statements: TypeAlias = dict[str, Any]  # with values of their parameters

# Tables without a row for each job, which are read as a whole.
SMALL = {
    "accounts",
    "aliases",
    "approvals",
    "browser_sessions",
    "deployments",
    "join_token_workers",
    "join_tokens",
    "keys",
    "sign_in_codes",
    "lanes",  # a row for each receiver, whatever number of deliveries waits for it
    "suspensions",
    "trusted",
    "unclaimed_works",  # of jobs that are being submitted, or were just deleted
    "usage",  # few rows of an owner: older days are added up
}
SMALL_INDEXES = ("USING INDEX batches_open", "USING INDEX jobs_open")  # open ones
SUMS = "usage_by_model"  # a bounded number of rows a day, added up by any columns
OTHER = ("BEGIN", "COMMIT", "PRAGMA", "ROLLBACK")  # statements without a plan


@contextmanager
def recorded_statements() -> Iterator[Statements]:
    """Record the statements of the connections that are opened in the block."""
    statements: Statements = {}

    class Recording(sqlite3.Connection):
        def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
            statements[sql] = values
            return super().execute(sql, values)

        def executemany(self, sql: str, rows: Any, /) -> sqlite3.Cursor:
            rows = list(rows)
            if rows:
                statements[sql] = rows[0]
            return super().executemany(sql, rows)

    connect = sqlite3.connect

    def connect_recording(*args: Any, **options: Any) -> sqlite3.Connection:
        return connect(*args, **options, factory=Recording)

    with mock.patch.object(sqlite3, "connect", connect_recording):
        yield statements


def check_plans(path: Path, statements: Statements) -> None:
    """Fail if a statement reads a whole table that grows, or sorts rows."""
    with closing(sqlite3.connect(path)) as sql:
        for statement, values in statements.items():
            if not statement.startswith(OTHER):
                query = f"EXPLAIN QUERY PLAN {statement}"
                plan = [row[-1] for row in sql.execute(query, values)]
                bad = bad_steps(plan)
                if SUMS in statement:
                    bad = [step for step in bad if "B-TREE" not in step]
                assert not bad, (statement, plan)


def bad_steps(plan: Sequence[str]) -> list[str]:
    """Return the steps of a plan that take time by the size of a table that grows."""
    return [step for step in plan if _is_bad(step)]


def _is_bad(step: str) -> bool:
    match step.split():
        case ["SCAN", "CONSTANT", "ROW"]:
            return False
        case ["SCAN", table, *_]:
            # A virtual table is a list among the values.
            return (
                table not in SMALL
                and not step.endswith(SMALL_INDEXES)
                and ("VIRTUAL TABLE" not in step)
            )
        case ["SEARCH", "facts", *_, "(rowid<?)"]:
            return True  # most may be about jobs, from earlier versions
        case ["USE", "TEMP", "B-TREE", *_]:
            return True
        case _:
            return False
