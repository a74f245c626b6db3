"""Flags made from configurations, so that each setting is declared once."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.config.loading import USER_FILE, flag, variable


def add_config(
    parser: argparse.ArgumentParser, config: type[Any], section: str
) -> None:
    """Add a flag for each field of ``config``."""
    group = parser.add_argument_group(section)
    for each in fields(config):
        help_ = each.metadata.get("help", "")
        default = f" (default: {each.default})" if _worth_showing(each.default) else ""
        last_word = each.name.split("_")[-1].upper()
        form: dict[str, Any] = {"metavar": each.metadata.get("metavar") or last_word}
        if isinstance(each.default, bool):
            form = {"action": argparse.BooleanOptionalAction}
            if each.name.startswith("no_"):  # there is no --no-no-…
                form = {"action": "store_const", "const": True}
        if isinstance(each.default, tuple):
            form["action"] = "append"
        group.add_argument(
            flag(section, each),
            dest=destination(section, each.name),
            help=f"{help_}{default} [{variable(section, each)}]".replace("%", "%%"),
            **form,
        )


def given(args: argparse.Namespace, config: type[Any], section: str) -> dict[str, Any]:
    """Return what was given on the command line for ``config``, by field name."""
    return {
        each.name: getattr(args, destination(section, each.name))
        for each in fields(config)
    }


def destination(section: str, name: str) -> str:
    return f"{section}.{name}"


def add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=USER_FILE,
        metavar="FILE",
        help="a TOML file with a table for each group (default: %(default)s)",
    )


def _worth_showing(default: object) -> bool:
    shown = isinstance(default, (str, int, float, Path)) and not isinstance(
        default, bool
    )
    return shown and default != ""
