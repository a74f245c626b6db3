"""The table of the page of clients, beside what it refers to."""

from pathlib import Path

import pytest

from clients import page
from clients.page import Snippet

TESTS = Path(__file__).parents[1]


def test_each_client_has_a_section_and_says_who_tries_it() -> None:
    with_snippets = {snippet.section for snippet in page.snippets()}

    assert [row.section for row in page.rows()] == page.anchors()
    for row in page.rows():
        snippets = "its snippets" in row.tried_by
        assert snippets == (row.section in with_snippets), row.section
        assert all((TESTS / file).exists() for file in row.files), row.files
        others = ("by hand, ", " only")
        assert snippets or row.files or any(w in row.tried_by for w in others)


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        ("Paris.\n", True),
        ("Paris.\n\n", True),
        ("Paris", False),
        ("In Paris.\n", False),
        ("Paris.\nParis.\n", False),
    ],
)
def test_output_is_compared_as_a_whole(output: str, printed: bool) -> None:
    assert Snippet("", "js", "console.log(a); // → Paris.\n").printed(output) == (
        printed
    )
