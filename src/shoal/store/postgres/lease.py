"""The lease of a database, as the nodes see it that share the database.

One of them holds it.  Its sessions are others than those of the store, so that a long
transaction there is no silence here.
"""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg

from shoal.store.lease import LeaseRow
from shoal.store.postgres.database import LOCKED, TERMINATE, meaning, shown
from shoal.store.postgres.session import Session, connect
from shoal.store.sql.database import Threads

T = TypeVar("T")

SEEN_MAX = "15 seconds"  # since a node was last there, until it is left out
KEPT_FOR = "1 day"  # until its row is deleted
OLDER = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn)

LOOK = f"""SELECT EXISTS (SELECT 1 FROM pg_locks WHERE {LOCKED}),
               holder, beat, node, certificate, secret, ports, older
           FROM lease"""
NOTE = """INSERT INTO nodes (name, urls, at) VALUES (?, ?, clock_timestamp())
          ON CONFLICT (name) DO UPDATE SET urls = excluded.urls, at = excluded.at"""


class PostgresLease:
    """Looks at the lease, and keeps it for its holder."""

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._url = url
        self._session: Session | None = None
        # A daemon: a server that was stopped never answers.
        self._thread = Threads(1, "shoal-lease")

    async def look(self) -> LeaseRow:
        """Return who has it."""
        return await self._run(_look)

    async def beat(self, holder: str) -> bool:
        """Show that the holder runs; False: another has taken over."""
        query = "UPDATE lease SET beat = beat + 1 WHERE holder = ?"
        return await self._run(lambda sql: bool(sql.execute(query, (holder,)).rowcount))

    async def publish(
        self, holder: str, node: str, certificate: bytes, secret: str, ports: object
    ) -> None:
        """Let other nodes reach the holder."""
        query = """UPDATE lease SET node = ?, certificate = ?, secret = ?, ports = ?
                   WHERE holder = ?"""
        values = (node, certificate.hex(), secret, json.dumps(ports), holder)
        await self._run(lambda sql: sql.execute(query, values))

    async def note(self, name: str, urls: Sequence[str]) -> list[str]:
        """Note that a node is there, at these URLs; return those of all, its own first.

        ``name`` is what tells it from others.
        """

        def work(sql: Session) -> list[str]:
            sql.execute(NOTE, (name, json.dumps([*urls])))
            query = f"""SELECT urls FROM nodes WHERE name <> ?
                        AND at > clock_timestamp() - interval '{SEEN_MAX}'
                        ORDER BY name"""
            others = sql.execute(query, (name,)).fetchall()
            sql.execute(
                "DELETE FROM nodes"
                f" WHERE at < clock_timestamp() - interval '{KEPT_FOR}'"
            )
            found = [each for (given,) in others for each in json.loads(given)]
            return [*dict.fromkeys([*urls, *found])]

        return await self._run(work)

    async def end_holder(self) -> None:
        """End the session that has the lease."""
        await self._run(lambda sql: sql.execute(TERMINATE))

    def close(self) -> None:
        """Close the session, unless it waits for the server."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    async def _run(self, work: Callable[[Session], T]) -> T:
        def run() -> T:
            if self._session is None:
                self._session = Session(connect(self._url))
            try:
                return work(self._session)
            except BaseException:
                self.close()
                raise

        try:
            return await self._thread.run(run)
        except psycopg.Error as error:
            raise meaning(error, self.name) from error


def _look(sql: Session) -> LeaseRow:
    try:
        return LeaseRow(*sql.execute(LOOK).fetchone())
    except OLDER:  # of an older release, or nothing is there yet
        query = f"SELECT EXISTS (SELECT 1 FROM pg_locks WHERE {LOCKED})"
        return LeaseRow(*sql.execute(query).fetchone())
