"""Writes the page of all settings, from the classes that declare them."""

import json
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from shoal.cli.local.config import CONFIGS
from shoal.config import USER_DATA
from shoal.config.loader import SECRET_FILE, flag, metavar, variable
from shoal.protocols import discover

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
INTRODUCTION = ROOT / "scripts" / "settings.md.in"
NEXT = "**Next:** [deployment](deployment.md) has a settings file for a server.\n"

TITLES = {
    "serve": "the coordinator",
    "join": "a worker",
    "x402": "payments for jobs",
}


def page() -> str:
    """Return the text of the page."""
    sections = (_section(name) for name in CONFIGS)
    return "\n".join([INTRODUCTION.read_text("utf-8"), *sections, NEXT])


def _section(name: str) -> str:
    protocol = discover().get(name)
    title = protocol.peers if protocol else TITLES[name]
    config: type[Any] = CONFIGS[name]
    lines = [
        f"## `[{name}]`: {title}",
        "",
        "| setting | what it is | default |",
        "|---|---|---|",
        *(_row(name, each) for each in fields(config)),
        "",
    ]
    return "\n".join(lines)


def _row(section: str, each: "Field[Any]") -> str:
    help_ = str(each.metadata["help"]).replace("|", "\\|").replace("<", "&lt;")
    given = flag(section, each)
    if not isinstance(each.default, bool):
        given += f" {metavar(each)}".replace("|", "\\|")
    cells = (
        f"`{each.name}`<br>`{given}`<br>`{variable(section, each)}`",
        f"{help_[:1].upper()}{help_[1:]}",
        ", ".join(_default(each)),
    )
    return f"| {' | '.join(cells)} |"


def _default(each: "Field[Any]") -> Iterator[str]:
    """Yield the default as the settings file has it, and whether it is a secret."""
    match each.default:
        case None:
            pass
        case Path() as value:
            yield "the user's data folder" if value == USER_DATA else f"`{value}`"
        case tuple() as value:
            yield f"`{[*value]}`"
        case value:
            yield f"`{json.dumps(value)}`"
    if each.metadata.get("secret"):
        yield f"secret (`{SECRET_FILE}`)"
