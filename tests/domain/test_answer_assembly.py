"""Assembly of answers from pieces."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.domain.answer_assembly import (
    CHOICES_MAX,
    assemble,
    describe_invalid_fields,
    disassemble,
    replay,
)
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome, Usage
from shoal.domain.tool_calls import CALLS_MAX
from shoal.domain.work import JSON

USAGE = Usage(3, 4)


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call."""

    id: str
    name: str
    arguments: str

    @property
    def whole(self) -> JSON:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


calls = st.builds(ToolCall, st.text(min_size=1), st.text(min_size=1), st.text())
choices = st.tuples(
    st.text(), st.text(), st.lists(calls, max_size=3), st.lists(st.integers())
)


def cut(data: st.DataObject, text: str) -> list[str]:
    """Split a text at any positions."""
    places = data.draw(st.lists(st.integers(0, len(text))))
    ends = sorted({0, len(text), *places})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def deltas_of(
    data: st.DataObject,
    choice: int,
    parts: tuple[str, str, list[ToolCall], list[int]],
) -> list[Delta]:
    """Split a choice into pieces that keep the order within each part."""
    content, reasoning, tools, tokens = parts
    streams: list[list[Delta]] = [
        [Delta(choice, {"content": text}) for text in cut(data, content)],
        [Delta(choice, {"reasoning_content": t}) for t in cut(data, reasoning)],
        [Delta(choice, logprobs={"content": [{"token": t}]}) for t in tokens],
    ]
    for index, call in enumerate(tools):
        named = {"name": call.name, "arguments": ""}
        begin: JSON = {"index": index, "id": call.id, "function": named}
        lane = [Delta(choice, {"tool_calls": [begin]})]
        for text in cut(data, call.arguments):
            more: JSON = {"index": index, "function": {"arguments": text}}
            lane.append(Delta(choice, {"tool_calls": [more]}))
        streams.append(lane)
    return [*shuffled(data, streams), Delta(choice, finish_reason="length")]


def shuffled(data: st.DataObject, streams: Sequence[Sequence[Delta]]) -> list[Delta]:
    """Interleave the pieces of several streams in any order."""
    turns = [number for number, lane in enumerate(streams) for _ in lane]
    rests = [iter(lane) for lane in streams]
    return [next(rests[number]) for number in data.draw(st.permutations(turns))]


def whole_of(parts: tuple[str, str, list[ToolCall], list[int]]) -> Choice:
    content, reasoning, tools, tokens = parts
    fields: dict[str, JSON] = {"content": content or None}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if tools:
        fields["tool_calls"] = [call.whole for call in tools]
    logprobs: JSON = {"content": [{"token": t} for t in tokens]} if tokens else None
    return Choice(fields, "length", logprobs)


@settings(max_examples=examples(0.4))
@given(st.data(), st.lists(choices, min_size=1, max_size=3))
def test_any_split_assembles_the_same_answer(
    data: st.DataObject, made: list[tuple[str, str, list[ToolCall], list[int]]]
) -> None:
    streams = [deltas_of(data, index, parts) for index, parts in enumerate(made)]

    outcome = assemble(shuffled(data, streams), "stop", USAGE)

    assert outcome.choices == tuple(whole_of(parts) for parts in made)
    assert (outcome.text, outcome.finish_reason) == (made[0][0], "length")
    assert outcome.usage == USAGE


@given(st.lists(st.text()))
def test_texts_are_joined_without_choices(texts: list[str]) -> None:
    assert assemble(texts, "length", USAGE) == Outcome("".join(texts), "length", USAGE)


@settings(max_examples=examples(0.4))
@given(st.data(), st.lists(choices, min_size=1, max_size=3))
def test_split_answer_is_reassembled(
    data: st.DataObject, made: list[tuple[str, str, list[ToolCall], list[int]]]
) -> None:
    streams = [deltas_of(data, index, parts) for index, parts in enumerate(made)]
    outcome = assemble(shuffled(data, streams), "stop", USAGE)

    assert assemble(disassemble(outcome), "stop", USAGE) == outcome
    replayed = assemble(replay(outcome), "stop", USAGE)
    assert replayed == outcome
    assert [each.order for each in replayed.choices] == [
        each.order for each in outcome.choices
    ]


def test_texts_are_replayed_in_the_order_in_which_they_came() -> None:
    begun = {"name": "f", "arguments": "{"}
    pieces: list[AnswerPiece] = [
        *("Let ", "me see."),
        Delta(fields={"tool_calls": [{"index": 7, "id": "c1", "function": begun}]}),
        Delta(fields={"tool_calls": [{"index": 7, "function": {"arguments": "}"}}]}),
        Delta(fields={"content": "Well"}),
        Delta(fields={"reasoning_content": "Hm."}),
        Delta(fields={"content": "."}),
    ]

    outcome = assemble(pieces, "stop", USAGE)

    assert outcome.text == "Let me see.Well."
    texts: list[JSON] = []
    for piece in replay(outcome):
        assert isinstance(piece, Delta)
        texts += piece.fields.values()
    made = {"name": "f", "arguments": "{}"}
    assert texts == [
        "Let me see.",
        [{"index": 0, "id": "c1", "type": "function", "function": made}],
        *("Well", "Hm.", "."),
    ]


def test_heads_of_interleaved_calls_are_replayed_once() -> None:
    def call(index: int, arguments: str, **more: JSON) -> Delta:
        function: JSON = {"arguments": arguments, **more}
        return Delta(fields={"tool_calls": [{"index": index, "function": function}]})

    pieces = [
        *(call(0, "", name="f"), call(1, "", name="g")),
        *(call(0, "{}"), call(1, "[]")),
    ]

    replayed = [p for p in replay(assemble(pieces)) if isinstance(p, Delta)]

    names = [
        each["function"].get("name")
        for piece in replayed
        for each in cast("Any", piece.fields).get("tool_calls", ())
    ]
    assert names == ["f", "g", None, None]


def test_usual_order_is_not_recorded() -> None:
    pieces: list[AnswerPiece] = [
        Delta(fields={"role": "assistant", "content": ""}),
        Delta(fields={"reasoning_content": "H"}),
        Delta(fields={"content": "We", "reasoning_content": "m."}),
        "ll.",
        Delta(fields={"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
    ]

    (choice,) = assemble(pieces, "stop", USAGE).choices

    assert choice.order == ()


@pytest.mark.parametrize("outcome", [Outcome(""), Outcome("text", "length", USAGE)])
def test_split_text_is_reassembled(outcome: Outcome) -> None:
    pieces = disassemble(outcome)

    assert assemble(pieces, outcome.finish_reason, outcome.usage) == outcome


@pytest.mark.parametrize(
    ("pieces", "fields"),
    [
        (["a", Delta(0, {"content": "b"}), "c"], {"content": "abc"}),
        ([Delta(0, {"content": "a"}), "b"], {"content": "ab"}),
        ([Delta(0, {"role": "assistant", "content": None})], {"content": None}),
        ([Delta(0, {"refusal": "n"}), Delta(0, {"refusal": "o"})], {"content": None,
                                                                    "refusal": "no"}),
        ([Delta(0, {"audio": {"id": 1}})], {"content": None, "audio": {"id": 1}}),
        ([Delta(0, {"embedding": "AACAPw=="})], {"content": None,
                                                 "embedding": "AACAPw=="}),
    ],
)  # fmt: skip
def test_text_fields_are_joined_and_others_kept(
    pieces: list[AnswerPiece], fields: dict[str, JSON]
) -> None:
    (choice,) = assemble(pieces).choices

    assert choice.fields == fields


@pytest.mark.parametrize("choice", [-1, CHOICES_MAX])
def test_choices_beyond_the_limit_are_omitted(choice: int) -> None:
    assert assemble([Delta(choice, {"content": "x"}), "a"]).choices == (
        Choice({"content": "a"}),
    )


def test_silent_choice_among_others_is_omitted() -> None:
    outcome = assemble([Delta(1, {"content": "b"}), Delta(2, {"content": "c"})])

    assert [choice.fields["content"] for choice in outcome.choices] == ["b", "c"]


def test_choice_with_only_an_end_counts() -> None:
    outcome = assemble([Delta(0, finish_reason="stop"), Delta(1, {"content": "b"})])

    assert [choice.fields["content"] for choice in outcome.choices] == [None, "b"]


def test_choices_inherit_the_end_of_the_answer() -> None:
    outcome = assemble(
        [Delta(0, {"content": "a"}), Delta(1, {"content": "b"}, None, "tool_calls")],
        "length",
    )

    ends = [choice.finish_reason for choice in outcome.choices]
    assert ends == ["length", "tool_calls"]


def test_logprobs_of_a_completion_are_concatenated() -> None:
    first: JSON = {"tokens": ["a"], "token_logprobs": [-1], "text_offset": [0]}
    second: JSON = {"tokens": ["b"], "token_logprobs": [None], "top_logprobs": None}

    (choice,) = assemble([Delta(0, logprobs=first), Delta(0, logprobs=second)]).choices

    assert choice.logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, None],
        "text_offset": [0],
        "top_logprobs": None,
    }


def test_assembly_does_not_change_the_pieces() -> None:
    listed: list[JSON] = [1]
    pieces = [Delta(0, logprobs={"content": listed}) for _ in range(3)]

    assemble(pieces)

    assert listed == [1]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"content": None, "tool_calls": None, "strange": [1]}, None),
        ({"tool_calls": [{"index": CALLS_MAX - 1}, {"id": "no index"}]}, None),
        ({"content": 5}, "a int for text"),
        ({"tool_calls": "abc"}, "a str for tool calls"),
        ({"tool_calls": {"a": 1}}, "a dict for tool calls"),
        ({"tool_calls": [None]}, "a NoneType for a tool call"),
        ({"tool_calls": [{"index": -1}]}, "a tool call with the index -1"),
        ({"tool_calls": [{"index": 10**60}]}, f"a tool call with the index {10**39}"),
        ({"tool_calls": [{"index": "0"}]}, "a tool call with the index 0"),
        ({"tool_calls": [{"index": CALLS_MAX}]}, "a tool call with the index 1024"),
    ],
    ids=str,
)
def test_invalid_fields_are_named(
    fields: Mapping[str, JSON], fault: str | None
) -> None:
    assert describe_invalid_fields(fields) == fault
