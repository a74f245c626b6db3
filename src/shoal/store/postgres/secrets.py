"""The table of a pool's secrets in PostgreSQL.

Whoever can read the database can read them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import psycopg

from shoal.domain.errors import StoreError
from shoal.store.postgres.database import PostgresDatabase
from shoal.store.postgres.session import Session, connect


class Secret(NamedTuple):
    """A secret, and the Unix time at which it was made."""

    value: str
    made_at: float


class SecretsChanged(StoreError):
    """Another coordinator has stored secrets meanwhile."""


def read_secrets(url: str) -> dict[str, Secret]:
    """Return the secrets by name; none before the first start.  Raises StoreError."""
    with _transaction(url) as sql:
        if sql.execute("SELECT to_regclass('secrets')").fetchone()[0] is None:
            return {}
        rows = sql.execute("SELECT name, value, made_at FROM secrets").fetchall()
        return {name: Secret(*secret) for name, *secret in rows}


def replace_secrets(
    url: str, known: Mapping[str, Secret], present: Mapping[str, Secret]
) -> None:
    """Store the ``present`` secrets where those are still the ``known`` ones.

    Raises StoreError; SecretsChanged if another coordinator has stored others, then all
    stay.
    """
    insert = """INSERT INTO secrets (name, value, made_at) VALUES (?1, ?2, ?3)
                ON CONFLICT DO NOTHING"""
    update = "UPDATE secrets SET value = ?2, made_at = ?3 WHERE name = ?1"
    with _transaction(url) as sql:
        rows = dict(sql.execute("SELECT name, value FROM secrets FOR UPDATE"))
        for name, secret in sorted(present.items()):
            stored = rows.get(name)
            if stored == secret.value:  # No secret: nobody can try values here.
                continue
            expected = known[name].value if name in known else None
            query = insert if stored is None else update
            # No secret: as above.
            if stored != expected or not sql.execute(query, (name, *secret)).rowcount:
                raise SecretsChanged(
                    f"another coordinator has stored a {name} meanwhile: start this "
                    "one again"
                )


@contextmanager
def _transaction(url: str) -> Iterator[Session]:
    database = PostgresDatabase(url)
    try:
        with connect(url) as connection, connection.transaction():
            yield Session(connection)
    except psycopg.Error as error:
        raise database.translated(error) from error
