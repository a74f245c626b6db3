"""Write the manual pages of all commands, from their help: ``shoal.1`` and others.

python scripts/write_man.py build/man
"""

import re
import sys
from inspect import cleandoc
from pathlib import Path

import click
from click_man.core import write_man_pages

from shoal import __version__
from shoal.cli.main import shoal

REFERENCE = re.compile(r"(?<=See \\fB)[^(]+(?=\(1\))")
"""The name of another page, which click-man writes as `shoal keys-create`."""


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    write_pages(folder)
    print(f"wrote {len([*folder.iterdir()])} pages: man {folder / 'shoal.1'}")


def write_pages(folder: Path) -> None:
    """Write one page a command into a folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    command = _imported(shoal, click.Context(shoal, info_name="shoal"))
    write_man_pages("shoal", command, version=__version__, target_dir=str(folder))
    for page in folder.iterdir():
        # Default folders are those of the reader.
        text = page.read_text().replace(str(Path.home()), "~")
        page.write_text(REFERENCE.sub(lambda found: found[0].replace(" ", "-"), text))


def _imported(command: click.Command, context: click.Context) -> click.Command:
    """Return a command as click-man reads it.

    Groups have all their commands, which else are imported only when they run, and the
    whole first paragraph of a help is its short form.
    """
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.short_help = paragraphs[0].replace("\n", " ")
    arguments = [
        f"{each.make_metavar(context)}: {each.help}"
        for each in command.params
        if isinstance(each, click.Argument) and each.help
    ]
    command.help = "\n\n".join([*map(_unfilled, paragraphs), *arguments])
    if not isinstance(command, click.Group):
        return command
    commands = {
        name: _imported(found, click.Context(found, context, name))
        for name in command.list_commands(context)
        if (found := command.get_command(context, name)) is not None
    }
    return click.Group(
        command.name,
        commands,
        help=command.help,
        short_help=command.short_help,
        params=command.params,
    )


def _unfilled(paragraph: str) -> str:
    """Return a paragraph whose lines stay as they are, if click's mark says so."""
    lines = paragraph.removeprefix("\b\n")
    return paragraph if lines == paragraph else f".nf\n{lines}\n.fi"


if __name__ == "__main__":
    main()
