"""What the queries ask of a database: a connection that writes, others that read.

No transaction waits for a read.  A read waits for the transactions that were begun
before it, so that it sees what they wrote.  Reads of a few rows have a connection of
their own: they do not wait for lists.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from shoal.domain.errors import InvalidRequest, StoreBroken, StoreError

T = TypeVar("T")


LIST_READERS = 2  # lists at once; the interpreter runs their Python code in turn
ROWS_FIRST, ROWS_MAX = 32, 1024  # of ``in_steps``, read at once

# What reading a damaged row raises.
UNDECODABLE = (ValueError, KeyError, TypeError, InvalidRequest)

_QueuedCall: TypeAlias = tuple[
    Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]
]


class Rows(Protocol):
    """The rows of a statement."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Sql(Protocol):
    """A connection, as those of ``sqlite3`` are.

    Values stand for ``?``, for ``?1``, or by name for ``:name``.  Statements are such
    that SQLite and PostgreSQL both understand.
    """

    def execute(self, query: str, values: Any = ..., /) -> Rows: ...

    def executemany(self, query: str, rows: Iterable[Any], /) -> Rows: ...


C = TypeVar("C", bound=Sql)


class Listed(list[T]):
    """A list as one value of a query, which reads it as ``json_each(?)``."""

    def __conform__(self, _: object) -> str:  # called by ``sqlite3``
        return msgspec.json.encode(self).decode()


class Texts(Listed[str]):
    """A list of texts."""


class Numbers(Listed[int]):
    """A list of whole numbers."""


AMONG = "id IN (SELECT value FROM json_each(?))"
"""A condition: rows whose ``id`` is in a list among the values."""


def decode(make: Callable[..., T], *values: object) -> T:
    """Return what ``make`` makes of values from rows.

    Raises StoreBroken if it cannot: this program has written them.
    """
    try:
        return make(*values)
    except UNDECODABLE as error:
        # Without its text, which may have a prompt.
        name = type(error).__name__
        raise StoreBroken(f"a row of the database is damaged ({name})") from error


def select(
    make: Callable[..., T], query: str, *values: object
) -> Callable[[Sql], list[T]]:
    """Return what reads the rows of a query; ``make`` takes the columns of each."""
    return lambda sql: [decode(make, *row) for row in sql.execute(query, values)]


def select_first(
    make: Callable[..., T], query: str, *values: object
) -> Callable[[Sql], T | None]:
    """Return what reads the first row of a query; None: there is none."""

    def read(sql: Sql) -> T | None:
        row = sql.execute(query, values).fetchone()
        return None if row is None else decode(make, *row)

    return read


def execute(query: str, *values: object) -> Callable[[Sql], int]:
    """Return what carries a statement out, and returns how many rows it changed."""
    return lambda sql: sql.execute(query, values).rowcount


def in_steps(sql: Sql, query: str, *values: object) -> Iterator[Any]:
    """Yield the rows of a query until the caller has enough, without reading them all.

    The last of the values bounds the first column, in whose order the rows are.  The
    query goes on with a limit.
    """
    *others, bound = values
    count = ROWS_FIRST
    while True:
        rows = sql.execute(f"{query} LIMIT ?", (*others, bound, count)).fetchall()
        yield from rows
        if len(rows) < count:
            return
        bound = rows[-1][0]
        count = min(2 * count, ROWS_MAX)


class Database(ABC, Generic[C]):
    """A database that one coordinator at a time writes, with connections of type ``C``.

    What runs SQL raises StoreError.  A database may have the connection that writes
    only; then it needs no thread.
    """

    errors: tuple[type[Exception], ...]
    """What its connections raise, and StoreBroken."""

    def __init__(self, name: str, *, threads: bool = True) -> None:
        """Name the database in errors."""
        self.name = name
        self._thread = Threads(1 if threads else 0, "shoal-store")
        self._writer: C | None = None
        self._last_write: asyncio.Future[Any] | None = None
        self._readers: Readers[C] | None = None
        self._list_readers: Readers[C] | None = None
        if threads:
            self._readers = Readers(1, "shoal-read")
            self._list_readers = Readers(LIST_READERS, "shoal-list")
        self._damage: asyncio.Future[StoreBroken] | None = None

    async def open(self, *, create: bool = True) -> None:
        """Open the database, and migrate it; ``create``: make it if there is none.

        Raises StoreError; StoreBroken if it is damaged, or missing or empty and not to
        be created.
        """
        self._damage = asyncio.get_running_loop().create_future()
        await self.run(lambda: self._open(create=create))

    async def wait_damaged(self) -> StoreBroken:
        """Wait until a read, a transaction or a check finds damage; return it."""
        if self._damage is None:
            raise self._not_open()
        return await asyncio.shield(self._damage)

    async def transact(self, work: Callable[[C], T]) -> T:
        """Run ``work`` in one transaction, after all that were begun before."""
        self._last_write = write = self._thread.run(partial(self._transact, work))
        return await self._result(write)

    async def read(self, work: Callable[[C], T]) -> T:
        """Run ``work``, which reads a few rows by a key."""
        return await self._read(self._readers, work)

    async def read_list(self, work: Callable[[C], T]) -> T:
        """Run ``work``, which reads many rows."""
        return await self._read(self._list_readers, work)

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the thread that writes."""
        return await self._result(self._thread.run(call))

    async def close(self) -> None:
        await self.run(self._close)
        self._thread.close()

    @abstractmethod
    async def check(self) -> None:
        """Look for damage, at little cost.  Raises StoreBroken, StoreError."""

    @abstractmethod
    async def give_back(self) -> None:
        """Give the space of deleted rows back, if the database does not by itself."""

    @abstractmethod
    def translated(self, error: Any) -> StoreError:
        """Return what one of ``errors`` means."""

    # In the thread that writes.

    @property
    def _opened(self) -> C:
        if self._writer is None:
            raise self._not_open()
        return self._writer

    @abstractmethod
    def _open(self, *, create: bool) -> None: ...

    @abstractmethod
    def _close(self) -> None:
        """Close all connections, also if they are not open."""

    @abstractmethod
    def _transact(self, work: Callable[[C], T]) -> T: ...

    # In the thread that writes, or in that of a reader.

    @abstractmethod
    def _read_snapshot(self, connection: C, work: Callable[[C], T]) -> T:
        """Run ``work`` so that all its statements see the same commit."""

    async def _read(self, readers: "Readers[C] | None", work: Callable[[C], T]) -> T:
        if readers is None:
            return await self.run(lambda: self._read_snapshot(self._opened, work))
        if self._writer is None:
            raise self._not_open()
        if self._last_write is not None and not self._last_write.done():
            await asyncio.wait([self._last_write])
        read = readers.threads.run(lambda: self._read_with(readers, work))
        return await self._result(read)

    def _read_with(self, readers: "Readers[C]", work: Callable[[C], T]) -> T:
        reader = readers.idle.get_nowait()  # there is one for each thread
        try:
            return self._read_snapshot(reader, work)
        finally:
            readers.idle.put(reader)

    async def _result(self, future: asyncio.Future[T]) -> T:
        try:
            return await future
        except self.errors as error:
            translated = self._noted(error)
            if translated is error:
                raise
            raise translated from error

    def _noted(self, error: Exception) -> StoreError:
        """Return what an error means, and note damage."""
        translated = self.translated(error)
        if isinstance(translated, StoreBroken):
            translated.path = translated.path or self.name
            if self._damage is not None and not self._damage.done():
                self._damage.set_result(translated)
        return translated

    def _not_open(self) -> StoreError:
        return StoreError("the database is not open", self.name)


class Threads:
    """Threads that run calls, each one at a time; without threads they run at once.

    Each commit passes here, twice for a chat: the way to an executor of the standard
    library and back takes several locks, and ten times the calls.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._started = self._closed = False

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call; one that is cancelled before its turn is left out.

        Raises StoreError after the end.
        """
        if self._closed:
            raise StoreError("the database is not open")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._threads:
            self._calls.put((call, loop, future))
        else:
            _finish(future, *_outcome_of(call))
        return future

    def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        self._closed = True
        if self._started:
            for _ in self._threads:
                self._calls.put(None)
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            call, loop, future = queued
            if future.cancelled():
                continue
            result, error = _outcome_of(call)
            try:
                loop.call_soon_threadsafe(_finish, future, result, error)
            except RuntimeError:  # the loop has been closed meanwhile
                continue
            del queued, call, future, result, error  # not until the next call


def _outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call; return the result, and what was raised."""
    try:
        return call(), None
    except BaseException as error:  # for who waits
        return None, error


def _finish(
    future: asyncio.Future[Any], result: object, error: BaseException | None
) -> None:
    if future.done():
        return  # its caller has left
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Readers(Generic[C]):
    """Connections that only read, and a thread for each."""

    def __init__(self, count: int, name: str) -> None:
        self.threads = Threads(count, name)
        self.idle: SimpleQueue[C] = SimpleQueue()
        self._count = count

    def open(self, connect: Callable[[], C]) -> None:
        """Open the connections."""
        for _ in range(self._count):
            self.idle.put(connect())

    def close(self, close: Callable[[C], object]) -> None:
        """Wait for the reads under way, and close the connections."""
        self.threads.close()
        while not self.idle.empty():
            close(self.idle.get_nowait())
