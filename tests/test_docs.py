"""The pages of the documentation: their numbers, and the files that they name."""

import re
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
MAPS = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "protocols").glob("*.md"))]
"""The pages that say which file answers which question."""

FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


def test_each_number_stands_for_one_decision() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]

    assert len(set(numbers)) == len(numbers)


def test_the_title_has_the_number_of_the_file() -> None:
    for page in DECISIONS:
        title = page.read_text("utf-8").splitlines()[0]

        assert re.match(rf"# {int(page.name[:4])}\. ", title), page.name


def test_each_decision_answers_a_question_of_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")

    assert sorted(re.findall(r"\]\((\d\S+)\)", index)) == [
        page.name for page in DECISIONS
    ]


def test_decision_that_a_later_one_has_replaced_in_part_begins_with_it() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")
    named = re.findall(
        r"\((\d\S+)\), in part replaced|first form: .*\((\d\S+)\)", index
    )

    assert sorted(one or other for one, other in named) == [
        page.name
        for page in DECISIONS
        if page.read_text("utf-8").split("\n")[2].startswith("*Replaced in part")
    ]


def test_newest_release_in_the_changelog_is_this_version() -> None:
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", page, re.M)

    assert sections[0] == ("Unreleased", "")
    assert sections[1][0] == shoal.__version__
    assert all(date for _, date in sections[1:])


def test_a_user_can_read_the_next_release_in_two_minutes() -> None:
    """Details are on the pages, and what an upgrade changes on ``docs/upgrade.md``."""
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased = page.partition("\n## [Unreleased]\n")[2].partition("\n## [")[0]

    assert len(unreleased.split()) <= 500


def test_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_first_minutes_are_a_recording_of_this_version() -> None:
    """``make first-minutes`` records it; what it shows is never written by hand."""
    template = (ROOT / "scripts" / "first_minutes.md.in").read_text("utf-8")
    page = (ROOT / "docs" / "first-minutes.md").read_text("utf-8")
    form = re.sub("@[a-z_]+@", "(.+)", re.escape(template))

    assert re.fullmatch(form, page, re.DOTALL), "run make first-minutes"
    assert f"Shoal {shoal.__version__} at " in page, "run make first-minutes"


def test_links_of_the_first_page_lead_to_files() -> None:
    """The others are followed when the site is built."""
    page = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page)

    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_each_page_ends_with_its_next_step() -> None:
    pages = {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs/decisions").iterdir()}
    ends = {page: page.read_text("utf-8").rpartition("\n\n")[2] for page in pages}

    assert not [page for page in pages if not ends[page].startswith("**Next:** ")]


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_files_that_a_map_names_exist(page: Path) -> None:
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", page.read_text("utf-8")))

    assert not [
        name
        for name in named
        if not any(f"/{file}".endswith(f"/{name}") for file in FILES)
    ]


def test_each_line_of_the_threat_model_names_its_tests() -> None:
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    rows = [
        line.rstrip("|").rpartition("|")[2]
        for line in page.partition("\n## Unauthenticated clients\n")[2].splitlines()
        if line.startswith("| ") and not line.startswith("| threat ")
    ]

    assert len(rows) > 25
    for named in rows:
        found = re.findall(r"`([a-z0-9_/.]+)(?:::(test_\w+))?`", named)
        assert found, named
        for file, test in found:
            path = ROOT / "tests" / file
            assert path.exists(), file
            assert not test or f"def {test}(" in path.read_text("utf-8"), test
