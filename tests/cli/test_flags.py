"""Flags made from configurations."""

import argparse
from dataclasses import dataclass

import pytest

from shoal.cli.flags import add_config, given
from shoal.config.loading import setting


@dataclass(frozen=True)
class Config:
    """Settings of which one says no by itself."""

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
def test_what_was_not_given_is_told_from_what_was(
    parser: argparse.ArgumentParser,
    flags: list[str],
    looking: bool | None,
    greeting: bool | None,
) -> None:
    args = parser.parse_args(flags)

    assert given(args, Config, "serve") == {
        "no_looking": looking,
        "greeting": greeting,
    }


def test_a_setting_that_says_no_has_no_second_no(
    parser: argparse.ArgumentParser,
) -> None:
    assert "--no-no-looking" not in parser.format_help()
