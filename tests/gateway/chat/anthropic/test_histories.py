"""Conversations that were held with Anthropic's own servers go on here."""

import json
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.gateway.chat.anthropic.message_request import decode_message_request
from shoal.gateway.chat.messages import WORD_MAX

HI: dict[str, Any] = {"role": "user", "content": "hi"}
ENCRYPTED = "EqgfCioIARgBIiQ3" * 100


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m1", "max_tokens": 8, "messages": [*messages], **fields}
    work = decode_message_request(json.dumps(body).encode()).generation.work
    return [dict(message) for message in work.messages]


def answered(*blocks: dict[str, Any]) -> str:
    """Return the text of an answer with these blocks, as a model reads it."""
    _, answer, _ = messages_of(HI, {"role": "assistant", "content": [*blocks]}, HI)
    assert answer.keys() == {"role", "content"}
    text: str = answer["content"]
    return text


def result_of(*content: Any) -> str:
    """Return the text of a tool's result with this content."""
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [*content]}
    _, _, read = messages_of(
        HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    )
    assert (read["role"], read["tool_call_id"]) == ("tool", "t1")
    text: str = read["content"]
    return text


# What Anthropic's servers did within an answer.  The blocks are those of Anthropic's
# API reference: "Web search tool", "Code execution tool", "MCP connector" and others.

SEARCH = {
    "type": "server_tool_use",
    "id": "srvtoolu_1",
    "name": "web_search",
    "input": {"query": "herring"},
}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [
        {
            "type": "web_search_result",
            "url": "https://example.com/herring",
            "title": "Herring",
            "encrypted_content": ENCRYPTED,
            "page_age": None,
        }
    ],
}
STEPS: list[tuple[dict[str, Any], str]] = [
    (SEARCH, '[web_search {"query": "herring"}]'),
    (
        FOUND,
        '[web_search_tool_result [{"type": "web_search_result", '
        '"url": "https://example.com/herring", "title": "Herring"}]]',
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "web_search_tool_result_error",
                "error_code": "max_uses_exceeded",
            },
        },
        '[web_search_tool_result {"type": "web_search_tool_result_error", '
        '"error_code": "max_uses_exceeded"}]',
    ),
    (
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "42\n",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
        '[bash_code_execution_tool_result {"type": "bash_code_execution_result", '
        '"stdout": "42\\n", "return_code": 0}]',
    ),
    (
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "web_fetch_result",
                "url": "https://example.com/a.pdf",
                "content": {
                    "type": "document",
                    "source": {"type": "base64", "data": "J" * (WORD_MAX + 1)},
                },
            },
        },
        '[web_fetch_tool_result {"type": "web_fetch_result", '
        '"url": "https://example.com/a.pdf", '
        '"content": {"type": "document", "source": {"type": "base64"}}}]',
    ),
    (
        {
            "type": "mcp_tool_use",
            "id": "mcptoolu_1",
            "name": "echo",
            "server_name": "s",
            "input": {"value": 1},
        },
        '[echo {"value": 1}]',
    ),
    (
        {
            "type": "mcp_tool_result",
            "tool_use_id": "mcptoolu_1",
            "is_error": False,
            "content": [{"type": "text", "text": "one"}],
        },
        '[mcp_tool_result [{"type": "text", "text": "one"}]]',
    ),
    (
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "f"}],
            },
        },
        '[tool_search_tool_result {"type": "tool_search_tool_search_result", '
        '"tool_references": [{"type": "tool_reference", "tool_name": "f"}]}]',
    ),
    ({"type": "compaction", "content": "So far: hi."}, "[compaction So far: hi.]"),
    ({"type": "compaction", "content": None}, "[compaction]"),
    ({"type": "some_later_block"}, "[some_later_block]"),
]


@pytest.mark.parametrize(
    ("block", "text"), STEPS, ids=[block["type"] for block, _ in STEPS]
)
def test_step_of_a_server_is_read_as_text(block: dict[str, Any], text: str) -> None:
    assert answered(block) == text


def test_steps_are_among_the_texts_as_they_came() -> None:
    before = {"type": "text", "text": "I look."}
    after = {
        "type": "text",
        "text": "It is a fish.",
        "citations": [
            {"type": "web_search_result_location", "encrypted_index": ENCRYPTED}
        ],
    }

    text = answered(before, SEARCH, after)

    assert text == 'I look.\n\n[web_search {"query": "herring"}]\n\nIt is a fish.'


def test_what_only_a_user_sends_is_refused_in_an_answer() -> None:
    with pytest.raises(InvalidRequest, match="container_upload is not supported"):
        answered({"type": "container_upload", "file_id": "f"})


# Results of tools, which programs write: an error would end a conversation for ever.

PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "tool_reference", "tool_name": "ExitPlanMode"},
            "The tool ExitPlanMode is available.",
        ),
        (
            {"type": "document", "source": PDF},
            "[document as application/pdf: it cannot be read here]",
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "[image: it cannot be read here]",
        ),
        (
            {"type": "resource_link", "uri": "a"},
            "[resource_link: it cannot be read here]",
        ),
    ],
)
def test_any_block_in_a_result_is_read(block: dict[str, Any], text: str) -> None:
    assert result_of(block) == text
    assert result_of({"type": "text", "text": "a"}, block) == f"a\n\n{text}"


def test_a_result_without_content_is_empty() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": None}

    *_, read = messages_of(
        HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    )

    assert read["content"] == ""


@pytest.mark.parametrize(
    ("content", "field"),
    [(7, ""), ([{"text": "a"}], "[0].type"), ([{"type": "text"}], "[0].text")],
)
def test_a_malformed_result_is_named(content: Any, field: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}

    with pytest.raises(InvalidRequest) as caught:
        messages_of({"role": "user", "content": [result]})

    assert caught.value.field == f"messages[0].content[0].content{field}"


# Tools that find tools.


def test_a_search_for_tools_is_left_out_beside_them() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}
    search = {
        "type": "tool_search_tool_regex_20251119",
        "name": "tool_search_tool_regex",
    }
    body = {"model": "m1", "max_tokens": 8, "messages": [HI], "tools": [search, tool]}

    work = decode_message_request(json.dumps(body).encode()).generation.work

    described: Any = work.options["tools"]
    assert [each["function"]["name"] for each in described] == ["f"]
