"""Parts of the commands' parsers: actions, flags of settings, durations.

Each setting is declared once, in a configuration, and its flag derived from that.
"""

import argparse
import re
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.config.loader import USER_FILE, flag, variable


def add_action(actions: Any, name: str, does: str) -> argparse.ArgumentParser:
    """Add an action to the parser's ``actions``, for which argparse has no type.

    The description appears in the help of the command and of the action.
    """
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}."
    )
    return action


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_DURATION = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the seconds of a text such as ``12h``.

    Raises ArgumentTypeError, which argparse reports.
    """
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise ArgumentTypeError(f"expected a duration such as 12h or 30d, got {text!r}")
    return int(found[1]) * SECONDS[found[2]]


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
            if each.name.startswith("no_"):  # such a flag needs no negation
                form = {"action": "store_const", "const": True}
        if isinstance(each.default, tuple):
            form["action"] = "append"
        group.add_argument(
            flag(section, each),
            dest=destination(section, each.name),
            help=f"{help_}{default} [{variable(section, each)}]".replace("%", "%%"),
            **form,
        )


def given_flags(
    args: argparse.Namespace, config: type[Any], section: str
) -> dict[str, Any]:
    """Return the command line's values for ``config``, by field name."""
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
        help="TOML file with a table for each group of settings (default: %(default)s)",
    )


def _worth_showing(default: object) -> bool:
    shown = isinstance(default, (str, int, float, Path)) and not isinstance(
        default, bool
    )
    return shown and default != ""
