"""Characters that are cut between the pieces of a text."""

import pytest

from shoal.domain.outcome import Delta
from shoal.domain.work import JSON
from shoal.engines.streams.json_values import HalfCharacters, without_halves

BYTES = "🐀".encode().decode("ascii", "surrogateescape")


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["abc", "é🐀"], ["abc", "é🐀"]),
        (["a\ud83d", "\udc00b"], ["a", "🐀b"]),
        (["a\ud83d", "b"], ["a", "\ufffdb"]),
        (["a\ud83d", "\ud83d", "\udc00"], ["a", "\ufffd", "🐀"]),
        (["\udc00a\ud83d\udc00"], ["\ufffda🐀"]),
        (["a" + BYTES[:1], BYTES[1:3], BYTES[3:] + "b"], ["a", "", "🐀b"]),
        ([BYTES + BYTES[:2], BYTES[2:]], ["🐀", "🐀"]),
        (["a" + BYTES[:2], "b"], ["a", "\ufffdb"]),
        (["a" + BYTES[1:]], ["a\ufffd\ufffd\ufffd"]),
    ],
)
def test_halves_are_joined_with_the_next_piece(
    pieces: list[str], texts: list[str]
) -> None:
    halves = HalfCharacters()

    assert [halves.join((0, "content", 0), piece) for piece in pieces] == texts
    assert not halves.pending


def test_texts_are_told_apart_and_halves_that_are_left_are_replaced() -> None:
    halves = HalfCharacters()
    call: JSON = {"index": 1, "function": {"arguments": "{\ud83d"}}

    for choice in range(2):
        assert halves.join_fields(choice, {"content": "\ud83d"}) == {}
    assert halves.join_fields(0, {"content": "\udc00", "odd": "\udc00"}) == {
        "content": "🐀",
        "odd": "\ufffd",
    }
    assert halves.join_fields(0, {"tool_calls": [call]}) == {
        "tool_calls": [{"index": 1, "function": {"arguments": "{"}}]
    }

    rest: JSON = {"index": 1, "function": {"arguments": "\ufffd"}}
    assert halves.drain() == [
        Delta(1, {"content": "\ufffd"}),
        Delta(0, {"tool_calls": [rest]}),
    ]
    assert not halves.pending
    assert halves.join((0, "content", 0), "a\ud83d") == "a"
    assert halves.drain() == ["\ufffd"]


def test_text_by_itself_has_no_halves() -> None:
    assert without_halves("é\ud83d\udc00\ud83d") == "é🐀\ufffd"
    assert without_halves(f"{BYTES}{BYTES[0]}") == "🐀\ufffd"
