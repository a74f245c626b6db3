"""Assembly of tool calls, as real servers send them."""

from typing import Any

import pytest

from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import Delta
from shoal.domain.tool_calls import CALLS_MAX, CallAssembler
from shoal.domain.work import JSON

PARIS, ROME = '{"city":"Paris"}', '{"city":"Rome"}'

Called = list[tuple[str, str, str]]  # ids, names, arguments


def piece(arguments: JSON = None, name: str | None = None, **more: Any) -> JSON:
    function = {"name": name, "arguments": arguments}
    given = {key: value for key, value in function.items() if value is not None}
    return {**more, "function": given}


def called(*chunks: list[JSON]) -> Called:
    assembler = CallAssembler()
    for chunk in chunks:
        assembler.add(chunk)
    return [(draft.id, draft.name, draft.arguments) for draft in assembler.drafts]


BOTH: Called = [("a", "f", PARIS), ("b", "f", ROME)]
NAMELESS: Called = [("", "f", PARIS), ("", "f", ROME)]


@pytest.mark.parametrize(
    ("chunks", "calls"),
    [
        # As documented, and in one chunk.
        (
            [
                [piece("", "f", index=0, id="a")],
                [piece('{"city":', index=0)],
                [piece('"Paris"}', index=0)],
                [piece("", "f", index=1, id="b")],
                [piece(ROME, index=1)],
            ],
            BOTH,
        ),
        (
            [
                [
                    piece(PARIS, "f", index=0, id="a"),
                    piece(ROME, "f", index=1, id="b"),
                ],
            ],
            BOTH,
        ),
        # Ollama's whole calls, all with the index 0, or without any.
        (
            [
                [piece(PARIS, "f", index=0, id="a")],
                [piece(ROME, "f", index=0, id="b")],
            ],
            BOTH,
        ),
        ([[piece(PARIS, "f", id="a")], [piece(ROME, "f", id="b")]], BOTH),
        ([[piece(PARIS, "f", id="a"), piece(ROME, "f", id="b")]], BOTH),
        ([[piece(PARIS, "f", index=None)], [piece(ROME, "f", index=None)]], NAMELESS),
        ([[piece(PARIS, "f"), piece(ROME, "f")]], NAMELESS),
        ([[piece(PARIS, "f", index=0)], [piece(ROME, "f", index=0)]], NAMELESS),
        (
            [[piece("{}", "f", index=0)], [piece("{}", "f", index=0)]],
            [("", "f", "{}"), ("", "f", "{}")],
        ),
        # In pieces, with one index for all, or without any.
        (
            [
                [piece("", "f", index=0, id="a"), piece("", "f", index=0, id="b")],
                [piece(PARIS[:5], index=0, id="a"), piece(ROME[:5], index=0, id="b")],
                [piece(PARIS[5:], index=0, id="a"), piece(ROME[5:], index=0, id="b")],
            ],
            BOTH,
        ),
        (
            [
                [piece("", "f", id="a")],
                [piece(PARIS[:5])],
                [piece(PARIS[5:])],
                [piece("", "f", id="b")],
                [piece(ROME)],
            ],
            BOTH,
        ),
        ([[piece("", "f")], [piece(PARIS)], [piece("", "g")], [piece(ROME)]],
         [("", "f", PARIS), ("", "g", ROME)]),
        # Indices that begin at 1, that have gaps, and that are no integers.
        (
            [
                [piece(PARIS, "f", index=1, id="a")],
                [piece(ROME, "f", index=7, id="b")],
            ],
            BOTH,
        ),
        (
            [
                [piece("", "f", index=0.0, id="a"), piece("", "f", index=1.0, id="b")],
                [piece(PARIS, index=0.0), piece(ROME, index=1.0)],
            ],
            BOTH,
        ),
        ([[piece("", "f", index=3, id="a")], [piece(PARIS, index=0)]], BOTH[:1]),
        # An older vLLM: another id with each piece.
        (
            [
                [piece("", "f", index=0, id="a")],
                [piece(PARIS[:5], index=0, id="x1")],
                [piece(PARIS[5:], index=0, id="x2")],
                [piece(ROME, "f", index=1, id="b")],
            ],
            BOTH,
        ),
        # The name, or all of the head, with each piece.
        (
            [
                [piece("", "f", index=0, id="a")],
                [piece('{"a":{}', "f", index=0, id="a")],
                [piece("}", "f", index=0, id="a")],
            ],
            [("a", "f", '{"a":{}}')],
        ),
        (
            [[piece("", "f", index=0)], [piece('{"a":', "f", index=0)],
             [piece("{}}", "f", index=0)]],
            [("", "f", '{"a":{}}')],
        ),
        # Whole calls that are repeated at the end.
        (
            [
                [piece(PARIS, "f", index=0, id="a"), piece(ROME, "f", index=1, id="b")],
                [piece(PARIS, "f", index=0, id="a"), piece(ROME, "f", index=1, id="b")],
                [piece("", "f", id="a"), piece("", "f", id="b")],
            ],
            BOTH,
        ),
        # One id for two calls.
        (
            [
                [piece(PARIS, "f", index=0, id="f")],
                [piece(ROME[:4], "f", index=1, id="f")],
                [piece(ROME[4:], index=1, id="f")],
            ],
            [("f", "f", PARIS), ("f", "f", ROME)],
        ),
        ([[piece(PARIS, "f", id="f")], [piece(ROME, "f", id="f")]],
         [("f", "f", PARIS), ("f", "f", ROME)]),
        # The id, the name and the arguments one after the other.
        (
            [
                [{"index": 0, "id": "a", "type": "function"}],
                [piece(None, "f", index=0)],
                [piece(PARIS, index=0)],
            ],
            BOTH[:1],
        ),
        # Arguments as an object, or nothing.
        (
            [[piece({"city": "Paris"}, "f", index=0, id="a")],
             [piece({"city": "Rome"}, "f", index=1, id="b")]],
            BOTH,
        ),
        ([[piece({}, "f", id="a")], [piece(None, "g", id="b")]],
         [("a", "f", "{}"), ("b", "g", "")]),
        ([[piece([1, None], "f", id="a")]], [("a", "f", "[1,null]")]),
        # Calls without a "function" around them.
        ([[{"name": "f", "arguments": {"city": "Paris"}, "id": "a"}]], BOTH[:1]),
        # Nothing that could be a call.
        ([[None, 5, {}, {"index": 0}, {"function": None}, piece("")]], []),
        ([[{"index": 0, "id": 5, "function": {"name": ["f"]}}]], []),
    ],
)  # fmt: skip
def test_calls_are_told_apart_as_servers_send_them(
    chunks: list[list[JSON]], calls: Called
) -> None:
    assert called(*chunks) == calls


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ("", False),
        ("{", False),
        ("{}", True),
        (' {"a": [1, {"b": "}"}]} ', True),
        (r'{"a": "\"}"', False),
        (r'{"a": "\\"}', True),
        (r'{"a": "\u007d', False),
        ("[1]", True),
        ('"{}"', False),
        ("5", False),
        ("}", False),
    ],
)
def test_arguments_are_whole_once_their_brackets_are_closed(
    arguments: str, whole: bool
) -> None:
    for cut in range(len(arguments) + 1):
        assembler = CallAssembler()
        assembler.add([piece(arguments[:cut], "f", index=0)])
        (draft,) = assembler.drafts
        assert not draft.is_whole or arguments[:cut].strip() == arguments.strip()
        assembler.add([piece(arguments[cut:], index=0)])
        assert draft.is_whole is whole


def test_arguments_are_scanned_once_however_often_they_are_asked_about() -> None:
    assembler = CallAssembler()
    assembler.add([piece("[", "f", index=0)])
    (draft,) = assembler.drafts
    for _ in range(10_000):  # would take minutes if each scanned all before it
        assembler.add([piece("[" * 20, index=0)])
        assert not draft.is_whole


def test_too_many_calls_are_left_out() -> None:
    assembler = CallAssembler()
    calls = [piece("{}", "f", id=str(n)) for n in range(CALLS_MAX + 1)]

    assembler.add(calls)
    assembler.add([piece("!", id="another")])

    assert assembler.overflowed
    assert len(assembler) == CALLS_MAX
    assert {draft.arguments for draft in assembler.drafts} == {"{}"}


def test_answer_has_all_calls_whatever_their_indices() -> None:
    pieces = [
        Delta(0, {"tool_calls": [piece(PARIS, "f", index=0, id="a")]}),
        Delta(0, {"tool_calls": [piece(ROME, "f", index=0, id="b")]}),
        Delta(0, {"tool_calls": [None, piece("", id=None)]}),
    ]

    (choice,) = assemble(pieces).choices

    assert choice.fields["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": PARIS}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": ROME}},
    ]
