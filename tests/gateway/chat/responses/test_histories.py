"""Conversations that were held with OpenAI's own servers go on here."""

import json
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.gateway.chat.messages import WORD_MAX
from shoal.gateway.chat.responses.request import decode_response_request

HI = {"role": "user", "content": "hi"}
IMAGE = "iVBORw0KGgo" * WORD_MAX


def messages_of(*items: Any) -> list[dict[str, Any]]:
    body = {"model": "m1", "input": [*items]}
    chat = decode_response_request(json.dumps(body).encode(), 1_700_000_000).chat()
    return [dict(message) for message in chat.messages]


# Items of OpenAI's own tools, as its API reference has them in "Responses".
STEPS: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "herring", "sources": None},
        },
        "assistant",
        '[web_search_call {"action": {"type": "search", "query": "herring"}}]',
    ),
    (
        {
            "type": "file_search_call",
            "id": "fs_1",
            "status": "completed",
            "queries": ["fish"],
            "results": [{"file_id": "f", "text": "A herring.", "score": 0.5}],
        },
        "assistant",
        '[file_search_call {"queries": ["fish"], "results": '
        '[{"file_id": "f", "text": "A herring.", "score": 0.5}]}]',
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "status": "completed",
            "container_id": "c",
            "code": "6 * 7",
            "outputs": [{"type": "logs", "logs": "42"}],
        },
        "assistant",
        '[code_interpreter_call {"container_id": "c", "code": "6 * 7", '
        '"outputs": [{"type": "logs", "logs": "42"}]}]',
    ),
    (
        {"type": "image_generation_call", "id": "ig_1", "result": IMAGE},
        "assistant",
        "[image_generation_call]",
    ),
    (
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "s",
            "name": "echo",
            "arguments": '{"value":1}',
            "output": "one",
            "error": None,
        },
        "assistant",
        '[mcp_call {"server_label": "s", "name": "echo", '
        '"arguments": "{\\"value\\":1}", "output": "one"}]',
    ),
    (
        {
            "type": "tool_search_call",
            "id": "ts_1",
            "call_id": None,
            "execution": "server",
            "arguments": {"query": "fish"},
        },
        "assistant",
        '[tool_search_call {"execution": "server", "arguments": {"query": "fish"}}]',
    ),
    (
        {
            "type": "custom_tool_call",
            "id": "ctc_1",
            "call_id": "c1",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        "assistant",
        '[custom_tool_call {"name": "apply_patch", "input": "*** Begin Patch"}]',
    ),
    (
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        "user",
        '[custom_tool_call_output {"output": "Done"}]',
    ),
    (
        {
            "type": "shell_call_output",
            "call_id": "c2",
            "output": [
                {
                    "stdout": "a.txt\n",
                    "stderr": "",
                    "outcome": {"type": "exit", "exit_code": 0},
                }
            ],
        },
        "user",
        '[shell_call_output {"output": [{"stdout": "a.txt\\n", '
        '"outcome": {"type": "exit", "exit_code": 0}}]}]',
    ),
    (
        {
            "type": "computer_call_output",
            "call_id": "c3",
            "output": {
                "type": "computer_screenshot",
                "image_url": f"data:image/png;base64,{IMAGE}",
            },
        },
        "user",
        '[computer_call_output {"output": {"type": "computer_screenshot"}}]',
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        "user",
        '[mcp_approval_response {"approval_request_id": "a", "approve": true}]',
    ),
    (
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
        "assistant",
        "[compaction]",
    ),
    ({"type": "some_later_item"}, "assistant", "[some_later_item]"),
]


@pytest.mark.parametrize(
    ("item", "role", "text"), STEPS, ids=[item["type"] for item, *_ in STEPS]
)
def test_item_of_another_tool_is_read_as_text(
    item: dict[str, Any], role: str, text: str
) -> None:
    _, read, _ = messages_of(HI, item, {"role": "user", "content": "And now?"})

    assert read == {"role": role, "content": text}


def test_steps_belong_to_the_answer_around_them() -> None:
    step, _, text = STEPS[0]
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "It is a fish."}],
    }

    _, read = messages_of(HI, step, said)

    assert read == {"role": "assistant", "content": f"{text}\n\nIt is a fish."}


def test_any_part_of_an_answer_is_read() -> None:
    parts = [{"type": "output_text", "text": "Hm."}, {"type": "later", "text": "Yes."}]

    _, read = messages_of(HI, {"role": "assistant", "content": parts})

    assert read["content"] == "Hm.\n\n[later Yes.]"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_file", "file_id": "f"},
        {"type": "input_image", "file_id": "f"},
        {"type": "some_later_part"},
    ],
    ids=lambda part: part["type"],
)
def test_any_part_of_an_output_is_read(part: dict[str, Any]) -> None:
    output = [{"type": "input_text", "text": "See "}, part]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": output}

    *_, read = messages_of(HI, call, result)

    assert read == {
        "role": "tool",
        "tool_call_id": "c",
        "content": f"See [{part['type']}: it cannot be read here]",
    }


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (7, "input[0]"),
        (None, "input[0]"),
        ({"type": 7}, "input[0].type"),
        ({"type": "function_call", "arguments": {}}, "input[0].arguments"),
        ({"type": "later", "a": json.loads("[" * 500 + "]" * 500)}, "input[0]"),
    ],
    ids=["number", "null", "type", "arguments", "deep"],
)
def test_malformed_item_is_named(item: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages_of(item)

    assert caught.value.field == field
