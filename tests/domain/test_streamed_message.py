"""Fields of streamed messages, as real servers name and form them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.domain.streamed_message import MessageReader
from shoal.domain.work import JSON

HM = {"reasoning_content": "hm"}
HELLO = {"content": "Hello"}
DEEP = json.loads("[" * 102 + "]" * 102)


def reader() -> MessageReader:
    ids = iter(f"new{number}" for number in range(9))
    return MessageReader(lambda: next(ids))


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"content": "Hello"}, HELLO),
        ({"role": "assistant", "content": None, "tool_calls": None}, {}),
        ({"role": "assistant", "content": "", "tool_calls": []}, {}),
        # Thoughts: llama-server and others; vLLM, Ollama and MLX; Ollama's own API;
        # Copilot; OpenRouter; servers that changed the name.
        ({"reasoning_content": "hm"}, HM),
        ({"reasoning": "hm"}, HM),
        ({"thinking": "hm", "content": ""}, HM),
        ({"reasoning_text": "hm"}, HM),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, HM),
        ({"reasoning": "hm", "reasoning_content": "hm", "content": "Hello"},
         HM | HELLO),
        ({"reasoning": "hm", "reasoning_content": None}, HM),
        ({"reasoning": "hm", "reasoning_details": [{"text": "hm"}]}, HM),
        ({"reasoning": {"content": "hm"}}, HM),
        ({"reasoning": {"effort": 5}, "content": "Hello"}, HELLO),
        # Parts: Mistral's, OpenAI's, and mere texts.
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "Hel"},
                    {"type": "text", "text": "lo"},
                ]
            },
            HM | HELLO,
        ),
        ({"content": [{"type": "output_text", "text": {"value": "Hello"}}]}, HELLO),
        ({"content": {"type": "text", "text": "Hello"}}, HELLO),
        ({"content": {"text": "Hello"}}, HELLO),
        ({"content": ["Hel", "lo"]}, HELLO),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"refusal": "no"}),
        ({"content": [{"type": "image", "image": "x"}, {"type": "text", "text": ""}]},
         {}),
        ({"content": [{"type": "reasoning", "summary": [{"text": "hm"}]}]}, HM),
        # JSON that a server has parsed.
        ({"content": {"a": 1, "text": "b"}}, {"content": '{"a":1,"text":"b"}'}),
        ({"content": {"a": "é"}}, {"content": '{"a":"é"}'}),
        ({"content": [1, 2]}, {"content": "[1,2]"}),
        ({"content": 4}, {"content": "4"}),
        ({"content": True}, {"content": "true"}),
        ({"content": False}, {}),
        # Other fields.
        ({"refusal": "no"}, {"refusal": "no"}),
        ({"refusal": [{"type": "refusal", "refusal": "no"}]}, {"refusal": "no"}),
        ({"refusal": 5}, {}),
        ({"audio": {"id": 1}}, {"audio": {"id": 1}}),
        ({"odd": DEEP, "content": "Hello"}, HELLO),
    ],
)  # fmt: skip
def test_texts_and_thoughts_are_found_in_any_form(
    fields: Mapping[str, Any], read: Mapping[str, JSON]
) -> None:
    assert reader().read(fields) == read


def head(call_id: str, name: str, arguments: str = "", index: int = 0) -> JSON:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def more(arguments: str, index: int = 0) -> JSON:
    return {"index": index, "function": {"arguments": arguments}}


def test_calls_are_numbered_from_0_and_their_first_piece_has_all_that_names_them() -> (
    None
):
    message = reader()
    pieces: list[Any] = [
        {"index": 3, "id": "a", "function": {"arguments": "{"}},
        {"index": 3, "function": {"name": "f"}},
        {"index": 3, "function": {"arguments": "}"}},
        {"index": 3, "function": {"arguments": ""}},
        {"function": {"name": "g", "arguments": {"x": 1}}},
        {"id": "a", "index": 9, "function": {"name": "h"}},
        None,
    ]

    read = [message.read({"tool_calls": [piece]}).get("tool_calls") for piece in pieces]

    assert read == [
        None,
        [head("a", "f", "{")],
        [more("}")],
        None,
        [head("new0", "g", '{"x":1}', 1)],
        [head("new1", "h", "", 2)],  # two calls with one id are one to clients
        None,
    ]
    assert message.has_calls
    assert message.nameless_arguments == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": {"id": "a", "function": {"name": "f", "arguments": "{}"}}},
        {"tool_calls": [{"id": "a", "name": "f", "arguments": "{}"}], "role": "x"},
    ],
)
def test_a_single_call_needs_no_list(fields: Mapping[str, Any]) -> None:
    assert reader().read(fields) == {"tool_calls": [head("a", "f", "{}")]}


def test_a_function_call_of_the_older_form_is_a_tool_call() -> None:
    message = reader()

    read = [
        message.read({"function_call": call, "content": None})
        for call in ({"name": "f", "arguments": "{"}, {"arguments": "}"}, None)
    ]

    assert read == [
        {"tool_calls": [head("new0", "f", "{")]},
        {"tool_calls": [more("}")]},
        {},
    ]


def test_a_call_that_is_never_named_is_kept_back() -> None:
    message = reader()

    assert message.read({"tool_calls": [more("{}")]}) == {}
    assert not message.has_calls
    assert message.nameless_arguments == "{}"


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ("abc", "a str for tool calls"),
        (5, "a int for tool calls"),
        (["abc"], "a str for a tool call"),
        (
            [{"id": str(n), "function": {"name": "f"}} for n in range(1025)],
            "more than 1024 tool calls",
        ),
    ],
    ids=("text", "number", "list", "many"),
)
def test_calls_that_cannot_be_understood_are_an_error(calls: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        reader().read({"content": "a", "tool_calls": calls})
