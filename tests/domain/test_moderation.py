import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import ConfigError
from shoal.domain.moderation import OVERLAP, UNCHECKED_MAX, Moderation
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Rerank,
    Task,
    Transcription,
    Work,
)

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
def test_last_three_messages_are_checked(texts: list[str], refused: bool) -> None:
    assert LIST.blocks(texts) is refused


FIRST_OF_FIVE = ("a badword", "1", "2", "3", "4")


def chat(*texts: str) -> Chat:
    messages: list[dict[str, JSON]] = [{"role": "user", "content": t} for t in texts]
    return Chat("m1", tuple(messages))


@pytest.mark.parametrize(
    ("work", "refused"),
    [
        (chat(*FIRST_OF_FIVE), False),
        (chat("1", "a badword"), True),
        (Completion("m1", "a badword"), True),
        (Completion("m1", FIRST_OF_FIVE), True),
        (Completion("m1", "a", options={"suffix": "a badword"}), True),
        (Completion("m1", [[1], [2]]), False),
        (Embedding("m1", FIRST_OF_FIVE), True),
        (Rerank("m1", "a", FIRST_OF_FIVE), True),
        (Transcription("m1", "", "wav", {"prompt": "a badword"}), True),
        (Task("t", {"a badword": 1}), True),
    ],
)
def test_all_that_work_other_than_chats_gives_is_checked(
    work: Work, refused: bool
) -> None:
    assert LIST.blocks_work(work) is refused


def test_empty_lines_match_nothing() -> None:
    assert not Moderation("\n\n").blocks([""])


@pytest.mark.parametrize("line", ["(", "a{2,1}", "a{99999999999999999999}"])
def test_invalid_expression_is_named_by_its_line(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        Moderation(f"fine\n{line}")


def test_lines_are_separate_expressions() -> None:
    both = Moderation("(a)x\\1\n(b)y\\1")

    assert both.matches("byb")
    assert not both.matches("bya")


def test_rejected_piece_is_not_sent() -> None:
    watch = LIST.moderate_answer()
    pieces = ["x" * 30, "y" * 30, "badword" + "z" * 60, "more"]

    assert watch.filter(pieces) == pieces[:2]
    assert watch.blocked


def test_split_word_is_found() -> None:
    watch = LIST.moderate_answer()

    assert watch.filter(["z" * 60 + "bad"]) == ["z" * 60 + "bad"]
    assert watch.filter(["word" + "z" * 60]) == []
    assert watch.blocked


def test_short_answer_is_checked_at_its_end() -> None:
    watch = LIST.moderate_answer()

    assert watch.filter(["badword"]) == ["badword"]
    assert not watch.blocked
    assert watch.blocks_end()


@given(st.lists(st.text("abdorwBADORW ", max_size=80), max_size=20))
def test_word_within_the_overlap_is_always_found(pieces: list[str]) -> None:
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


def test_cost_is_linear_in_the_text() -> None:
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
