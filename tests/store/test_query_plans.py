"""The check of query plans, which every test of the port ends with."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shoal.store.sqlite.database import migrate
from store.query_plans import check_plans


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT body FROM facts WHERE type = 'WorkerLeft'",
        "SELECT body FROM facts WHERE +job_id IS NULL AND number < 9 ORDER BY number",
        "SELECT count(*) FROM jobs",
        "SELECT id FROM jobs WHERE owner = 'al' ORDER BY rowid DESC",
        "SELECT DISTINCT model FROM jobs WHERE owner = 'al'",
        "DELETE FROM jobs WHERE model = 'm'",
        "SELECT leaf FROM receipts ORDER BY leaf DESC LIMIT 1",
    ],
)
def test_slow_statement_is_detected(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "shoal.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        migrate(sql)

    with pytest.raises(AssertionError):
        check_plans(path, {statement: ()})
