"""Sessions of browsers: how many there are, when they end, and what is on the disk."""

import asyncio
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.serving import Pool
from shoal.config.session_file import SessionFile
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
    SignInCodes,
    is_encrypted,
)
from shoal.gateway.http.web_origins import PagePolicy

NOW = 1_700_000_000.0  # Unix time
HOST = "127.0.0.1:4010"


def key_of(name: str, expires_at: float | None = None) -> Key:
    return Key(name, name, digest_of(name), "", Scope.USE, NOW, expires_at)


ADA = key_of("ada")
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def found(
    sessions: BrowserSessions, cookie: str, host: str = HOST, at: float = NOW
) -> BrowserSession | None:
    headers = {"Host": host, "Cookie": cookie}
    request = make_mocked_request("GET", "/", headers)
    return sessions.find(request.headers, at, secure=request.secure)


async def test_a_session_is_found_by_its_cookie() -> None:
    sessions = BrowserSessions()
    await sessions.open()  # there is no file
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


async def test_under_tls_only_a_cookie_of_tls_counts() -> None:
    sessions = BrowserSessions()
    session = await sessions.begin("value", ADA, NOW)
    found_in = {}
    for name in ("shoal-session-4010", "__Host-shoal-session-4010"):
        headers = {"Host": HOST, "Cookie": f"{name}=value"}
        request = make_mocked_request("GET", "/", headers, sslcontext=TLS)
        assert is_encrypted(request)
        found_in[name] = sessions.find(request.headers, NOW, secure=True)

    assert [*found_in.values()] == [None, session]


async def test_a_session_ends_with_its_time_or_its_key() -> None:
    sessions = BrowserSessions()

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


async def test_sessions_are_bounded() -> None:
    sessions = BrowserSessions()
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


def test_a_code_is_redeemed_once_and_in_time() -> None:
    codes = SignInCodes()
    expires_at = codes.add("first", ADA, NOW)
    codes.add("second", ADA, NOW)

    assert expires_at == NOW + CODE_LIFETIME
    assert codes.redeem("none", NOW) is None
    assert codes.redeem("first", expires_at - 1) == ADA.digest
    assert codes.redeem("first", NOW) is None
    assert codes.redeem("second", expires_at) is None


def test_codes_are_bounded() -> None:
    codes = SignInCodes()
    for number in range(CODES_MAX + 1):
        codes.add(str(number), ADA, NOW)

    assert codes.redeem("0", NOW) is None
    assert codes.redeem("1", NOW) == ADA.digest
    assert codes.redeem(str(CODES_MAX), NOW) == ADA.digest


async def test_sessions_outlive_the_process(tmp_path: Path) -> None:
    before = BrowserSessions(PagePolicy(), SessionFile(tmp_path))
    kept = await before.begin("kept", ADA, NOW)
    ended = await before.begin("ended", ADA, NOW)
    await before.end(ended)

    after = BrowserSessions(PagePolicy(), SessionFile(tmp_path))
    await after.open()

    assert after.is_open(kept, NOW)
    assert not after.is_open(ended, NOW)


async def test_what_changes_at_a_time_is_all_in_the_file(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)
    sessions = BrowserSessions(PagePolicy(), file)
    keys = [key_of(str(number)) for number in range(30)]
    before = [await sessions.begin(f"before {each.name}", each, NOW) for each in keys]

    async with asyncio.TaskGroup() as tasks:
        for each in keys:
            tasks.create_task(sessions.begin(f"after {each.name}", each, NOW))
        for ended in before:
            tasks.create_task(sessions.end(ended))

    stored = file.read()
    assert len(stored) == 30
    assert all(sessions.is_open(each, NOW) for each in stored)


async def test_who_leaves_while_signing_out_is_signed_out(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)
    sessions = BrowserSessions(PagePolicy(), file)
    leaving = await sessions.begin("leaving", ADA, NOW)
    waiting = await sessions.begin("waiting", ADA, NOW)
    loop, free = asyncio.get_running_loop(), threading.Event()
    with ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(free.wait)  # the disk is slow
        loop.set_default_executor(threads)
        first = asyncio.create_task(sessions.end(leaving))
        second = asyncio.create_task(sessions.end(waiting))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        free.set()

    assert first.cancelled()
    assert second.cancelled()
    assert file.read() == []


async def test_a_damaged_file_signs_everybody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SessionFile(tmp_path)
    file.path.write_text('[{"session": ')

    sessions = BrowserSessions(PagePolicy(), file)
    await sessions.open()

    assert "browsers sign in again" in caplog.text
    session = await sessions.begin("new", ADA, NOW)
    assert file.read() == [session]


async def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SessionFile(tmp_path / "folder")
    file.path.parent.mkdir()
    sessions = BrowserSessions(PagePolicy(), file)
    kept = await sessions.begin("kept", ADA, NOW)
    file.path.with_name(f"{file.path.name}.part").mkdir()  # in the way

    ended = await sessions.begin("ended", ADA, NOW)
    await sessions.end(ended)

    assert sessions.is_open(kept, NOW)
    assert not sessions.is_open(ended, NOW)
    assert "sign in again after a restart" in caplog.text
    # Else the ended one would begin again.
    assert file.read() == []
