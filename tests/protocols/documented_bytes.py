"""Examples of bytes on the pages of the protocols: blocks, named by comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "protocols"


@dataclass(frozen=True, slots=True)
class Example:
    """A block of a page: text as it is sent, or bytes in hexadecimal."""

    wire: str
    name: str
    data: bytes


def examples() -> Iterator[Example]:
    """Yield the examples of all pages."""
    for page in sorted(PAGES.glob("*.md")):
        for name, block in re.findall(
            r"^<!-- bytes: ([a-z ]+) -->\n```\w+\n(.*?)\n```$",
            page.read_text("utf-8"),
            re.MULTILINE | re.DOTALL,
        ):
            yield Example(page.stem, name, _bytes(block))


def _bytes(block: str) -> bytes:
    """Return what a block stands for: a dump of bytes, or the text itself."""
    rows = re.findall(r"^[0-9a-f]{8}  ([0-9a-f ]{48})  \|.{1,16}\|$", block, re.M)
    return bytes.fromhex("".join(rows)) if rows else block.encode()
