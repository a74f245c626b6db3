"""The tables of the SQLite store, as the steps that lead to them.

Step n takes a database from version n to n + 1; a step that was released is never
changed.  The version is SQLite's ``user_version``.
"""

import sqlite3

from shoal.domain.errors import StoreError

MIGRATIONS = (
    """
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        model TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        work TEXT NOT NULL,
        limits TEXT NOT NULL,
        lease INTEGER NOT NULL DEFAULT 0,
        outcome TEXT,
        error TEXT,
        submitted_at REAL NOT NULL,
        ended_at REAL
    ) STRICT;
    CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
    CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
    CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
    CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
    """,
)


def migrate(database: sqlite3.Connection) -> None:
    """Bring a database to the present version, each step whole or not at all.

    Raises StoreError if a newer Shoal wrote it.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the database has version {version}, this Shoal knows up to "
            f"{len(MIGRATIONS)}: install the newer Shoal that wrote it"
        )
    for number, step in enumerate(MIGRATIONS[version:], start=version + 1):
        database.executescript(
            f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT;"
        )
