"""What the parsers of commands have in common."""

import argparse
from argparse import ArgumentTypeError
from dataclasses import dataclass

import pytest

from shoal.cli.arguments import add_config, given_flags, parse_duration
from shoal.config.loader import setting


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
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "5", "d", "0s", "-1d", "1.5h", "1 d", "1D", "1y", "\u0661d", "9" * 10 + "s"],
)
def test_invalid_duration_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="such as 12h or 30d"):
        parse_duration(text)


@dataclass(frozen=True)
class Config:
    """Settings with a negative flag."""

    no_looking: bool = setting("look for nobody", False)
    greeting: bool = setting("greet", True)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_config(parser, Config, "serve")
    return parser


@pytest.mark.parametrize(
    ("flags", "looking", "greeting"),
    [
        ([], None, None),
        (["--no-looking"], True, None),
        (["--no-greeting"], None, False),
        (["--greeting"], None, True),
    ],
)
def test_unset_flags_differ_from_set_ones(
    parser: argparse.ArgumentParser,
    flags: list[str],
    looking: bool | None,
    greeting: bool | None,
) -> None:
    args = parser.parse_args(flags)

    assert given_flags(args, Config, "serve") == {
        "no_looking": looking,
        "greeting": greeting,
    }


def test_negative_flag_has_no_negation(
    parser: argparse.ArgumentParser,
) -> None:
    assert "--no-no-looking" not in parser.format_help()
