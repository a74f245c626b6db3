"""The page of client programs as the tests read it: its snippets, and its table."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"

URL = "http://127.0.0.1:4010"
KEY = "sk-shoal-…"
CHAT_MODEL, TOOL_MODEL, VECTOR_MODEL = "qwen3-8b", "qwen3-vl-8b", "nomic-embed-text"
"""The coordinator, the key and the models that the snippets name."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A section's program, and what its comments say that it prints."""

    section: str
    language: str
    code: str

    @property
    def prints(self) -> list[str]:
        """The lines of its output; ``…`` stands for anything."""
        return re.findall(r"(?:#|//) → (.*)$", self.code, re.MULTILINE)

    def printed(self, output: str) -> bool:
        """Say whether an output is the one that the page promises."""
        lines = (re.escape(line).replace("…", ".*") for line in self.prints)
        end = "\n*" if self.language == "sh" else "\n"  # curl ends no line
        return re.fullmatch(end.join(lines) + "\n*", output, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class Row:
    """A program in the table: the section that it links to, and who tries it."""

    section: str
    tried_by: str

    @property
    def files(self) -> list[str]:
        """The modules of tests that it names."""
        return re.findall(r"`([\w/]+\.py)`", self.tried_by)


def snippets() -> list[Snippet]:
    """Return the snippets that say what they print, in the order of the page."""
    programs = []
    for title, text in _sections():
        code: dict[str, str] = {}
        for language, block in re.findall(
            r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
        ):
            code[language] = code.get(language, "") + block
        programs += [Snippet(_anchor(title), *each) for each in code.items()]
    return [program for program in programs if program.prints]


def anchors() -> list[str]:
    """Return the names by which links refer to the sections."""
    return [_anchor(title) for title, _ in _sections()]


def rows() -> list[Row]:
    """Return the rows of the table."""
    found = re.findall(r"^\| \[[^]]+\]\(#([^)]+)\) \|.*\| (.+) \|$", _text(), re.M)
    return [Row(section, tried_by) for section, tried_by in found]


def _sections() -> list[tuple[str, str]]:
    """Return title and text of each section."""
    _, *sections = re.split(r"^## ", _text(), flags=re.MULTILINE)
    return [(title, text) for title, _, text in (s.partition("\n") for s in sections)]


def _text() -> str:
    return PAGE.read_text("utf-8")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
