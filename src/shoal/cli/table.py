"""Tables for people: columns as wide as their widest cell."""

from collections.abc import Sequence
from datetime import UTC, datetime

from shoal.cli.terminal import shown


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their head; what would move the cursor is spelt out."""
    cells = [
        [shown(cell).replace("\n", "\\n") for cell in row] for row in (head, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def day(at: float | None) -> str:
    """Return a Unix time as a day and minute in UTC; nothing for None."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%MZ}"
