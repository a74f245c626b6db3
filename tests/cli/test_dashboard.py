"""``shoal dashboard``: a link that signs in once, opened in the browser."""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.browser import SESSION, browsing
from gateway.keys import make_key
from gateway.serving import serving
from shoal.app.server import run_coordinator
from shoal.cli.main import main
from shoal.cli.pool.invitations import (
    NO_DESKTOP,
    OTHER_USERS,
    has_other_users,
    why_unopened,
)
from shoal.config import ServeConfig


def config(folder: Path, host: str = "127.0.0.1", **others: str) -> ServeConfig:
    return ServeConfig(host, 0, data_dir=folder, no_discovery=True, **others)  # type: ignore[arg-type]  # texts


async def dashboard(folder: Path, *flags: str) -> int:
    command = ["dashboard", "--data-dir", str(folder), *flags]
    return await asyncio.to_thread(main, command)


async def sign_in(link: str, times: int = 1) -> list[int]:
    """Return the statuses of a page that uses a link."""
    url, _, code = link.strip().partition("/#signin=")
    async with browsing(url) as browser:
        return [
            (await browser.send("POST", SESSION, {"code": code}))[0]
            for _ in range(times)
        ]


async def test_link_signs_in_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path)) as running:
        assert await dashboard(tmp_path) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(f"{running.url}/#signin=")
        assert printed.err == ""  # no terminal, no browser

        assert await sign_in(printed.out, 2) == [200, 401]
        # That of the start is another one.
        assert await sign_in(running.dashboard, 2) == [200, 401]


async def test_link_has_the_address_that_was_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path, "0.0.0.0")) as running:
        url = f"http://127.0.0.1:{running.port}"
        assert await dashboard(tmp_path) == 0
        assert await dashboard(tmp_path, "--url", f"{url}/v1", "--json") == 0

    local, given = capsys.readouterr().out.splitlines()
    assert local.startswith(f"{url}/#signin=")
    shown = json.loads(given)
    assert shown.keys() == {"url", "expires_at"}
    assert shown["url"].startswith(f"{url}/#signin=")


async def test_certificate_is_trusted_from_the_data_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path, tls="auto")) as running:
        assert await dashboard(tmp_path, "--no-browser") == 0

    assert capsys.readouterr().out.startswith(
        f"https://127.0.0.1:{running.port}/#signin="
    )


async def test_other_keys_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as pool:
        key = await make_key(pool, "ada", scope="monitor")

        assert await dashboard(tmp_path, "--url", pool.url, "--api-key", key) == 1

    assert "ada has the scope monitor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "display", "others", "reason"),
    [
        ("linux", {}, False, NO_DESKTOP),
        ("linux", {"DISPLAY": ""}, False, NO_DESKTOP),
        ("linux", {"DISPLAY": ":0"}, False, ""),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True, OTHER_USERS),
        ("darwin", {}, False, ""),
        ("darwin", {}, True, OTHER_USERS),
        ("win32", {}, True, ""),
    ],
)
def test_browser_is_opened_where_nobody_else_can_read_its_arguments(
    platform: str, display: dict[str, str], reason: str, *, others: bool
) -> None:
    assert why_unopened(platform, display, lambda: others) == reason


def test_this_machine_can_be_asked() -> None:
    assert has_other_users() in (True, False)
