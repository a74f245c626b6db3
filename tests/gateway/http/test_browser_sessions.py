"""Sessions of browsers: how many there are, when they end, and what is stored."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.serving import Pool, eventually
from shoal.domain.credentials import BrowserSession, Key, Scope, digest_of
from shoal.domain.errors import SessionEnded
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.browser_sessions import (
    CODE_LIFETIME,
    CODES_MAX,
    OF_KEY_MAX,
    SESSION_LIFETIME,
    SESSIONS_MAX,
    BrowserSessions,
    is_encrypted,
)
from shoal.store.sqlite.database import SqliteStore
from store.in_memory import memory_store

NOW = 1_700_000_000.0  # Unix time
HOST = "127.0.0.1:4010"


def key_of(name: str, expires_at: float | None = None) -> Key:
    return Key(name, name, digest_of(name), "", Scope.USE, NOW, expires_at)


ADA = key_of("ada")
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    async with memory_store() as store:
        yield store


@pytest.fixture
def sessions(store: SqliteStore) -> BrowserSessions:
    return BrowserSessions(store.sign_ins)


def found(
    sessions: BrowserSessions, cookie: str, host: str = HOST, at: float = NOW
) -> BrowserSession | None:
    headers = {"Host": host, "Cookie": cookie}
    request = make_mocked_request("GET", "/", headers)
    return sessions.find(request.headers, at, secure=request.secure)


async def test_a_session_is_found_by_its_cookie(sessions: BrowserSessions) -> None:
    session = await sessions.begin("value", ADA, NOW)

    assert found(sessions, "shoal-session-4010=value") == session
    assert found(sessions, "a=b; shoal-session-4010=value; c=d") == session
    assert found(sessions, "__Host-shoal-session-4010=value") == session
    assert found(sessions, "shoal-session=value", "pool.example") == session
    for cookie in (
        "shoal-session-4010=VALUE",
        "shoal-session-4011=value",
        "shoal-session=value",
        "value",
        "",
    ):
        assert found(sessions, cookie) is None


async def test_under_tls_only_a_cookie_of_tls_counts(sessions: BrowserSessions) -> None:
    session = await sessions.begin("value", ADA, NOW)
    found_in = {}
    for name in ("shoal-session-4010", "__Host-shoal-session-4010"):
        headers = {"Host": HOST, "Cookie": f"{name}=value"}
        request = make_mocked_request("GET", "/", headers, sslcontext=TLS)
        assert is_encrypted(request)
        found_in[name] = sessions.find(request.headers, NOW, secure=True)

    assert [*found_in.values()] == [None, session]


async def test_a_session_ends_with_its_time_or_its_key(
    sessions: BrowserSessions,
) -> None:
    alone = await sessions.begin("1", ADA, NOW)
    short = await sessions.begin("2", key_of("bob", NOW + 60), NOW)

    assert alone.expires_at == NOW + SESSION_LIFETIME
    assert short.expires_at == NOW + 60
    cookie = "shoal-session-4010=2"
    assert found(sessions, cookie, at=NOW + 59) == short
    assert found(sessions, cookie, at=NOW + 60) is None
    assert not sessions.is_open(short, NOW + 60)
    await sessions.begin("3", ADA, NOW + 60)  # what has ended is forgotten
    assert not sessions.is_open(short, NOW)
    assert sessions.is_open(alone, NOW)


async def test_sessions_are_bounded(sessions: BrowserSessions) -> None:
    keys = [key_of(f"k{number}") for number in range(SESSIONS_MAX // OF_KEY_MAX + 1)]

    opened = [
        await sessions.begin(f"{key.name} {number}", key, NOW + number)
        for number in range(OF_KEY_MAX + 5)
        for key in keys
    ]

    still = [each for each in opened if sessions.is_open(each, NOW)]
    assert still == opened[-SESSIONS_MAX:]


async def test_an_ended_session_is_ended_for_those_who_still_use_it(pool: Pool) -> None:
    access = pool.access
    (first,) = access.keyring.first
    session = await access.sessions.begin("value", first, 0.0)
    session = await access.sessions.begin("value", first, 1e12)
    caller = ApiCaller(first, session=session)
    access.ensure_active(caller)

    await access.sessions.end(session)
    await access.sessions.end(session)

    with pytest.raises(SessionEnded, match="sign in again"):
        access.ensure_active(caller)


async def test_a_code_is_redeemed_once_and_in_time(
    sessions: BrowserSessions,
) -> None:
    expires_at = await sessions.add_code("first", ADA, NOW)
    await sessions.add_code("second", ADA, NOW)

    assert expires_at == NOW + CODE_LIFETIME
    assert await sessions.redeem("none", NOW) is None
    assert await sessions.redeem("first", expires_at - 1) == ADA.digest
    assert await sessions.redeem("first", NOW) is None
    assert await sessions.redeem("second", expires_at) is None


async def test_codes_are_bounded(sessions: BrowserSessions) -> None:
    for number in range(CODES_MAX + 1):
        await sessions.add_code(str(number), ADA, NOW)

    assert await sessions.redeem("0", NOW) is None
    assert await sessions.redeem("1", NOW) == ADA.digest
    assert await sessions.redeem(str(CODES_MAX), NOW) == ADA.digest


async def test_sessions_and_codes_outlive_the_process(store: SqliteStore) -> None:
    before = BrowserSessions(store.sign_ins)
    kept = await before.begin("kept", ADA, NOW)
    ended = await before.begin("ended", ADA, NOW)
    await before.end(ended)
    await before.add_code("code", ADA, NOW)

    after = BrowserSessions(store.sign_ins)
    await after.open()

    assert after.is_open(kept, NOW)
    assert not after.is_open(ended, NOW)
    assert await after.redeem("code", NOW) == ADA.digest
    assert await before.redeem("code", NOW) is None


async def test_what_changes_at_a_time_is_all_stored(store: SqliteStore) -> None:
    sessions = BrowserSessions(store.sign_ins)
    keys = [key_of(str(number)) for number in range(30)]
    before = [await sessions.begin(f"before {each.name}", each, NOW) for each in keys]

    async with asyncio.TaskGroup() as tasks:
        for each in keys:
            tasks.create_task(sessions.begin(f"after {each.name}", each, NOW))
        for ended in before:
            tasks.create_task(sessions.end(ended))

    stored = await store.sign_ins.sessions()
    assert len(stored) == 30
    assert all(sessions.is_open(each, NOW) for each in stored)


async def test_who_leaves_while_signing_out_is_signed_out(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    sessions = BrowserSessions(store.sign_ins)
    leaving = await sessions.begin("leaving", ADA, NOW)
    waiting = await sessions.begin("waiting", ADA, NOW)
    free = threading.Event()
    busy = asyncio.create_task(store.database.run(free.wait))  # the disk is slow
    first = asyncio.create_task(sessions.end(leaving))
    second = asyncio.create_task(sessions.end(waiting))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    free.set()
    await busy

    assert first.cancelled()
    assert second.cancelled()
    assert await store.sign_ins.sessions() == []
    await store.close()


async def test_what_could_not_be_stored_is_stored_with_the_next_change(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = BrowserSessions(store.sign_ins)
    ended = await sessions.begin("ended", ADA, NOW)
    await rename(store, "browser_sessions", "moved")

    kept = await sessions.begin("kept", ADA, NOW)
    await sessions.end(ended)

    assert "a restart signs some browsers out, or in again" in caplog.text
    assert sessions.is_open(kept, NOW)
    assert not sessions.is_open(ended, NOW)
    await rename(store, "moved", "browser_sessions")
    assert await store.sign_ins.sessions() == [ended]
    last = await sessions.begin("last", ADA, NOW)
    assert await store.sign_ins.sessions() == [kept, last]


async def test_a_change_is_written_once(store: SqliteStore) -> None:
    sessions = BrowserSessions(store.sign_ins)
    first = await sessions.begin("first", ADA, NOW)
    await store.sign_ins.write_sessions({first.digest: None})

    second = await sessions.begin("second", ADA, NOW)

    assert await store.sign_ins.sessions() == [second]


async def test_sessions_of_a_revoked_key_are_deleted(store: SqliteStore) -> None:
    sessions = BrowserSessions(store.sign_ins)
    await sessions.begin("1", ADA, NOW)
    await sessions.begin("2", ADA, NOW)
    other = await sessions.begin("3", key_of("bob"), NOW)

    await sessions.end_all_of(ADA)

    assert await store.sign_ins.sessions() == [other]


async def test_an_end_that_could_not_be_stored_outlives_an_earlier_write(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    sessions = BrowserSessions(store.sign_ins)
    free = threading.Event()
    # Each waits for the one before it, in the thread of the store.
    busy = asyncio.create_task(store.database.run(free.wait))
    beginning = asyncio.create_task(sessions.begin("value", ADA, NOW))
    await eventually(lambda: bool(sessions._sessions))
    (session,) = sessions._sessions.values()
    await asyncio.sleep(0)  # the write is queued
    moving = asyncio.create_task(rename(store, "browser_sessions", "moved"))
    await asyncio.sleep(0)
    ending = asyncio.create_task(sessions.end(session))
    await asyncio.sleep(0)
    free.set()
    await asyncio.gather(busy, beginning, moving, ending)
    await rename(store, "moved", "browser_sessions")
    assert await store.sign_ins.sessions() == [session]

    other = await sessions.begin("other", ADA, NOW)

    assert await store.sign_ins.sessions() == [other]
    await store.close()


async def rename(store: SqliteStore, table: str, to: str) -> None:
    query = f"ALTER TABLE {table} RENAME TO {to}"
    await store.database.transact(lambda sql: sql.execute(query))
