"""The README, the quick start and the guides, run as they stand (``page_runner``)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.documents import ROOT, Block, blocks_of
from live.page_runner import PageRunner

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "quick-start.md",
    DOCS / "upgrade.md",
    *sorted((DOCS / "guides").glob("*.md")),
]
BEFORE = {DOCS / "upgrade.md": "shoal serve"}
"""What runs already when a page begins."""
RUN = ("sh", "python")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[PageRunner]:
    runner = PageRunner(tmp_path)
    yield runner
    runner.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_as_it_stands(page: Path, runner: PageRunner) -> None:
    if page in BEFORE:
        runner.run(Block(page, 0, "sh", BEFORE[page], ""))
    for block in blocks_of(page):
        if block.language in RUN and not block.not_run:
            printed = runner.run(block)
            assert not _missing(block.code, printed), f"{block.place}:\n{printed}"


JOBS = DOCS / "jobs.md"
CURL = (
    "curl -s -H \"Authorization: Bearer $KEY\" -H 'Content-Type: application/json' "
    "http://127.0.0.1:4010/v1/jobs/"
)
SHOWN = ("$URL/", "shoal quote", "import os", "shoal receipts")
"""What the blocks about jobs on that page have."""


def test_jobs_are_submitted_as_the_page_shows(runner: PageRunner) -> None:
    for line in ("shoal serve", "shoal join --wire dispatch"):
        runner.run(Block(JOBS, 0, "sh", line, ""))
    shown = [
        block
        for block in blocks_of(JOBS)
        if block.language in RUN and any(each in block.code for each in SHOWN)
    ]
    assert shown

    for block in shown:
        printed = runner.run(block)
        assert '"error"' not in printed, f"{block.place}:\n{printed}"


def test_function_is_called_as_the_page_shows(runner: PageRunner) -> None:
    blocks = iter(blocks_of(DOCS / "guides" / "python.md"))
    while not runner.run(next(blocks)).startswith("9\n"):
        pass  # until the worker is there
    (task,) = (each.code for each in blocks_of(JOBS) if '"mytasks.square"' in each.code)

    for line in (f"{CURL}commit/fast -d '{task}'", f"{CURL}JOB?wait=30"):
        printed = runner.run(Block(JOBS, 0, "sh", line, ""))

    assert json.loads(printed)["result"] == 9, printed


def _missing(code: str, printed: str) -> list[str]:
    """Return what the comments of a program promise and it does not print."""
    promised = [
        line.partition("  # ")[2]
        for line in code.splitlines()
        if line.lstrip().startswith("print(") and "  # " in line
    ]
    return [each for each in promised if each not in printed.splitlines()]
