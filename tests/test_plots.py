"""The plots of benches: what they show, and that those of the page exist."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parent.parent / "bench"
RESULTS = {
    "shoal, 1 at once: ms": [1.0, 2.0, 4.0],
    "the <other> one, 1 at once: ms": [10.0, 20.0, 900.0],
    "shoal, MB": [5.0],
    "shoal, 1 at once: CPU µs a job": [0.0, 0.0, 0.0],
}


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import plots  # type: ignore[import-not-found]  # bench/ is no package

    yield plots
    del sys.modules["plots"]


def texts(svg: str) -> list[str]:
    """Return the texts of a plot."""
    return [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.text]


def test_a_plot_for_each_unit_has_all_its_rows(plots: ModuleType) -> None:
    made = plots.plots("tasks", RESULTS)

    assert made.keys() == {"tasks-ms", "tasks-mb", "tasks-cpu-us-a-job"}
    shown = texts(made["tasks-ms"])
    assert {"tasks: ms", "shoal, 1 at once", "the <other> one, 1 at once"} <= {*shown}
    assert {"2", "20"} <= {*shown}  # the medians
    assert "ms (median, with the least and the most, logarithmic)" in shown


def test_a_plot_can_be_read_on_dark_and_light_pages(plots: ModuleType) -> None:
    for each in plots.plots("tasks", RESULTS).values():
        assert "prefers-color-scheme: dark" in each
        assert "viewBox" in each


def test_the_page_shows_a_plot_of_each_table(plots: ModuleType) -> None:
    page = (BENCH / "RESULTS.md").read_text("utf-8")
    files = {path.name for path in (BENCH / "plots").glob("*.svg")}

    assert {*re.findall(r"!\[.*\]\(plots/(.*)\)", page)} == files
    for section in re.split(r"(?m)^(?=## )", page)[1:]:
        name = section.split("\n", 1)[0].removeprefix("## ")
        rows = plots.read_table(section)
        assert rows, name
        for file, text in plots.plots(name, rows).items():
            path = BENCH / "plots" / f"{file}.svg"
            assert path.read_text("utf-8") == text, "make bench wrote another one"
