"""A PostgreSQL database, which one coordinator at a time writes.

The session that writes holds an advisory lock, and each write is its own: a coordinator
that has lost the session, and so the lock, writes nothing before it has both again.
"""

import os
import secrets  # noqa: TID251  # names this process
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from shoal.domain.errors import Fenced, InUse, StoreBroken, StoreError, WentBack
from shoal.store.blobs import BlobStore
from shoal.store.postgres.schema import migrate
from shoal.store.postgres.session import Session, connect
from shoal.store.sql.database import Database
from shoal.store.sql.store import SqlStore

T = TypeVar("T")

LOCK_ATTEMPTS = 100  # another coordinator may just be stopping
LOCK_PAUSE = 0.05  # seconds between them
LOCK = "1, hashtext('shoal ' || current_schema())"  # one for each pool of a database
MIGRATION_LOCK = "2, hashtext('shoal ' || current_schema())"
LOCKED = """locktype = 'advisory' AND classid = 1
            AND objid = hashtext('shoal ' || current_schema())::oid
            AND database = (SELECT oid FROM pg_database
                            WHERE datname = current_database())"""
TERMINATE = f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {LOCKED}"
BACKEND = "SELECT pg_backend_pid()"
POOLER_LOOKS = 4
SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

# Classes of errors, and errors, after which the same may succeed later: the server
# stops, starts, has too many connections or a full disk, or has ended a transaction.
TEMPORARY = ("08", "40", "53", "57", "58", "25P03", "25006", "55P03")
TAKEN_OVER = (
    "another coordinator has taken over the database while this one could not reach "
    "it: this one stops"
)
UNREACHABLE = "the database cannot be reached"
CONNECTIONS_MAX = 10  # of a coordinator: 4 for the store and 4 for contents, and
# those of the lease and of what is looked up at the start.
FULL = (
    "the database server has no connection left: raise its max_connections, or the "
    f"CONNECTION LIMIT of the role or database, by {CONNECTIONS_MAX} for each "
    "coordinator and node"
)
# A connection that is refused has no SQLSTATE.
REFUSED_AS_FULL = ("too many clients", "slots are reserved", "too many connections")
DAMAGED = ("XX001", "XX002")


def shown(url: str) -> str:
    """Return which database a URL names, without its password."""
    found = conninfo_to_dict(url)
    host = found.get("host") or found.get("hostaddr") or ""
    port = f":{found['port']}" if "port" in found else ""
    user = f"{found['user']}@" if "user" in found else ""
    return f"postgresql://{user}{host}{port}/{found.get('dbname', '')}"


def meaning(error: psycopg.Error, name: str) -> StoreError:
    """Return what an error of the database ``name`` means."""
    reason = " ".join(str(error).split())
    state = error.sqlstate or ""
    if state in DAMAGED:
        return StoreBroken(reason)
    if state or not isinstance(
        error, psycopg.OperationalError | psycopg.InterfaceError
    ):
        return StoreError(reason, name, temporary=state.startswith(TEMPORARY))
    full = any(each in reason for each in REFUSED_AS_FULL)
    # The library's message names the server, which is for operators only.
    where = f"{name} ({reason})"
    return StoreError(FULL if full else UNREACHABLE, where, temporary=True)


class PostgresDatabase(Database[Session]):
    """A database on a server; another coordinator on it is refused.

    ``holder`` is how the lease names this coordinator.
    """

    errors = (psycopg.Error, StoreBroken)

    def __init__(self, url: str, node: str = "") -> None:
        """Name the database.

        ``node``: other nodes that share it stand by, and reach this one there.  Raises
        StoreError if the URL is none.
        """
        try:
            super().__init__(shown(url))
        except psycopg.Error as error:
            raise StoreError(f"no URL of a PostgreSQL database: {error}") from error
        self._url = url
        self._node = node
        # Two coordinators may have one name, as in two containers.
        name = f"{socket.gethostname()}, process {os.getpid()}"
        self.holder = f"{name}, {secrets.token_hex(16)}"
        self._closing = ExitStack()
        self._pid = 0  # of the server's process for the session that writes

    async def check(self) -> None:
        await self.read(lambda sql: sql.execute("SELECT max(size) FROM checkpoints"))

    async def resume(self) -> None:
        """Connect again where the connection was lost, and lock, without waiting for
        something to write.

        Raises StoreError; Fenced if another has had the lock.
        """
        await self.transact(lambda sql: sql.execute(BACKEND))

    async def give_back(self) -> None:
        """PostgreSQL does that by itself."""

    def translated(self, error: psycopg.Error | StoreBroken) -> StoreError:
        return error if isinstance(error, StoreBroken) else meaning(error, self.name)

    def _open(self, *, create: bool) -> None:
        with ExitStack() as undo:
            writer = Session(connect(self._url))
            undo.callback(self._release, writer)
            self._check_server(writer)
            writer.execute("BEGIN")
            writer.execute(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            migrate(writer, create=create)
            writer.execute("COMMIT")
            self._lock(writer, 1 if self._node else LOCK_ATTEMPTS)
            query = """UPDATE lease SET holder = ?, pid = ?, node = ?, secret = '',
                           older = '', beat = beat + 1, at = clock_timestamp()"""
            writer.execute(query, (self.holder, self._pid, self._node))
            for readers in (self._readers, self._list_readers):
                assert readers is not None
                undo.callback(readers.close, Session.close)
                readers.open(lambda: Session(connect(self._url)))
            self._closing = undo.pop_all()
        self._writer = writer

    def _close(self) -> None:
        self._closing.close()

    def _release(self, writer: Session) -> None:
        """End the session that writes, and say that its holder has left.

        If that found an older copy, other nodes must not go on with it.
        """
        self._writer = None
        damage = self._damage.result() if self._damage and self._damage.done() else ""
        older = str(damage) if isinstance(damage, WentBack) else ""
        with suppress(psycopg.Error):
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            query = "UPDATE lease SET holder = '', pid = 0, older = ? WHERE holder = ?"
            writer.execute(query, (older, self.holder))
        writer.close()

    def _transact(self, work: Callable[[Session], T]) -> T:
        writer = self._opened
        self._begin(writer, "BEGIN", self._resume)
        try:
            result = work(writer)
            writer.execute("COMMIT")
        except BaseException as error:
            with suppress(psycopg.Error):
                writer.execute("ROLLBACK")
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                writer.close()  # the next connection may find the primary server
            raise
        return result

    def _read_snapshot(self, connection: Session, work: Callable[[Session], T]) -> T:
        self._begin(connection, SNAPSHOT, self._reconnect)
        try:
            return work(connection)
        finally:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")  # there is nothing to commit

    def _begin(
        self, sql: Session, statement: str, reconnect: Callable[[Session], None]
    ) -> None:
        """Begin a transaction, with another connection if this one was lost."""
        try:
            if sql.in_transaction:  # a rollback has failed
                sql.execute("ROLLBACK")
            sql.execute(statement)
        except (psycopg.OperationalError, psycopg.InterfaceError):
            if not sql.is_closed:
                raise
            reconnect(sql)
            sql.execute(statement)

    def _reconnect(self, sql: Session) -> None:
        sql.close()
        sql.connection = connect(self._url)

    def _resume(self, writer: Session) -> None:
        """Connect again, and lock.  Raises Fenced if another has had the lock."""
        lost = self._pid
        self._reconnect(writer)
        try:
            # The server may not have noticed yet that the session was lost.
            writer.execute(f"{TERMINATE} AND pid = ?", (lost,))
            try:
                self._lock(writer, still_ours=True)
            except InUse as error:
                raise Fenced(TAKEN_OVER) from error
            query = """UPDATE lease SET pid = ?, at = clock_timestamp()
                       WHERE holder = ?"""
            if not writer.execute(query, (self._pid, self.holder)).rowcount:
                raise Fenced(TAKEN_OVER)
        except BaseException:
            writer.close()
            raise

    def _check_server(self, sql: Session) -> None:
        """Raise StoreError if the server, or what is before it, cannot be used."""
        encoding = sql.execute("SHOW server_encoding").fetchone()[0]
        if encoding != "UTF8":
            raise StoreError(
                f"its encoding is {encoding}: create a database with ENCODING 'UTF8'",
                self.name,
            )
        if sql.execute("SHOW synchronous_commit").fetchone()[0] == "off":
            # "Accepted" means on disk, so each commit waits for the disk.
            sql.execute("SET synchronous_commit = on")
        # Without a pooler, a session has a process of its own for as long as it lasts.
        other = Session(connect(self._url))
        try:
            sql.execute("BEGIN")
            ours = sql.execute(BACKEND).fetchone()
            others = [other.execute(BACKEND).fetchone()]
            sql.execute("ROLLBACK")
            others += [other.execute(BACKEND).fetchone() for _ in range(POOLER_LOOKS)]
            if {*others} != {others[0]} or sql.execute(BACKEND).fetchone() != ours:
                raise StoreError(
                    "a pooler gives each transaction another session, as PgBouncer "
                    "does with pool_mode = transaction: use pool_mode = session for "
                    "this database, or the server's own address",
                    self.name,
                )
        finally:
            other.close()

    def _lock(
        self, sql: Session, attempts: int = LOCK_ATTEMPTS, *, still_ours: bool = False
    ) -> None:
        """Lock the database, for as long as the session lasts.

        ``still_ours``: only while the lease is.  Raises InUse if another process has
        locked it.
        """
        (self._pid,) = sql.execute(BACKEND).fetchone()
        query = "SELECT holder, to_char(at, 'YYYY-MM-DD HH24:MI:SS TZ') FROM lease"
        for attempt in range(attempts):
            if attempt:
                time.sleep(LOCK_PAUSE)
            if sql.execute(f"SELECT pg_try_advisory_lock({LOCK})").fetchone()[0]:
                return
            holder, at = sql.execute(query).fetchone()
            if still_ours and holder != self.holder:
                break
        raise InUse(
            f"is in use by {holder.rpartition(',')[0]} since {at}: stop that `shoal "
            "serve`, give this one a database of its own, or let both be nodes "
            "(--node)",
            self.name,
        )


class PostgresStore(SqlStore):
    """Stores everything in one database, which one coordinator at a time may use."""

    def __init__(
        self, url: str, blobs: BlobStore | None = None, node: str = ""
    ) -> None:
        """Name the database; values too large for a row go to ``blobs``.

        ``node``: as in ``PostgresDatabase``.  Raises StoreError if the URL is none.
        """
        database = PostgresDatabase(url, node)
        super().__init__(database, blobs)
        self.holder = database.holder
        self.resume = database.resume
