"""``shoal join-line``: the command that adds a machine, once more."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from shoal.app.server import RunningCoordinator, run_coordinator
from shoal.cli.main import main
from shoal.config import ServeConfig

TOKEN = "9f2c71d4e8a6b03597c1d5e2"
EVERYWHERE = "0.0.0.0"


def config(folder: Path, host: str, **others: str) -> ServeConfig:
    return ServeConfig(host, 0, data_dir=folder, no_discovery=True, **others)  # type: ignore[arg-type]  # texts


async def join_line(folder: Path, *flags: str) -> int:
    command = ["join-line", "--data-dir", str(folder), *flags]
    return await asyncio.to_thread(main, command)


def url_of(running: RunningCoordinator) -> str:
    return f"http://{EVERYWHERE}:{running.port}"


@pytest.mark.parametrize("tls", ["off", "auto"])
async def test_command_is_that_of_the_announcement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tls: str
) -> None:
    async with run_coordinator(config(tmp_path, EVERYWHERE, tls=tls)) as running:
        assert await join_line(tmp_path) == 0
        command = await running.invite()

    printed = capsys.readouterr()
    assert printed.out == command + "\n"
    assert "serve" not in printed.err
    assert ("https://" in printed.out) is (".sha256-" in printed.out) is (tls == "auto")


async def test_loopback_is_told_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = config(tmp_path, "127.0.0.1", join_token="")
    async with run_coordinator(serve) as running:
        assert await join_line(tmp_path) == 0

    printed = capsys.readouterr()
    assert printed.out == f"shoal join {running.url}\n"
    assert "shoal serve --host 0.0.0.0 --tls auto" in printed.err


async def test_command_is_drawn_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path, EVERYWHERE)) as running:
        assert await join_line(tmp_path, "--qr") == 0
        command = await running.invite()

    printed = capsys.readouterr()
    assert printed.out == command + "\n"
    assert "█▀▀▀▀▀█" in printed.err or "▄▄▄▄▄" in printed.err


async def test_command_that_is_too_long_to_be_drawn_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = config(tmp_path, "127.0.0.1", join_token="x" * 3000)
    async with run_coordinator(serve) as running:
        assert await join_line(tmp_path, "--qr") == 0
        command = await running.invite()

    printed = capsys.readouterr()
    assert printed.out == command + "\n"
    assert printed.err.startswith("The command is too long for a QR code.\n")


async def test_token_is_quoted_for_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = config(tmp_path, "127.0.0.1", join_token="two words; and 'more'")
    async with run_coordinator(serve) as running:
        assert await join_line(tmp_path) == 0
        command = await running.invite()

    printed = capsys.readouterr().out
    assert printed == command + "\n"
    assert shlex.split(printed)[-1] == serve.join_token


@pytest.mark.skipif(sys.platform == "win32", reason="0.0.0.0 is no address of a peer")
@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
async def test_given_url_is_an_address_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """Such as that of a proxy or a container, which the coordinator does not know."""
    async with run_coordinator(config(tmp_path, host, join_token=TOKEN)) as running:
        url = url_of(running)
        assert await join_line(tmp_path, "--url", f"{url}/v1", "--json") == 0

    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["join"] == f"shoal join {url} --token {TOKEN}"
    assert shown["urls"][0] == url
    assert running.url in shown["urls"]
    assert shown["loopback_only"] is False
    assert printed.err == ""


async def test_urls_are_listed_beside_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path, EVERYWHERE)) as running:
        assert await join_line(tmp_path, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert await join_line(tmp_path) == 0

    errors = capsys.readouterr().err
    assert shown["urls"][0] == running.url
    assert all(url in errors for url in shown["urls"][1:])
    assert shown["token"] in shown["join"]


async def test_coordinator_that_does_not_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_coordinator(config(tmp_path, "127.0.0.1")) as running:
        pass

    assert await join_line(tmp_path, "--url", running.url) == 1

    assert "is `shoal serve` running there?" in capsys.readouterr().err
