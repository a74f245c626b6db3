"""Write the present version of the schema's database for tests/store/written.

Run it after adding a step to MIGRATIONS: it migrates the database of the version
before, and writes it as SQL.  Add rows to the text for what the new step has made.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from shoal.store.sql.schema import VERSION
from shoal.store.sqlite.database import migrate

FOLDER = Path(__file__).parent.parent / "tests" / "store" / "written"


def dump(database: sqlite3.Connection) -> str:
    """Return the statements that make a copy of a database."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return "\n".join([*database.iterdump(), f"PRAGMA user_version = {version};", ""])


def main() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.executescript(
            (FOLDER / f"version{VERSION - 1}.sql").read_text("utf-8")
        )
        migrate(database)
        (FOLDER / f"version{VERSION}.sql").write_text(dump(database), "utf-8")


if __name__ == "__main__":
    main()
