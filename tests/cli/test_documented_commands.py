"""The commands that the documents show exist, with the options that they are given."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shoal.cli.main import shoal

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "decisions" not in page.relative_to(ROOT).parts
]
ELLIPSES = {"…", "..."}
FENCES = re.MULTILINE | re.DOTALL
# Where options end that are the command's own.
FOREIGN = {"train", "service"}
# What is signed or sent begins like a command.
SIGNED = {"receipt", "dispatch", "noise", "tealenet", "token"}


def shown_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line in the blocks of a page."""
    inside = False
    for line in page.read_text("utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            continue
        text = line.strip().removeprefix("$ ")
        if not (inside or line.startswith("    ")) or not text.startswith("shoal "):
            continue
        text = re.split(r"\s+#|\s+&&|\s+\"\$\(|\s+\||\s+>", text)[0]
        yield shlex.split(text.rstrip("\\"), posix=True)[1:]


def mentioned_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the text of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=FENCES)
    for mention in re.findall(r"`(shoal [^`]+)`", text):
        try:
            yield shlex.split(mention.replace("\\|", "|"))[1:]
        except ValueError as error:
            raise AssertionError(f"{page.name}: {mention}") from error


def check_command(words: list[str]) -> None:
    """Fail unless the words name a command, and options of it."""
    command: click.Command = shoal
    context = click.Context(shoal, info_name="shoal")
    rest = list(words)
    while isinstance(command, click.Group) and rest and rest[0] not in ELLIPSES:
        if rest[0].startswith("-"):
            break
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, words
        command = found
        context = click.Context(found, info_name=name, parent=context)
    known = {
        option
        for each in command.get_params(context)
        for option in (*each.opts, *each.secondary_opts)
    }
    for word in rest:
        if word == "--":
            return
        if word.startswith("--"):
            assert word.partition("=")[0] in known, (words, word)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_commands_exist(page: Path) -> None:
    for words in shown_commands(page):
        if words and words[0] not in FOREIGN | ELLIPSES | {"COMMAND"}:
            check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mentioned_commands_exist(page: Path) -> None:
    for words in mentioned_commands(page):
        if words and words[0] not in FOREIGN | SIGNED | ELLIPSES | {"COMMAND"}:
            check_command(words)


def test_commands_are_found_in_the_pages() -> None:
    assert sum(len([*shown_commands(page)]) for page in PAGES) > 60


@pytest.mark.parametrize("line", ["swim", "keys make x", "keys create x --speed 5"])
def test_other_commands_are_noticed(line: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check_command(shlex.split(line))
