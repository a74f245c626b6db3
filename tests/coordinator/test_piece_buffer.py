"""The buffer that joins many small pieces of an answer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.coordinator.answer_reader import (
    DELTA_COST,
    JOIN_AT,
    PieceBuffer,
    memory_cost,
)
from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import AnswerPiece, Delta

PIECES = st.text(min_size=1, max_size=3) | st.builds(
    Delta, st.integers(0, 2), st.dictionaries(st.just("content"), st.text())
)


@settings(max_examples=examples(0.4))
@given(st.lists(PIECES, max_size=20), st.integers(1, 200))
def test_joined_pieces_make_the_same_answer(
    some: list[AnswerPiece], times: int
) -> None:
    came = some * times
    pieces = PieceBuffer()

    for piece in came:
        pieces.extend([piece])

    assert assemble(pieces.all()) == assemble(came)


def test_many_texts_are_joined() -> None:
    pieces = PieceBuffer()
    for number in range(2 * JOIN_AT + 3):
        pieces.extend([str(number)])

    assert "".join(map(str, pieces.all())) == "".join(map(str, range(2 * JOIN_AT + 3)))
    assert len(pieces.all()) == 2 + 3


def test_only_adjacent_texts_are_joined() -> None:
    pieces = PieceBuffer()
    delta = Delta(0, {"content": "b"})
    for _ in range(JOIN_AT // 4):
        for piece in ("a", delta, "c", "d"):
            pieces.extend([piece])

    assert pieces.all()[:4] == ["a", delta, "cda", delta]
    assert len(pieces.all()) == JOIN_AT // 2 + 1


def test_returned_list_belongs_to_the_caller() -> None:
    pieces = PieceBuffer()
    pieces.extend(["a"])

    pieces.all().append("b")

    assert pieces.all() == ["a"]


def test_delta_costs_more_than_its_texts() -> None:
    assert memory_cost("abc") == 3
    assert memory_cost(Delta(0, {"content": "abc"})) == DELTA_COST + 3
    assert memory_cost(Delta()) == DELTA_COST
