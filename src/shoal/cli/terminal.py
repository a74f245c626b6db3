"""Output of commands: JSON, tables, and peers' texts without control characters."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

if TYPE_CHECKING:
    from rich.console import Console

Columns: TypeAlias = Mapping[str, "str | Callable[[Any], object]"]
"""A table's columns: of each its head, and the field of a row, or what returns it."""

IDS = ("ID", "JOB")  # the heads of columns of ids

UNLIMITED = 1 << 16  # columns where no terminal has an edge

_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
} | {
    # They change the order in which a terminal shows a line (UAX 9, section 2).
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


_LONG_ID = re.compile(r"[0-9a-f]{32,}")


def shortened(text: str) -> str:
    """Return a text in which ids of 32 digits and more are cut to eight."""
    return _LONG_ID.sub(lambda found: f"{found[0][:8]}…", text)


def printable(text: str) -> str:
    """Escape control and direction characters, which texts from peers may contain."""
    return text.translate(_CONTROLS)


def console(*, stderr: bool = False) -> "Console":
    """Return what prints to the terminal in colour; elsewhere lines of any length."""
    from rich.console import Console  # most commands print plain lines

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else UNLIMITED
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def show(answer: object, as_json: bool, *lines: str) -> None:
    """Print an answer as JSON, or else as lines for people."""
    for line in [json.dumps(answer)] if as_json else lines:
        click.echo(line)


def show_table(
    answer: object,
    as_json: bool,
    columns: Columns,
    rows: Iterable[Any],
    nothing: str = "",
) -> None:
    """Print an answer as JSON, or else as a table; without rows, print ``nothing``."""
    rows = list(rows)
    show(answer, as_json, *(table(columns, rows) if rows or not nothing else [nothing]))


def show_page(
    found: Mapping[str, Any], as_json: bool, columns: Columns, nothing: str
) -> None:
    """Print a page of a list, the newest first, and how to get the next."""
    if found["data"] or found["next"] is None or as_json:
        show_table(found, as_json, columns, found["data"], nothing)
    if found["next"] is not None and not as_json:
        click.echo(f"older ones: --before {found['next']}", err=True)


def table(columns: Columns, rows: Iterable[Any], *, wrap: bool = True) -> list[str]:
    """Return the lines of a table, with control characters escaped.

    On a terminal, long cells are folded into its width, but ids, which people copy;
    without ``wrap``, cells are cut, so that each row is one line.
    """
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in columns:
        overflow: Literal["fold", "ellipsis"] = "fold" if wrap else "ellipsis"
        shown.add_column(head, no_wrap=not wrap or head in IDS, overflow=overflow)
    for row in rows:
        cells = (
            str(row[cell] if isinstance(cell, str) else cell(row))
            for cell in columns.values()
        )
        shown.add_row(*(Text(printable(cell).replace("\n", "\\n")) for cell in cells))
    printed = console()
    with printed.capture() as captured:
        printed.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


@contextmanager
def transfer_progress(
    text: str, size: int | None = None, *, hidden: bool
) -> Iterator[Callable[..., None]]:
    """Show the progress of a transfer within the block, on a terminal.

    The yielded function is ``rich``'s ``Progress.update``, of this transfer: it takes
    what is ``completed`` or an ``advance``, and a ``total``, in bytes.
    """
    from rich.progress import (  # late: most output has no progress
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    shown = console(stderr=True)
    columns = (
        *([TextColumn("{task.description}", markup=False)] if text else []),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = hidden or not shown.is_terminal
    with Progress(*columns, console=shown, transient=True, disable=hidden) as progress:
        yield partial(progress.update, progress.add_task(text, total=size))


def format_day(at: float | None) -> str:
    """Return a Unix time as date and minute in UTC; empty for None."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%MZ}"


def format_age(seconds: float) -> str:
    """Return a duration in its largest unit, such as ``3 h``."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_peer(name: str, id_: str) -> str:
    """Return what a peer calls itself, then its id; the id alone if that has the name.

    ``name`` is empty if it is unknown.
    """
    return id_ if not name or name in id_ else f"{name} ({id_})"
