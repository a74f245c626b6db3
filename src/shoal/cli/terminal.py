"""Terminal output: tables, and texts from peers without control characters."""

from collections.abc import Sequence
from datetime import UTC, datetime

_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Escape control characters, which texts from peers may contain."""
    return text.translate(_CONTROLS)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their head, with control characters escaped."""
    cells = [
        [printable(cell).replace("\n", "\\n") for cell in row] for row in (head, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def format_day(at: float | None) -> str:
    """Return a Unix time as date and minute in UTC; empty for None."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%MZ}"


def format_peer(name: str, id_: str) -> str:
    """Return what a peer calls itself, then its id; the id alone if that has the name.

    ``name`` is empty if it is unknown.
    """
    return id_ if not name or name in id_ else f"{name} ({id_})"
