"""Browsers that sign in: by a key, by a link that works once, and out again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.browser import LINKS, SESSION, Browser, browsing, status_with
from gateway.keys import CHAT, make_key, request
from gateway.serving import EPOCH, KEY, Pool, serving
from shoal.gateway.http.browser_sessions import (
    CODE_LIFETIME,
    OF_KEY_MAX,
    SESSION_LIFETIME,
)
from shoal.protocols.dispatch import Config
from shoal.transports.clock import LoopClock

pytestmark = pytest.mark.shared_pool


class WallClock:
    """The wall time, which the test sets."""

    def __init__(self) -> None:
        self.at = EPOCH
        self.clock = LoopClock(lambda: self.at)


@pytest_asyncio.fixture(loop_scope="module")
async def browser(pool: Pool) -> AsyncIterator[Browser]:
    async with browsing(pool.url) as each:
        yield each


async def code_of(pool: Pool, key: str = KEY) -> str:
    """Return the code of a new link."""
    status, link = await request(pool, "POST", LINKS, key=key)
    assert status == 200, link
    _, _, code = link["url"].partition("/#signin=")
    return str(code)


async def test_a_key_signs_in_until_it_signs_out(pool: Pool, browser: Browser) -> None:
    assert await browser.status() == 401

    shown = await browser.sign_in()

    assert (shown["name"], shown["scope"]) == ("default", "admin")
    assert (await browser.send("GET", SESSION))[1] == shown
    assert await browser.status("/admin/keys") == 200
    status, made = await browser.send("POST", "/admin/keys", {"name": "ada"})
    assert (status, made["name"]) == (200, "ada")

    kept = browser.cookie
    await browser.sign_out()

    assert browser.cookie == ""
    assert await browser.status() == 401
    assert await status_with(pool.url, kept) == 401


async def test_a_session_may_do_what_its_key_may(pool: Pool, browser: Browser) -> None:
    key = await make_key(pool, "reader", scope="read")

    shown = await browser.sign_in(key)

    assert (shown["name"], shown["scope"]) == ("reader", "read")
    assert await browser.status("/v1/models") == 200
    assert await browser.status("/admin/keys") == 403
    assert (await browser.send("POST", "/v1/chat/completions", CHAT))[0] == 403


async def test_a_stored_key_chats_from_the_page(pool: Pool, browser: Browser) -> None:
    await browser.sign_in(await make_key(pool, "ada"))
    async with pool.node() as node:
        await pool.wait_joined()
        answering = asyncio.create_task(node.answer("hello"))

        status, answer = await browser.send("POST", "/v1/chat/completions", CHAT)

        await answering
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "hello"


async def test_a_key_in_a_header_comes_before_the_cookie(
    pool: Pool, browser: Browser
) -> None:
    ada = await make_key(pool, "ada", expires_in=3600)
    await browser.sign_in()

    status, shown = await browser.send("GET", SESSION, headers=pool.headers(ada))

    assert (status, shown["name"]) == (200, "ada")
    assert shown["expires_at"] is not None
    wrong = pool.headers("sk-wrong")
    assert (await browser.send("GET", SESSION, headers=wrong))[0] == 401


async def test_what_a_session_reads_is_not_cached(pool: Pool, browser: Browser) -> None:
    await browser.sign_in()

    async with browser.session.get(f"{pool.url}/admin/status") as response:
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    async with browser.session.get(f"{pool.url}/") as response:
        assert response.headers["Cache-Control"] == "no-cache"


async def test_a_link_signs_in_once(pool: Pool, browser: Browser) -> None:
    code = await code_of(pool)

    status, shown = await browser.send("POST", SESSION, {"code": code})

    assert (status, shown["name"], shown["scope"]) == (200, "default", "admin")
    assert await browser.status("/admin/keys") == 200
    async with browsing(pool.url) as second:
        status, refused = await second.send("POST", SESSION, {"code": code})
        assert status == 401
        assert "shoal dashboard" in refused["error"]["message"]
        assert await second.status() == 401


async def test_a_signed_in_admin_makes_links_of_its_own_key(
    pool: Pool, browser: Browser
) -> None:
    await browser.sign_in(await make_key(pool, "root", scope="admin"))
    status, link = await browser.send("POST", LINKS)
    assert status == 200

    async with browsing(pool.url) as phone:
        code = link["url"].partition("#signin=")[2]
        _, shown = await phone.send("POST", SESSION, {"code": code})

    assert shown["name"] == "root"


async def test_links_and_sessions_expire(tmp_path: Path) -> None:
    wall = WallClock()
    async with (
        serving(tmp_path, clock=wall.clock) as pool,
        browsing(pool.url) as browser,
    ):
        code, late = await code_of(pool), await code_of(pool)
        wall.at += CODE_LIFETIME - 1
        assert (await browser.send("POST", SESSION, {"code": code}))[0] == 200
        wall.at += 1
        async with browsing(pool.url) as other:
            assert (await other.send("POST", SESSION, {"code": late}))[0] == 401
        wall.at += SESSION_LIFETIME - 2
        assert await browser.status() == 200
        wall.at += 1

        assert await browser.status() == 401


async def test_an_expired_key_ends_its_session(tmp_path: Path) -> None:
    wall = WallClock()
    async with (
        serving(tmp_path, clock=wall.clock) as pool,
        browsing(pool.url) as browser,
    ):
        shown = await browser.sign_in(await make_key(pool, "ada", expires_in=60))

        assert shown["expires_at"] == EPOCH + 60
        wall.at += 60
        assert await browser.status() == 401


async def test_a_restart_keeps_browsers_signed_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool, browsing(pool.url) as browser:
        await browser.sign_in()
        kept = browser.cookie.partition("=")[2]
        async with browsing(pool.url) as other:
            await other.sign_in()
            ended = other.cookie.partition("=")[2]
            await other.sign_out()

    async with serving(tmp_path) as pool:
        name = f"shoal-session-{pool.url.rpartition(':')[2]}"
        for value, status in ((kept, 200), (ended, 401), ("", 401)):
            assert await status_with(pool.url, f"{name}={value}") == status

    # Another first key has other sessions.
    async with serving(tmp_path, keys={"default": "sk-another"}) as pool:
        name = f"shoal-session-{pool.url.rpartition(':')[2]}"
        assert await status_with(pool.url, f"{name}={kept}") == 401


async def test_a_key_has_a_limited_number_of_sessions(
    pool: Pool, browser: Browser
) -> None:
    await browser.sign_in()
    cookies = []
    for _ in range(OF_KEY_MAX):
        assert await browser.status() == 200
        async with browsing(pool.url) as another:
            await another.sign_in()
            cookies.append(another.cookie)

    assert await browser.status() == 401
    for cookie in cookies:
        assert await status_with(pool.url, cookie) == 200


async def test_signing_in_again_ends_the_session_before(
    pool: Pool, browser: Browser
) -> None:
    await browser.sign_in()
    before = browser.cookie

    await browser.sign_in(await make_key(pool, "ada"))

    assert (await browser.send("GET", SESSION))[1]["name"] == "ada"
    assert await status_with(pool.url, before) == 401


@pytest.mark.parametrize("body", [{}, {"api_key": KEY, "code": "x"}, {"key": KEY}, []])
async def test_a_body_has_a_key_or_a_code(browser: Browser, body: object) -> None:
    assert (await browser.send("POST", SESSION, body))[0] == 400


async def test_a_session_goes_before_an_open_wire(tmp_path: Path) -> None:
    path = "/v1/jobs/commit/cheap"
    async with (
        serving(tmp_path, wires={"dispatch": Config(open=True)}) as pool,
        browsing(pool.url) as browser,
    ):
        anybody, _ = await browser.send("POST", path, {})
        await browser.sign_in(await make_key(pool, "reader", scope="read"))
        reader, _ = await browser.send("POST", path, {})

    assert (anybody, reader) == (400, 403)


async def test_open_loopback_needs_no_session(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, open_loopback=True) as pool,
        browsing(pool.url) as browser,
    ):
        status, shown = await browser.send("GET", SESSION)
        assert status == 200
        assert shown == {"name": "loopback", "scope": "use", "expires_at": None}
        assert await browser.status("/admin/keys") == 403

        await browser.sign_in()

        assert (await browser.send("GET", SESSION))[1]["name"] == "default"
        assert await browser.status("/admin/keys") == 200
        await browser.sign_out()
        assert (await browser.send("GET", SESSION))[1]["name"] == "loopback"
