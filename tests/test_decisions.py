"""Decision pages have numbers of their own, in the file's name and in the title."""

import re
from pathlib import Path

PAGES = sorted((Path(__file__).parent.parent / "docs" / "decisions").glob("*.md"))


def test_each_number_stands_for_one_decision() -> None:
    numbers = [int(page.name[:4]) for page in PAGES]

    assert numbers == list(range(1, len(PAGES) + 1))


def test_the_title_has_the_number_of_the_file() -> None:
    for page in PAGES:
        title = page.read_text("utf-8").splitlines()[0]

        assert re.match(rf"# {int(page.name[:4])}\. ", title), page.name
