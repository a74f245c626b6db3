"""What a bench found: tables of what was measured and how it stands to the goals."""

import datetime
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import plots

Results: TypeAlias = dict[str, list[float]]
"""The values of each row, one for each round, in the order of the rounds."""

PAGE = Path(__file__).parent / "RESULTS.md"
PREFACE = """# Results

The latest run of each bench, as `make bench NAME=… WRITE=1` wrote it.  Machines are
shared and noisy: ratios within a run count, and CPU time more than wall time.  A plot
has a bar for each median, and a line from the least to the most.
"""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row is to reach, alone or as a multiple of another row; or only that."""

    row: str
    per: str = ""
    at_most: float = math.inf
    at_least: float = -math.inf

    def __str__(self) -> str:
        if self.at_most < math.inf:
            return f"≤ {_short(self.at_most)}"
        return f"≥ {_short(self.at_least)}" if self.at_least > -math.inf else ""

    def values(self, results: Results) -> list[float]:
        """Return the row's values, divided by the other's of the same round."""
        values = results[self.row]
        if not self.per:
            return values
        return [a / b for a, b in zip(values, results[self.per], strict=True)]

    def verdict(self, value: float) -> str:
        """Say whether ``value`` is what was to be reached; nothing if none was."""
        reached = self.at_least <= value <= self.at_most
        return ("yes" if reached else "no") if str(self) else ""


def tables(results: Results, goals: Sequence[Goal]) -> str:
    """Return what was measured, and how it stands to the goals."""
    measured = [(row, *_summary(values)) for row, values in results.items()]
    text = _table(("measured", "median", "spread", "runs"), measured)
    against = [_standing(goal, goal.values(results)) for goal in goals]
    heads = ("compared", "as a multiple of", "median", "spread", "goal", "reached")
    return f"{text}\n{_table(heads, against)}"


def line(name: str, results: Results) -> str:
    """Return everything as one line of JSON."""
    medians = {row: statistics.median(values) for row, values in results.items()}
    return json.dumps(
        {
            "bench": name,
            "python": platform.python_version(),
            "median": medians,
            "values": results,
        }
    )


def write(name: str, about: str, text: str) -> None:
    """Put a bench's section into the page, with its plots, for the one it had."""
    page = PAGE.read_text() if PAGE.exists() else PREFACE
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    section = (
        f"## {name}\n\n{today}, {machine}, Python {platform.python_version()}: "
        f"`make bench NAME={name}`\n\n{about.strip()}\n\n{text}"
    )
    section = with_plots(section, name)
    # The preface, then the sections, each with its heading.
    parts = re.split(r"(?m)^(?=## )", page)
    kept = {each.split("\n", 1)[0]: each.strip() for each in parts[1:]}
    kept[f"## {name}"] = section.strip()
    body = "\n\n".join(kept[heading] for heading in sorted(kept))
    PAGE.write_text(f"{parts[0].strip()}\n\n{body}\n")


def plot_page() -> None:
    """Make the plots of all results on the page, from its tables."""
    parts = re.split(r"(?m)^(?=## )", PAGE.read_text("utf-8"))
    sections = []
    for each in parts[1:]:
        name = each.split("\n", 1)[0].removeprefix("## ").strip()
        sections.append(with_plots(each, name))
    PAGE.write_text("\n\n".join([parts[0].strip(), *sections]) + "\n", "utf-8")


def with_plots(section: str, name: str) -> str:
    """Plot the table of a bench's section; return it with these plots alone."""
    text = re.sub(r"(?m)^!\[.*\]\(plots/.*\)\n?", "", section).strip()
    files = plots.write_plots(PAGE.parent / "plots", name, plots.read_table(section))
    shown = [f"![{file.stem}](plots/{file.name})" for file in files]
    return "\n\n".join([text, *shown])


def _summary(values: list[float]) -> tuple[str, str, str]:
    spread = f"{_short(min(values))} to {_short(max(values))}"
    return _short(statistics.median(values)), spread, str(len(values))


def _standing(goal: Goal, values: list[float]) -> tuple[str, ...]:
    median, spread, _ = _summary(values)
    peer = goal.per.partition(",")[0]  # the rest is as in the goal's own row
    verdict = goal.verdict(statistics.median(values))
    return goal.row, peer, median, spread, str(goal), verdict


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns line up."""
    rule = ["-" * 3 for _ in heads]
    lines = [heads, rule, *rows]
    widths = [max(len(cells[at]) for cells in lines) for at in range(len(heads))]
    return "".join(
        "| " + " | ".join(map(str.ljust, cells, widths)) + " |\n" for cells in lines
    )
