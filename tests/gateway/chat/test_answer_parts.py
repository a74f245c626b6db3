"""The parts of an answer, from pieces in any order."""

import json
from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.work import JSON
from shoal.gateway.chat.answer_parts import (
    Part,
    PartBegun,
    PartEnded,
    PartEvent,
    PartGrown,
    PartKind,
    PartReader,
    parts_of,
)

TEXT, REASONING, CALL = PartKind.TEXT, PartKind.REASONING, PartKind.TOOL_CALL


def call(index: int, arguments: str = "", **names: str) -> Delta:
    function: dict[str, JSON] = {"arguments": arguments}
    if "name" in names:
        function["name"] = names["name"]
    made: dict[str, JSON] = {"index": index, "function": function}
    if "id" in names:
        made["id"] = names["id"]
    return Delta(0, {"tool_calls": [made]})


def read_all(pieces: Sequence[AnswerPiece], at_once: int = 1) -> list[PartEvent]:
    reader = PartReader("call_")
    events: list[PartEvent] = []
    for start in range(0, len(pieces), at_once):
        events += reader.read(pieces[start : start + at_once])
    return events + reader.end(assemble(pieces))


def joined(events: Sequence[PartEvent]) -> list[Part]:
    """Return the parts as a client assembles them, and check their order."""
    parts: list[Part] = []
    texts: list[str] | None = None
    for event in events:
        match event:
            case PartBegun(index, part):
                assert texts is None, "two parts are open"
                assert (index, part.text) == (len(parts), "")
                begun, texts = part, []
            case PartGrown(index, text):
                assert texts is not None
                assert index == len(parts)
                assert text
                texts.append(text)
            case PartEnded(index, part):
                assert texts is not None
                assert index == len(parts)
                parts.append(
                    Part(begun.kind, "".join(texts), begun.call_id, begun.name)
                )
                assert part == parts[-1]
                texts = None
    assert texts is None, "a part was left open"
    return parts


def test_text_is_passed_on_as_it_comes() -> None:
    reader = PartReader("call_")

    assert reader.read(["He", "llo"]) == [
        PartBegun(0, Part(TEXT, "")),
        PartGrown(0, "Hello"),
    ]
    assert reader.read(["!"]) == [PartGrown(0, "!")]
    assert reader.end(Outcome("Hello!")) == [PartEnded(0, Part(TEXT, "Hello!"))]


def test_reasoning_text_and_calls_are_parts_in_their_order() -> None:
    events = read_all(
        [
            Delta(0, {"reasoning_content": "hm"}),
            "Let me look.",
            call(0, "", id="a", name="look"),
            call(0, '{"at":'),
            call(0, "1}"),
            call(1, "{}", id="b", name="go"),
        ]
    )

    assert joined(events) == [
        Part(REASONING, "hm"),
        Part(TEXT, "Let me look."),
        Part(CALL, '{"at":1}', "a", "look"),
        Part(CALL, "{}", "b", "go"),
    ]


def test_call_ends_when_its_arguments_are_whole_and_another_begins() -> None:
    reader = PartReader("call_")
    reader.read([call(0, '{"a":', id="x", name="f")])

    assert reader.read([call(1, '{"b":', id="y", name="g")]) == []
    assert reader.read([call(0, "1}")]) == [
        PartGrown(0, "1}"),
        PartEnded(0, Part(CALL, '{"a":1}', "x", "f")),
        PartBegun(1, Part(CALL, "", "y", "g")),
        PartGrown(1, '{"b":'),
    ]


def test_half_a_character_in_arguments_does_not_keep_a_call_open() -> None:
    for half in ("\ud800", '{"a":"\ud800"}'):
        reader = PartReader("call_")
        reader.read([call(0, half, name="f"), "after"])

        assert [part.text for part in reader.parts] == [half, "after"]


def test_calls_with_one_index_are_several_parts() -> None:
    pieces = [call(0, '{"a":1}', id=name, name="f") for name in ("x", "y")]

    assert joined(read_all(pieces)) == [
        Part(CALL, '{"a":1}', "x", "f"),
        Part(CALL, '{"a":1}', "y", "f"),
    ]


def test_call_without_an_id_gets_one() -> None:
    assert joined(read_all([call(0, "{}", name="f"), call(1, "{}", name="f")])) == [
        Part(CALL, "{}", "call_0", "f"),
        Part(CALL, "{}", "call_1", "f"),
    ]


def test_other_choices_are_left_out() -> None:
    assert joined(read_all([Delta(1, {"content": "other"}), "this"])) == [
        Part(TEXT, "this")
    ]


def test_outcome_provides_the_parts_of_an_answer_without_pieces() -> None:
    outcome = assemble(["a", call(0, "{}", id="x", name="f")])

    assert parts_of(outcome, "call_") == [
        Part(TEXT, "a"),
        Part(CALL, "{}", "x", "f"),
    ]
    assert parts_of(Outcome("text"), "call_") == [Part(TEXT, "text")]
    assert parts_of(Outcome(""), "call_") == []


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerPiece]:
    """Draw pieces of text, reasoning and calls, whose arguments are interleaved."""
    streams: list[list[AnswerPiece]] = [
        list(draw(st.lists(st.text(min_size=1, max_size=3), max_size=4))),
        [
            Delta(0, {"reasoning_content": text})
            for text in draw(st.lists(st.text(min_size=1, max_size=3), max_size=3))
        ],
    ]
    for index in range(draw(st.integers(0, 3))):
        arguments = json.dumps(draw(ARGUMENTS))
        cut = draw(st.integers(0, len(arguments)))
        begin = call(index, arguments[:cut], id=f"id{index}", name=f"f{index}")
        streams.append([begin, call(index, arguments[cut:])])
    pieces: list[AnswerPiece] = []
    while any(streams):
        stream = draw(st.sampled_from([each for each in streams if each]))
        pieces.append(stream.pop(0))
    return pieces


@given(answers(), st.integers(1, 5))
def test_nothing_is_lost_and_parts_follow_each_other(
    pieces: list[AnswerPiece], at_once: int
) -> None:
    parts = joined(read_all(pieces, at_once))

    def texts(kind: PartKind) -> str:
        return "".join(part.text for part in parts if part.kind is kind)

    outcome = assemble(pieces)
    assert parts == joined(read_all(pieces)) == parts_of(outcome, "call_")
    fields = outcome.choices[0].fields if outcome.choices else {}
    assert texts(TEXT) == outcome.text
    assert texts(REASONING) == fields.get("reasoning_content", "")
    calls = [part for part in parts if part.kind is CALL]
    assert len(calls) == len(cast("list[JSON]", fields.get("tool_calls", [])))
    assert all(isinstance(json.loads(part.text), dict) for part in calls)
