"""Plots of what a bench measured, as SVG: a bar for each median, with its spread.

One plot for each unit, for rows of different units have no common axis.  The colours
are those of the text and of the page around it, so that it can be read on a dark and on
a light page.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH = 860  # pixels, as are all lengths
LEFT = 330  # of the labels
RIGHT = 150  # of the values
ROW = 24
BAR = 12
TOP = 46
BOTTOM = 40
LABEL_MAX = 52  # characters
LOGARITHMIC_FROM = 50  # largest by smallest value
TICKS = 5

UNIT = re.compile(r"((CPU )?(m|µ)?s|[kMG]B|%|\w+/s)( (a|to) .*)?")
_NUMBER = r"(-?[\d.,]+(?:e[+-]\d+)?)"
TABLE_ROW = re.compile(
    rf"^\| ([^|]+) \| {_NUMBER} +\| {_NUMBER} to {_NUMBER} +\| \d+ +\|$", re.M
)

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 14px; font-weight: 600; }
.quiet { fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.own { fill: #0969da; }
.other { fill: #8c959f; }
.spread { stroke: #24292f; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .quiet { fill: #9198a1; }
  .grid { stroke: #3d444d; }
  .own { fill: #4493f8; }
  .other { fill: #656c76; }
  .spread { stroke: #e6edf3; }
}
"""

Values = Mapping[str, Sequence[float]]


def plots(name: str, results: Values) -> dict[str, str]:
    """Return the plots of a bench by the names of their files, without the ending."""
    by_unit: dict[str, dict[str, Sequence[float]]] = {}
    for row, values in results.items():
        by_unit.setdefault(unit_of(row), {})[row] = values
    named: dict[str, str] = {}
    for unit, rows in by_unit.items():
        title = f"{name}: {unit}" if unit else name
        plain = unit.lower().replace("µ", "u").replace("%", "percent")
        slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        file = f"{name}-{slug}" if slug else name
        while file in named:
            file += "-2"
        named[file] = plot(title, rows, unit)
    return named


def unit_of(row: str) -> str:
    """Return what a row counts: the text after its last colon, or between commas."""
    if ": " in row:
        return row.rpartition(": ")[2]
    return next((part for part in row.split(", ") if UNIT.fullmatch(part)), row)


def read_table(section: str) -> dict[str, list[float]]:
    """Return the rows of a section's first table: the least, median and most of each.

    So plots can be made of results that a bench has written before.
    """
    found: dict[str, list[float]] = {}
    for row, median, least, most in TABLE_ROW.findall(section):
        values = [float(each.replace(",", "")) for each in (least, median, most)]
        found.setdefault(row.strip(), values)
    return found


def write_plots(folder: Path, name: str, results: Values) -> list[Path]:
    """Write the plots of a bench in place of those it had; return their files."""
    folder.mkdir(exist_ok=True)
    made = plots(name, results)
    # Not those of a bench whose name begins in the same way.
    for old in [*folder.glob(f"{name}.svg"), *folder.glob(f"{name}-*.svg")]:
        old.unlink()
    files = []
    for file, text in made.items():
        path = folder / f"{file}.svg"
        path.write_text(text, "utf-8")
        files.append(path)
    return files


def plot(title: str, rows: Values, unit: str) -> str:
    """Return the plot of rows with a common unit."""
    scale = _Scale([value for values in rows.values() for value in values])
    height = TOP + ROW * len(rows) + BOTTOM
    bottom = height - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        _text(10, 22, title, "title"),
    ]
    for tick in scale.ticks:
        x = scale.x(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{TOP - 8}" '
            f'x2="{x:.1f}" y2="{bottom}"/>'
        )
        parts.append(_text(x, bottom + 15, _short(tick), "quiet", "middle"))
    how = "median, with the least and the most"
    axis = f"{unit} ({how}{', logarithmic' if scale.logarithmic else ''})"
    parts.append(_text(LEFT, bottom + 32, axis.strip(), "quiet"))
    alone = not any(map(_is_own, rows))
    for number, (row, values) in enumerate(rows.items()):
        y = TOP + ROW * number + ROW // 2
        kind = "own" if alone or _is_own(row) else "other"
        parts += _bar(row, values, unit, y, scale, kind)
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """The axis of values: from 0, or logarithmic where they differ much."""

    def __init__(self, values: Sequence[float]) -> None:
        shown = [value for value in values if value > 0]
        self.most = max(shown, default=1.0)
        least = min(shown, default=1.0)
        self.logarithmic = self.most / least >= LOGARITHMIC_FROM
        self.least = 10.0 ** math.floor(math.log10(least)) if self.logarithmic else 0.0

    @property
    def ticks(self) -> list[float]:
        if self.logarithmic:
            first = round(math.log10(self.least))
            return [10.0**power for power in range(first, self._last_power + 1)]
        step = 10.0 ** math.floor(math.log10(self.most / TICKS))
        step *= next(f for f in (1, 2, 5, 10) if f * step * TICKS >= self.most)
        return [number * step for number in range(int(self.most / step) + 1)]

    @property
    def _last_power(self) -> int:
        return math.floor(math.log10(self.most))

    def x(self, value: float) -> float:
        """Return where a value is."""
        if self.logarithmic:
            value = max(value, self.least)
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = value / self.most
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def _bar(
    row: str, values: Sequence[float], unit: str, y: int, scale: _Scale, kind: str
) -> list[str]:
    """Return a row: its label, its bar, its spread and its median."""
    median, least, most = statistics.median(values), min(values), max(values)
    label = row.removesuffix(f": {unit}").replace(f", {unit}", "")
    width = max(1.0, scale.x(median) - LEFT)
    x1, x2 = scale.x(least), scale.x(most)
    return [
        _text(LEFT - 8, y + 4, _cut(label), "", "end"),
        f'<rect class="{kind}" x="{LEFT}" y="{y - BAR // 2}" '
        f'width="{width:.1f}" height="{BAR}" rx="2">'
        f"<title>{escape(row)}: {_short(median)}, {_short(least)} to {_short(most)}"
        "</title></rect>",
        f'<line class="spread" x1="{x1:.1f}" y1="{y}" x2="{x2:.1f}" y2="{y}"/>',
        _text(max(x2, LEFT + width) + 6, y + 4, _short(median), "quiet"),
    ]


def _is_own(row: str) -> bool:
    """Say whether a row is about Shoal, and not about what it is compared with."""
    return row.startswith("shoal")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    place = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}"{named}'
    return f"<text {place}>{escape(text)}</text>"


def _cut(label: str) -> str:
    return label if len(label) <= LABEL_MAX else f"{label[: LABEL_MAX - 1]}…"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
