"""The dashboard under attack: other pages, stolen cookies, guesses and paths."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import WSServerHandshakeError

from attacks.raw import wire
from attacks.siege import besieged, port_of
from gateway.browser import LINKS, SESSION, Browser, browsing, status_with
from gateway.keys import make_key, request
from gateway.serving import KEY, Pool
from harness.profiles import some_long
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.domain.credentials import digest_of
from shoal.gateway.calls import CALLS_PATH

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = "/admin/keys"
OTHER_SITE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest_asyncio.fixture(loop_scope="module")
async def browser(pool: Pool) -> AsyncIterator[Browser]:
    """A browser in which an admin is signed in."""
    async with browsing(pool.url) as each:
        await each.sign_in()
        yield each


def other_pages(pool: Pool) -> list[Mapping[str, str]]:
    """Return what browsers say of pages that are not the coordinator's."""
    port = port_of(pool)
    return [
        OTHER_SITE,
        {"Origin": "https://evil.example"},  # of an old browser
        {"Origin": "null", "Sec-Fetch-Site": "cross-site"},  # in a sandbox
        {"Origin": "null"},
        # Another server of this machine, which is the same site to a browser.
        {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": f"http://localhost:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
        # A name that resolves to this machine by now.
        {"Origin": f"http://evil.example:{port}", "Host": f"evil.example:{port}"},
    ]


async def names(pool: Pool) -> set[str]:
    _, listed = await request(pool, "GET", NAMES)
    return {each["name"] for each in listed["data"]}


async def test_another_page_does_nothing_with_the_cookie(
    pool: Pool, browser: Browser, subtests: pytest.Subtests
) -> None:
    before = await names(pool)
    new_key = {"name": "mallory", "scope": "admin"}
    for says in other_pages(pool):
        with subtests.test(says=says):
            for method, path, body in (
                ("POST", NAMES, new_key),
                ("GET", NAMES, None),
                ("GET", SESSION, None),
                ("POST", LINKS, None),
                ("DELETE", SESSION, None),
            ):
                status, _ = await browser.send(method, path, body, headers=says)
                assert status == 403, (method, path)

    assert await names(pool) == before
    assert await browser.status() == 200


async def test_a_form_of_another_page_lacks_the_header(
    pool: Pool, browser: Browser
) -> None:
    """Even a page that passes for the coordinator's own."""
    before = await names(pool)
    for method, path in (("POST", NAMES), ("POST", LINKS), ("DELETE", SESSION)):
        status, refused = await browser.send(
            method, path, {"name": "mallory"}, page_header=False
        )
        assert status == 403
        assert "x-shoal-page" in refused["error"]["message"]

    assert await names(pool) == before
    assert await browser.status() == 200


async def test_another_page_signs_nobody_in(pool: Pool) -> None:
    for says in other_pages(pool):
        async with browsing(pool.url) as victim:
            status, _ = await victim.send(
                "POST", SESSION, {"api_key": KEY}, headers=says
            )
            assert (status, victim.cookie) == (403, "")
    async with browsing(pool.url) as victim:
        body = {"api_key": KEY}
        status, _ = await victim.send("POST", SESSION, body, page_header=False)
        assert (status, victim.cookie) == (403, "")


async def test_another_page_opens_no_websocket_with_the_cookie(
    pool: Pool, browser: Browser
) -> None:
    with pytest.raises(WSServerHandshakeError) as caught:
        await browser.session.ws_connect(pool.url + CALLS_PATH, headers=OTHER_SITE)

    assert caught.value.status == 403


async def test_an_allowed_page_needs_a_key_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = "https://chat.example"
    async with (
        besieged(tmp_path, caplog, allowed_origin=(page,)) as pool,
        browsing(pool.url) as browser,
    ):
        await browser.sign_in()
        async with browser.session.get(
            pool.url + NAMES, headers={"Origin": page, "Sec-Fetch-Site": "cross-site"}
        ) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Credentials" not in response.headers


async def test_open_loopback_gives_another_page_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog, open_loopback=True) as pool:
        async with browsing(pool.url) as browser:
            await browser.sign_in()
            for says in other_pages(pool):
                assert (await browser.send("GET", SESSION, headers=says))[0] == 403
        async with browsing(pool.url) as browser:
            for says in other_pages(pool):
                assert (await browser.send("GET", SESSION, headers=says))[0] == 401


async def test_a_revoked_key_ends_its_sessions(pool: Pool) -> None:
    key = await make_key(pool, "ada", scope="admin")
    async with browsing(pool.url) as browser, browsing(pool.url) as other:
        await browser.sign_in(key)
        _, link = await browser.send("POST", LINKS)
        await other.sign_in(key)

        assert (await request(pool, "DELETE", f"{NAMES}/ada"))[0] == 200

        assert [await each.status() for each in (browser, other)] == [401, 401]
        body = {"code": link["url"].partition("#signin=")[2]}
        assert (await other.send("POST", SESSION, body))[0] == 401
        assert (await other.send("POST", SESSION, {"api_key": key}))[0] == 401
        # A new key of the same name is another one.
        await make_key(pool, "ada", scope="admin")
        assert [await each.status() for each in (browser, other)] == [401, 401]


async def test_a_monitor_in_a_browser_changes_nothing(pool: Pool) -> None:
    key = await make_key(pool, "wall", scope="monitor")
    async with browsing(pool.url) as browser:
        await browser.sign_in(key)

        assert await browser.status(NAMES) == 200
        for method, path in (
            ("POST", NAMES),
            ("POST", LINKS),
            ("GET", "/admin/join"),
            ("DELETE", "/v1/jobs/x"),
            ("POST", "/v1/chat/completions"),
        ):
            assert (await browser.send(method, path, {"name": "x"}))[0] == 403


@pytest.mark.parametrize("guesses", some_long([40, 400], short=1))
async def test_guessed_codes_are_throttled(
    guesses: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        besieged(tmp_path, caplog, trusted_proxy=("127.0.0.1",)) as pool,
        browsing(pool.url) as guesser,
    ):
        _, link = await request(pool, "POST", LINKS)
        code = link["url"].partition("#signin=")[2]
        elsewhere = {"X-Forwarded-For": "192.0.2.1"}
        answers = [
            (
                await guesser.send(
                    "POST", SESSION, {"code": f"{guess:040x}"}, headers=elsewhere
                )
            )[0]
            for guess in range(guesses)
        ]

        assert answers == [401] * 10 + [429] * (guesses - 10)
        right = {"code": code}
        refused, _ = await guesser.send("POST", SESSION, right, headers=elsewhere)
        assert refused == 429
        # Others sign in, and the refused code is not spent.
        assert (await guesser.send("POST", SESSION, right))[0] == 200


async def test_guessed_keys_count_like_those_of_a_header(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = {"X-Forwarded-For": "192.0.2.1"}
    async with (
        besieged(tmp_path, caplog, trusted_proxy=("127.0.0.1",)) as pool,
        browsing(pool.url) as guesser,
    ):
        for guess in range(10):
            body = {"api_key": f"sk-{guess}"}
            assert (await guesser.send("POST", SESSION, body, headers=elsewhere))[
                0
            ] == 401

        async with pool.session.get(
            f"{pool.url}/v1/models", headers=pool.headers() | elsewhere
        ) as response:
            assert response.status == 429


async def test_cookies_of_strangers_admit_nobody(pool: Pool) -> None:
    name = f"shoal-session-{port_of(pool)}"
    for cookie in (
        f"{name}=",
        f"{name}={'0' * 40}",
        f"{name}={KEY}",
        f"__Host-{name}={'f' * 40}; {name}={'0' * 40}",
        f'{name}=\\"; {name}',
        f"{name}={'x' * 4000}",
        ";;;=;",
        "\xff\xfe=1",
    ):
        assert await status_with(pool.url, cookie) == 401


async def test_no_path_leads_out_of_the_dashboard(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for path in (
        "/dashboard/../gateway/app.py",
        "/dashboard/..%2fgateway%2fapp.py",
        "/dashboard/%2e%2e/gateway/app.py",
        "/dashboard/%2e%2e%2f%2e%2e%2fshoal/__init__.py",
        "/dashboard/..\\gateway\\app.py",
        "/dashboard/..%5cgateway%5capp.py",
        "/dashboard//etc/passwd",
        "/dashboard/%2fetc%2fpasswd",
        "/dashboard/views/../../gateway/app.py",
        "/dashboard/index.html%00.js",
        "/dashboard/%252e%252e/gateway/app.py",
        "/dashboard/.",
        "/dashboard/",
    ):
        async with wire(pool) as raw:
            head = (
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            )
            await raw.send(head.encode())
            answer = await raw.rest()
        with subtests.test(path=path):
            assert answer.split()[1] in (b"400", b"404")
            assert b"import" not in answer
            assert b"root:" not in answer


@pytest.mark.parametrize("tls", ["off", "auto"])
async def test_cookie_is_for_this_coordinators_pages_alone(
    tmp_path: Path, tls: str
) -> None:
    config = ServeConfig(port=0, data_dir=tmp_path, no_discovery=True, tls=tls)
    async with run_coordinator(config) as running, browsing(running.url) as browser:
        async with browser.session.post(
            running.url + SESSION,
            json={"api_key": running.api_key},
            headers={"Origin": running.url, "x-shoal-page": "1"},
            ssl=False,  # the authority is none of the system's
        ) as response:
            assert response.status == 200
            set_cookie = response.headers["Set-Cookie"]
        ((name, cookie),) = SimpleCookie(set_cookie).items()
        port = running.port
        async with (
            browsing(running.url) as other,
            other.session.get(
                running.url + SESSION,
                headers={"Cookie": f"shoal-session-{port}={cookie.value}"},
                ssl=False,
            ) as response,
        ):
            plain = response.status

    secure = tls == "auto"
    assert name == f"{'__Host-' if secure else ''}shoal-session-{port}"
    assert bool(cookie["secure"]) == secure
    assert cookie["httponly"] is True
    assert cookie["samesite"] == "Strict"
    assert (cookie["path"], cookie["domain"]) == ("/", "")
    assert 0 < int(cookie["max-age"]) <= 7 * 86_400
    # Under TLS, one that any page of the network can set is none.
    assert plain == (401 if secure else 200)


async def test_cookie_is_for_https_behind_a_proxy_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = {"Host": "pool.example", "Origin": "https://pool.example"}
    async with (
        besieged(tmp_path, caplog, allowed_host=("pool.example",)) as pool,
        pool.session.post(
            pool.url + SESSION,
            json={"api_key": KEY},
            headers=site | {"x-shoal-page": "1"},
        ) as response,
    ):
        cookie = response.headers["Set-Cookie"]

    assert cookie.startswith("__Host-shoal-session=")
    assert "Secure" in cookie


def contents(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.glob("shoal.db*"))


async def test_codes_and_cookies_are_in_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog) as pool, browsing(pool.url) as browser:
        _, link = await request(pool, "POST", LINKS)
        code = link["url"].partition("#signin=")[2]
        await browser.send("POST", SESSION, {"code": code})
        value = browser.cookie.partition("=")[2]
        assert await browser.status(NAMES) == 200
    files = await asyncio.to_thread(contents, tmp_path)

    assert len(value) == 40
    for secret in (code, value):
        assert secret not in caplog.text
        assert secret.encode() not in files
    assert digest_of(value) in files
