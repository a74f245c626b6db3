"""What the commands' options have in common."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from cli.coordinators import Sites
from shoal.cli.main import main
from shoal.cli.options import DURATION, SettingsCommand, given, setting_options
from shoal.cli.pool.status import PATH
from shoal.client import reconnection
from shoal.domain.settings import setting


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("30d", 2_592_000),
        ("2w", 1_209_600),
        ("007s", 7),
    ],
)
def test_durations_are_parsed(text: str, seconds: int) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "5", "d", "0s", "-1d", "1.5h", "1 d", "1D", "1y", "\u0661d", "9" * 10 + "s"],
)
def test_invalid_duration_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as 12h or 30d"):
        DURATION.convert(text, None, None)


@dataclass(frozen=True)
class Config:
    """Settings of several kinds."""

    no_looking: bool = setting("look for nobody", False)
    greeting: bool = setting("greet", True)
    name: tuple[str, ...] = setting("whom to greet", ())
    volume: int = setting("volume", 3, "DB", everyday=True)


@pytest.fixture
def parse() -> Callable[..., dict[str, object]]:
    """Parses flags of ``Config``; returns those that were given."""

    def parse(*flags: str) -> dict[str, object]:
        found: dict[str, object] = {}

        @click.command(cls=SettingsCommand)
        @setting_options(Config, "serve")
        def command(**values: object) -> None:
            found.update(given(values, Config, "serve"))

        command.main(flags, standalone_mode=False)
        return {name: value for name, value in found.items() if value is not None}

    return parse


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], {}),
        (["--no-looking"], {"no_looking": True}),
        (["--no-greeting"], {"greeting": False}),
        (["--greeting"], {"greeting": True}),
        (["--name", "a", "--name", "b,c"], {"name": ["a", "b,c"]}),
        (["--volume", "0"], {"volume": "0"}),
    ],
)
def test_only_given_flags_have_values(
    parse: Callable[..., dict[str, object]],
    flags: list[str],
    values: dict[str, object],
) -> None:
    assert parse(*flags) == values


def test_negative_flag_has_no_negation(
    parse: Callable[..., dict[str, object]],
) -> None:
    with pytest.raises(click.NoSuchOption):
        parse("--no-no-looking")


def test_help_shows_settings_of_every_day_and_all_on_request() -> None:
    @click.command(cls=SettingsCommand)
    @setting_options(Config, "serve")
    def command(**values: object) -> None:
        """Do it."""

    short = CliRunner().invoke(command, ["--help"]).output
    long = CliRunner().invoke(command, ["--help-all"]).output

    assert "--volume DB" in short
    assert "  --greeting" not in short
    assert short.endswith("by --help-all: --no-looking, --greeting, --name\n")
    assert "serve:" in long
    for flag in ("--volume DB", "--greeting / --no-greeting", "--no-looking"):
        assert flag in long
    assert "[env var: SHOAL_VOLUME; default: 3]" in long.replace("\n", " ")


async def test_reason_for_which_a_command_waits_is_escaped(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reconnection, "FIRST_WAIT", 0.1)
    url = await sites({PATH: {"error": "away\x1b[2J"}}, status=502)

    await asyncio.to_thread(main, ["status", "--url", url, "--api-key", "sk-test"])

    errors = capsys.readouterr().err
    assert r"away\x1b[2J (trying again for a while)" in errors
    assert "\x1b" not in errors
