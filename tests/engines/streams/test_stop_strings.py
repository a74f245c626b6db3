"""Stop strings that the server did not get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.outcome import AnswerPiece, Delta
from shoal.engines.streams.answers import StopStrings

THOUGHT = Delta(0, {"reasoning_content": "ab"})


def stopped_at(stop: str) -> Delta:
    return Delta(0, {"stop_reason": stop})


@pytest.mark.parametrize(
    ("pieces", "passed"),
    [
        (["some", " text"], ["some", " text"]),
        (["so STOP and", " more"], ["so ", stopped_at("STOP")]),
        (["so ST", "OP and"], ["so ", stopped_at("STOP")]),
        (["so ST", "ART"], ["so ", "START"]),
        (["so S", "S", "TOP"], ["so ", "S", stopped_at("STOP")]),
        (["STOP"], [stopped_at("STOP")]),
        (["so ST"], ["so ", "ST"]),
        (["so ST", THOUGHT, "OP"], ["so ", "ST", THOUGHT, "OP"]),
        # The first in the text, and of two the longer one.
        (["a.STOP"], ["a", stopped_at(".")]),
        (["a STOPPED"], ["a ", stopped_at("STOPPED")]),
    ],
)
def test_text_ends_at_a_stop_string(
    pieces: list[AnswerPiece], passed: list[AnswerPiece]
) -> None:
    stops = StopStrings(["STOP", "STOPPED", "."])

    found = [each for piece in pieces for each in stops.passed([piece])]

    assert [*found, *stops.rest()] == passed


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 30),
)
def test_text_is_cut_at_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], size: int, cut: int
) -> None:
    """Also where a beginning, in which there is none, was passed on before."""
    begun = text[:cut]
    while any(stop in begun for stop in stops):
        begun = begun[:-1]
    reader = StopStrings(stops, begun)
    pieces: list[AnswerPiece] = [begun]
    for at in range(len(begun), len(text), size):
        pieces += reader.passed([text[at : at + size]])
    pieces += reader.rest()

    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert "".join(each for each in pieces if isinstance(each, str)) == (
        text[: max(min(ends), len(begun))] if ends else text
    )
    assert bool(reader.found) is bool(ends)
