import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import ConfigError
from shoal.domain.moderation import OVERLAP, UNCHECKED_MAX, Moderation
from shoal.domain.outcome import AnswerPiece

LIST = Moderation("badword\n\nfoo.?bar\n")


@pytest.mark.parametrize(
    ("texts", "refused"),
    [
        (["a BadWord b"], True),
        (["foo-bar"], True),
        (["badword", "1", "2", "3"], False),
        (["badword", "2", "3"], True),
        (["bad", "word"], False),
        ([], False),
    ],
)
def test_the_last_three_messages_are_looked_at(texts: list[str], refused: bool) -> None:
    assert LIST.blocks(texts) is refused


def test_empty_lines_match_nothing() -> None:
    assert not Moderation("\n\n").blocks([""])


@pytest.mark.parametrize("line", ["(", "a{2,1}", "a{99999999999999999999}"])
def test_a_line_that_is_no_expression_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        Moderation(f"fine\n{line}")


def test_each_line_stands_for_itself() -> None:
    both = Moderation("(a)x\\1\n(b)y\\1")

    assert both.matches("byb")
    assert not both.matches("bya")


def test_a_piece_that_is_refused_is_not_shown() -> None:
    watch = LIST.moderate_answer()
    pieces = ["x" * 30, "y" * 30, "badword" + "z" * 60, "more"]

    assert watch.filter(pieces) == pieces[:2]
    assert watch.blocked


def test_a_word_cut_in_two_is_found() -> None:
    watch = LIST.moderate_answer()

    assert watch.filter(["z" * 60 + "bad"]) == ["z" * 60 + "bad"]
    assert watch.filter(["word" + "z" * 60]) == []
    assert watch.blocked


def test_a_short_answer_is_looked_at_when_it_ends() -> None:
    watch = LIST.moderate_answer()

    assert watch.filter(["badword"]) == ["badword"]
    assert not watch.blocked
    assert watch.blocks_end()


@given(st.lists(st.text("abdorwBADORW ", max_size=80), max_size=20))
def test_a_word_no_longer_than_the_overlap_is_always_found(pieces: list[str]) -> None:
    watch = Moderation("badword").moderate_answer()

    shown: list[AnswerPiece] = []
    for piece in pieces:
        shown += watch.filter([piece])
        if watch.blocked:
            break
    refused = watch.blocked or watch.blocks_end()

    assert refused is ("badword" in "".join(pieces).lower())
    assert len("badword") <= OVERLAP
    assert pieces[: len(shown)] == shown


def test_the_work_grows_with_the_text_and_not_with_its_square() -> None:
    looked_at = 0

    class Counting(Moderation):
        def matches(self, text: str) -> bool:
            nonlocal looked_at
            looked_at += len(text)
            return False

    watch = Counting("").moderate_answer()
    for _ in range(10_000):
        watch.filter(["abcde"])

    assert looked_at <= 50_000 * (1 + OVERLAP / UNCHECKED_MAX)
