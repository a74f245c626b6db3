"""The blocks of code on the pages, with what a comment before a block says of it."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code; ``mark`` is what the comment before it says, or is empty."""

    page: Path
    line: int
    language: str
    code: str
    mark: str

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why no test runs it; empty if one does."""
        return self._mark("not run")

    @property
    def background(self) -> str:
        """What it prints when it is ready, if it goes on running; else empty."""
        first = self.code.split()[:2]
        if first == ["shoal", "serve"]:
            return "Shoal is ready"
        if first == ["shoal", "join"]:
            return "joined "
        return self._mark("background")

    @property
    def file(self) -> str:
        """The name of the file that a program says it is, in its first line."""
        named = re.match(r"# (\w+\.py)\n", self.code)
        return named[1] if named and self.language == "python" else ""

    def _mark(self, kind: str) -> str:
        name, _, text = self.mark.partition(": ")
        return text if name == kind else ""


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in order."""
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            textwrap.dedent(found["code"]),
            found["mark"] or "",
        )
