"""Requests for responses, decoded to chats."""

from typing import Any

import msgspec
import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.work import Chat
from shoal.gateway.chat.answer_parts import Part, PartKind
from shoal.gateway.chat.responses.body import decode_fields
from shoal.gateway.chat.responses.items import items_of, messages_of
from shoal.gateway.chat.responses.request import (
    ResponseRequest,
    decode_response_request,
)
from shoal.gateway.chat.responses.response_object import ResponseDraft

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
G = {"type": "function", "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CHAT_CALL = {
    "id": "c1",
    "function": {"name": "f", "arguments": "{}"},
    "type": "function",
}
PNG = "data:image/png;base64,AA=="


def decoded(**body: Any) -> ResponseRequest:
    data = msgspec.json.encode({"model": "m1", "input": "hi", **body})
    return decode_response_request(data, 1_700_000_000)


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


INPUTS: dict[str, tuple[list[Any], list[Any]]] = {
    "a message without a type": ([HI], [HI]),
    "a typed message": (
        [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "h"},
                    {"type": "input_text", "text": "i"},
                ],
            }
        ],
        [HI],
    ),
    "a developer": (
        [{"role": "developer", "content": "Be brief."}, HI],
        [{"role": "system", "content": "Be brief."}, HI],
    ),
    "an image": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What?"},
                    {"type": "input_image", "image_url": PNG, "detail": "low"},
                ],
            }
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What?"},
                    {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                ],
            }
        ],
    ),
    "an earlier answer": (
        [
            HI,
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "Hello", "annotations": []},
                    {"type": "refusal", "refusal": "No."},
                ],
            },
        ],
        [HI, assistant("Hello", refusal="No.")],
    ),
    "reasoning, a text and calls are one message": (
        [
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"role": "assistant", "content": "Wait."},
            CALL,
            CALL | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
        ],
        [
            assistant(
                "Wait.",
                tool_calls=[CHAT_CALL, CHAT_CALL | {"id": "c2"}],
                reasoning_content="Hm.",
            ),
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            {"role": "tool", "content": "2", "tool_call_id": "c2"},
        ],
    ),
    "images in outputs follow all outputs": (
        [
            CALL,
            CALL | {"call_id": "c2"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": PNG}],
            },
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
        ],
        [
            assistant("", tool_calls=[CHAT_CALL, CHAT_CALL | {"id": "c2"}]),
            {
                "role": "tool",
                "content": "The result is the image in the next message.",
                "tool_call_id": "c1",
            },
            {"role": "tool", "content": "2", "tool_call_id": "c2"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Image in the result of c1:"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            },
        ],
    ),
    "a summary stands for reasoning without text": (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"role": "assistant", "content": "Yes."},
        ],
        [assistant("Yes.", reasoning_content="Hm.")],
    ),
    "reasoning after a text begins a message": (
        [
            {"role": "assistant", "content": "One."},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "H"}]},
            CALL,
        ],
        [
            assistant("One."),
            assistant("", tool_calls=[CHAT_CALL], reasoning_content="H"),
        ],
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_items_are_messages(name: str) -> None:
    items, messages = INPUTS[name]

    chat = decoded(input=items).chat()

    assert list(chat.messages) == messages
    assert messages_of(items_of(chat.messages)) == messages


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "what OpenAI's client sends for nothing": (
        {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}},
        {},
    ),
    "sampling": (
        {"top_p": 0.5, "seed": 7, "stop": "X"},
        {"top_p": 0.5, "seed": 7, "stop": ["X"]},
    ),
    "reasoning": ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    "verbosity": ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
    "logprobs": (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 2},
    ),
    "a schema": (
        {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "n",
                    "schema": {"type": "object"},
                    "strict": True,
                }
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "strict": True,
                    "schema": {"type": "object"},
                },
            }
        },
    ),
    "an object": (
        {"text": {"format": {"type": "json_object"}}},
        {"response_format": {"type": "json_object"}},
    ),
    "a tool": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "tools": [CHAT_TOOL],
        },
    ),
    "a chosen function": (
        {"tools": [TOOL, G], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [CHAT_TOOL, {"type": "function", "function": {"name": "g"}}],
        },
    ),
    "allowed functions": (
        {
            "tools": [TOOL, G],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        {"tool_choice": "required", "tools": [CHAT_TOOL]},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fields_are_options_of_the_chat(name: str) -> None:
    body, options = OPTIONS[name]

    asked = decoded(**body)

    assert asked.chat().options == options


@pytest.mark.parametrize(
    "body",
    [
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"},
        {"tools": [TOOL | {"description": "d", "strict": True}], "tool_choice": "none"},
        {
            "tools": [TOOL | {"description": "d", "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
        },
        OPTIONS["a schema"][0] | {"top_p": 0.5, "temperature": 0.5},
        {"reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "flex"},
        {"max_output_tokens": 7, "prompt_cache_key": "k", "safety_identifier": "s"},
    ],
)
def test_response_repeats_what_was_requested(body: dict[str, Any]) -> None:
    asked = decoded(**body)
    fields = decode_fields(asked.fields.encode())
    assert fields == asked.fields

    response = ResponseDraft(JobId("j"), asked.chat(), fields).response("queued")

    shown = msgspec.to_builtins(response)
    for name, value in body.items():
        if name == "text":
            value = {"format": value["format"], "verbosity": "medium"}
        assert shown[name] == value


def test_allowed_functions_are_repeated() -> None:
    asked = decoded(**OPTIONS["allowed functions"][0])

    response = ResponseDraft(JobId("j"), asked.chat(), asked.fields).response("queued")

    assert response.tool_choice == OPTIONS["allowed functions"][0]["tool_choice"]


def test_references_and_earlier_messages_join_the_input() -> None:
    reference = {"type": "item_reference", "id": "msg_a_0"}
    asked = decoded(input=[reference, HI], instructions="Now.")
    found = {"msg_a_0": Part(PartKind.TEXT, "Yes.")}

    chat = asked.chat([{"role": "user", "content": "Well?"}], found)

    assert isinstance(chat, Chat)
    assert [reference.id for reference in asked.references] == ["msg_a_0"]
    assert list(chat.messages) == [
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Well?"},
        assistant("Yes."),
        HI,
    ]


def test_tools_that_codex_always_offers_are_left_out() -> None:
    # Its defaults, with the names of its MCP servers as namespaces.
    grouped = {"type": "namespace", "name": "agents", "tools": [TOOL]}
    searching = {"type": "web_search", "external_web_access": False}

    asked = decoded(tools=[grouped, TOOL, searching])
    alone = decoded(tools=[searching], tool_choice="auto")

    assert asked.options["tools"] == decoded(tools=[TOOL]).options["tools"]
    assert asked.left_out == ["tools: those of the types namespace, web_search"]
    assert (alone.options, decoded(tools=[TOOL]).left_out) == ({}, [])


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "tools[0].type": ({"tools": [{"type": "file_search"}]}, "file_search"),
    "tools[1].type": ({"tools": [TOOL, {"type": "mcp"}]}, "mcp"),
    "tools[0].name": ({"tools": [{"type": "function"}]}, "required"),
    "tools": ({"tools": [TOOL, TOOL]}, "same name"),
    "tool_choice": ({"tool_choice": "required"}, "no tools"),
    "tool_choice.type": ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "mcp"),
    "tool_choice.tools": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        "at least one",
    ),
    "tool_choice.tools[0].type": (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]},
        },
        "mcp",
    ),
    "conversation": ({"conversation": "conv_1"}, "not supported"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "not supported"),
    "truncation": ({"truncation": "auto"}, "not supported"),
    "background": ({"background": True, "store": False}, "store"),
    "input": ({"input": []}, "no message"),
    "input[0].role": ({"input": [{"role": "tool", "content": ""}]}, "expected one of"),
    "input[0].call_id": (
        {"input": [{"type": "function_call_output", "output": ""}]},
        "required",
    ),
    "input[0].content[0].type": (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input_file",
    ),
    "input[0].content[0].image_url": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "required",
    ),
    "input[0].content": (
        {
            "input": [
                {
                    "role": "system",
                    "content": [{"type": "input_image", "image_url": PNG}],
                }
            ]
        },
        "only a user",
    ),
    "text.format.name": ({"text": {"format": {"type": "json_schema"}}}, "required"),
    "metadata[...]": ({"metadata": {"a": "x" * 513}}, "512"),
    "temperature": ({"temperature": 3}, "2"),
}


@pytest.mark.parametrize("field", REJECTED)
def test_invalid_field_is_named(field: str) -> None:
    body, message = REJECTED[field]

    with pytest.raises(InvalidRequest, match=message) as raised:
        decoded(**body).chat()

    assert raised.value.field == field
