"""Sessions of PostgreSQL that run statements as a connection of ``sqlite3`` does."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

import psycopg
from psycopg import adapt, pq
from psycopg.adapt import AdaptersMap, Buffer
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import TextBinaryLoader

from shoal.store.sql.database import Numbers, Rows, Texts

CONNECT_TIMEOUT = 10  # seconds
# Seconds after which a session ends that waits for its client inside a transaction:
# one that was stopped there holds the row which a takeover needs.
IDLE_IN_TRANSACTION_MAX = 2
# Seconds until the first question whether the other end of a silent connection is
# there, between two of them, and their number; and what all may take together.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3, 3
UNANSWERED_MAX = 15

PLACEHOLDER = re.compile(r"\?(\d*)|(?<![:\w]):([a-z_]+)")
ESCAPED = re.compile("[\0\1]")
ESCAPE = {"\0": "\1\1", "\1": "\1\2"}
UNESCAPE = {"\1\1": "\0", "\1\2": "\1"}
PAIR = re.compile("\1[\1\2]")

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]


def escaped(text: str) -> str:
    """Return a text without NUL, which PostgreSQL's texts cannot have.

    The order of texts stays.
    """
    if "\0" in text or "\1" in text:
        return ESCAPED.sub(lambda found: ESCAPE[found[0]], text)
    return text


def unescaped(text: str) -> str:
    """Return the text of ``escaped``."""
    if "\1" in text:
        return PAIR.sub(lambda found: UNESCAPE[found[0]], text)
    return text


class TextDumper(adapt.Dumper):
    """Texts are of type text, so that each statement has one plan."""

    format = pq.Format.BINARY
    oid = psycopg.postgres.types["text"].oid

    def dump(self, obj: str) -> Buffer:
        return escaped(obj).encode()


class TextsDumper(TextDumper):
    """A list of texts is one JSON text, for the function ``json_each``."""

    def dump(self, obj: Any) -> Buffer:
        return json.dumps([escaped(each) for each in obj]).encode()


class NumbersDumper(adapt.Dumper):
    """A list of numbers is an array of them, for the function ``json_each``."""

    oid = psycopg.postgres.types["int8"].array_oid

    def dump(self, obj: Numbers) -> Buffer:
        return f"{{{','.join(map(str, obj))}}}".encode()


class TextLoader(TextBinaryLoader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> str:
        text = super().load(data)
        assert isinstance(text, str), "the encoding is UTF-8"
        return unescaped(text)


class SumLoader(NumericBinaryLoader):
    """Sums of whole numbers."""

    format = pq.Format.BINARY

    def load(self, data: Buffer) -> Any:
        return int(super().load(data))


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(int, Int8BinaryDumper)  # whatever its size
    adapters.register_dumper(str, TextDumper)
    adapters.register_dumper(Texts, TextsDumper)
    adapters.register_dumper(Numbers, NumbersDumper)
    adapters.register_loader("text", TextLoader)
    adapters.register_loader("numeric", SumLoader)
    return adapters


ADAPTERS = _adapters()


def connect(url: str) -> Connection:
    """Connect; the URL's own settings go before those of Shoal.

    Raises psycopg.Error.
    """
    settings: dict[str, Any] = {
        "application_name": "shoal",
        "connect_timeout": CONNECT_TIMEOUT,
        "keepalives_idle": KEEPALIVE_IDLE,
        "keepalives_interval": KEEPALIVE_INTERVAL,
        "keepalives_count": KEEPALIVE_COUNT,
        "tcp_user_timeout": UNANSWERED_MAX * 1000,
        **conninfo_to_dict(url),
        "client_encoding": "utf8",
    }
    connection: Connection = psycopg.Connection.connect(
        autocommit=True,
        cursor_factory=psycopg.RawCursor,
        context=_Context(),
        **settings,
    )
    try:
        # The server, too, must notice that this machine is gone: it has our lock.
        connection.execute(
            "SELECT set_config(name, value, false) FROM (VALUES"
            f" ('idle_in_transaction_session_timeout', '{IDLE_IN_TRANSACTION_MAX}s'),"
            f" ('tcp_keepalives_idle', '{KEEPALIVE_IDLE}'),"
            f" ('tcp_keepalives_interval', '{KEEPALIVE_INTERVAL}'),"
            f" ('tcp_keepalives_count', '{KEEPALIVE_COUNT}'),"
            f" ('tcp_user_timeout', '{UNANSWERED_MAX}s')) AS settings (name, value)"
        )
    except BaseException:
        connection.close()
        raise
    return connection


class _Context:
    """Gives connections the adapters."""

    adapters = ADAPTERS
    connection = None


class Session:
    """A session, which ``connect`` begins anew when its connection was lost."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def execute(self, query: str, values: Any = (), /) -> Rows:
        statement, names = translated(query)
        if names is not None:
            assert isinstance(values, Mapping)
            values = [values[name] for name in names]
        cursor = self.connection.cursor(binary=True)
        return cursor.execute(statement, values)

    def executemany(self, query: str, rows: Iterable[Any], /) -> Rows:
        statement, _ = translated(query)
        cursor = self.connection.cursor(binary=True)
        match [*rows]:
            case []:
                pass
            case [row]:  # as in most commits: a pipeline takes twice as long
                cursor.execute(statement, row)
            case several:
                cursor.executemany(statement, several)
        return cursor

    def executescript(self, script: str) -> None:
        """Run statements without values."""
        self.connection.execute(script)

    def close(self) -> None:
        """Close the connection; whatever it lacks, that succeeds."""
        self.connection.close()

    @property
    def is_closed(self) -> bool:
        """Whether the connection was closed or lost."""
        return self.connection.closed

    @property
    def in_transaction(self) -> bool:
        status = self.connection.info.transaction_status
        return status in (
            pq.TransactionStatus.INTRANS,
            pq.TransactionStatus.INERROR,
        )


@cache  # the statements are few
def translated(query: str) -> tuple[str, list[str] | None]:
    """Return a statement with PostgreSQL's placeholders, and the names of its values.

    None: they have numbers.
    """
    names: list[str] = []
    count = 0

    def placeholder(found: re.Match[str]) -> str:
        nonlocal count
        number, name = found[1], found[2]
        if name is not None:
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"
        if not number:
            count += 1
        return f"${number or count}"

    statement = PLACEHOLDER.sub(placeholder, query)
    return statement, names or None
