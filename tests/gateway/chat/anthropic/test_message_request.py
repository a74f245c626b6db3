import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Feature
from shoal.gateway.chat.anthropic.message_request import (
    IMAGE_TOKENS,
    CountRequest,
    MessageRequest,
    decode_count_request,
    decode_message_request,
)

HI: Any = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "b"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
IMAGE = {"type": "image", "source": PNG}
IMAGE_PART = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64,AA=="},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, "ü"]}}
CHAT_CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a":[1,"ü"]}'},
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}


def decoded(**fields: Any) -> MessageRequest:
    body = {"model": "m1", "max_tokens": 8, "messages": HI, **fields}
    return decode_message_request(json.dumps(body).encode())


def counted(**fields: Any) -> CountRequest:
    body = {"model": "m1", "messages": HI, **fields}
    return decode_count_request(json.dumps(body).encode())


def messages_of(*content: Any, role: str = "user") -> Any:
    """Return the chat's messages for one message with these blocks."""
    request = decoded(messages=[{"role": role, "content": [*content]}])
    return list(request.generation.work.messages)


def result(content: Any = "r", **fields: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": content,
        **fields,
    }


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def text_result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "toolu_1", "content": text}


@pytest.mark.parametrize(
    ("blocks", "messages"),
    [
        ([TEXT | CACHED], [{"role": "user", "content": "b"}]),
        ([TEXT, TEXT], [{"role": "user", "content": "b\n\nb"}]),
        ([], [{"role": "user", "content": ""}]),
        ([TEXT, IMAGE], [{"role": "user", "content": [TEXT, IMAGE_PART]}]),
        (
            [{"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
                    ],
                }
            ],
        ),
        (
            [document({"type": "text", "media_type": "text/plain", "data": "d"})],
            [{"role": "user", "content": "d"}],
        ),
        (
            [
                document(
                    {"type": "content", "content": [TEXT, TEXT]},
                    title="T",
                    context="C",
                    citations={"enabled": False},
                )
            ],
            [{"role": "user", "content": "T\n\nC\n\nb\n\nb"}],
        ),
        (
            [
                {
                    "type": "search_result",
                    "source": "https://x",
                    "title": "T",
                    "content": [TEXT],
                }
            ],
            [{"role": "user", "content": "T\n\nhttps://x\n\nb"}],
        ),
        ([result()], [text_result("r")]),
        ([result([TEXT | CACHED, TEXT])], [text_result("b\n\nb")]),
        ([result(is_error=True)], [text_result("Error: r")]),
        ([{"type": "tool_result", "tool_use_id": "toolu_1"}], [text_result("")]),
        # Results first, because they answer the calls of the message before.
        ([TEXT, result()], [text_result("r"), {"role": "user", "content": "b"}]),
        (
            [result([IMAGE]), TEXT],
            [
                text_result("The result is the image in the next message."),
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Image in the result of toolu_1:"},
                        IMAGE_PART,
                        TEXT,
                    ],
                },
            ],
        ),
    ],
)
def test_a_users_blocks_become_messages(blocks: list[Any], messages: list[Any]) -> None:
    assert messages_of(*blocks) == messages


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([TEXT], {"content": "b"}),
        ([CALL], {"content": "", "tool_calls": [CHAT_CALL]}),
        (
            [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                TEXT | {"citations": [{"type": "char_location"}]},
                CALL,
            ],
            {"content": "b", "tool_calls": [CHAT_CALL], "reasoning_content": "hm"},
        ),
        (
            [{**CALL, "input": {}}],
            {
                "content": "",
                "tool_calls": [
                    {**CHAT_CALL, "function": {"name": "f", "arguments": "{}"}}
                ],
            },
        ),
    ],
)
def test_an_assistants_blocks_become_one_message(
    blocks: list[Any], message: dict[str, Any]
) -> None:
    assert messages_of(*blocks, role="assistant") == [{"role": "assistant", **message}]


@pytest.mark.parametrize(
    ("system", "text"),
    [("s", "s"), ([TEXT | CACHED, TEXT], "b\n\nb")],
)
def test_the_system_prompt_is_the_first_message(system: Any, text: str) -> None:
    chat = decoded(system=system, messages=[*HI]).generation.work

    assert chat.messages == ({"role": "system", "content": text}, *HI)


def test_later_system_messages_are_the_users() -> None:
    more = {"role": "system", "content": [TEXT]}
    answer = {"role": "assistant", "content": "a"}

    chat = decoded(system="s", messages=[more, *HI, more, answer, more]).generation.work

    assert chat.messages == (
        {"role": "system", "content": "s\n\nb"},
        {"role": "user", "content": "hi\n\n<system>\nb\n</system>"},
        answer,
        {"role": "user", "content": "<system>\nb\n</system>"},
    )


def test_messages_of_the_user_that_follow_one_another_are_joined() -> None:
    image = {"role": "user", "content": [IMAGE]}
    answered = {"role": "user", "content": [result(), TEXT]}

    chat = decoded(messages=[*HI, image, answered, *HI]).generation.work

    assert chat.messages == (
        {"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE_PART]},
        text_result("r"),
        {"role": "user", "content": "b\n\nhi"},
    )


@pytest.mark.parametrize("system", [None, "", []])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert decoded(system=system).generation.work.messages == (*HI,)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"top_p": 0.5, "top_k": 5}, {"top_p": 0.5, "top_k": 5}),
        ({"stop_sequences": ["x", ""]}, {"stop": ["x"]}),
        ({"stop_sequences": []}, {}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        (
            {
                "tools": [
                    TOOL
                    | CACHED
                    | {
                        "type": "custom",
                        "description": "d",
                        "strict": True,
                        "eager_input_streaming": True,
                        "defer_loading": False,
                    }
                ],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            {
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "description": "d",
                            "parameters": {"type": "object"},
                            "strict": True,
                        },
                    }
                ],
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            {"tool_choice": "required", "tools": [CHAT_TOOL]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            {"tool_choice": "none", "tools": [CHAT_TOOL]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "tools": [CHAT_TOOL],
            },
        ),
        ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        *(
            (
                fields,
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {
                            "name": "output",
                            "schema": {"type": "object"},
                            "strict": True,
                        },
                    }
                },
            )
            for form in [{"type": "json_schema", "schema": {"type": "object"}}]
            for fields in ({"output_config": {"format": form}}, {"output_format": form})
        ),
    ],
)
def test_options_are_those_of_a_chat(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    chat = decoded(**fields).generation.work

    assert chat.options == options
    assert [*chat.options] == [*options]  # in the order of the table


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "adaptive", "display": "summarized"}, True),
    ],
)
def test_reasoning_is_shown_to_those_who_ask(thinking: Any, shown: bool) -> None:
    assert decoded(thinking=thinking).shows_thinking is shown


def test_the_rest_of_a_request() -> None:
    request = decoded(
        stream=True,
        temperature=0.5,
        service_tier="flex",
        metadata={"user_id": "x" * 300 + "_session_1"},
    ).generation

    chat = request.work
    assert (chat.model, chat.max_tokens, chat.temperature) == ("m1", 8, 0.5)
    assert (request.stream, request.tier) == (True, "flex")
    assert len(request.session) == 256
    assert request.session.endswith("_session_1")


def test_what_claude_code_sends_is_accepted() -> None:
    request = decoded(
        system=[
            {"type": "text", "text": "x-billing-header: v=1"},
            {"type": "text", "text": "You are a CLI." + "x" * 100_000, **CACHED},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder/>"},
                    {"type": "text", "text": "hi", **CACHED},
                ],
            }
        ],
        tools=[{**TOOL, "name": f"tool_{number}", **CACHED} for number in range(300)],
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={
            "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
        },
        output_config={"effort": "high", "task_budget": {"type": "tokens"}},
        metadata={"user_id": json.dumps({"device_id": "0" * 64, "session_id": "s"})},
        max_tokens=64000,
        diagnostics={"previous_message_id": None},
        speed="standard",
        mcp_servers=[],
        container=None,
    )

    assert len(request.generation.work.options["tools"]) == 300  # type: ignore[arg-type]  # JSON


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
            "tools[1].type",
        ),
        (
            {"tools": [{"type": "computer_toolset_20260801"}]},
            "tools[0].type",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
        ),
        ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers"),
        ({"container": "container_1"}, "container"),
        ({"thread": {"id": "t"}}, "thread"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(**fields)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("web_search_20250305", "web_search_20250305, which Anthropic's servers run,"),
        ("bash_20250124", "bash_20250124"),
    ],
)
def test_error_says_whose_servers_a_tool_needs(kind: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(tools=[{"type": kind, "name": "t"}])

    assert str(caught.value) == f"tools[0].type: {said} is not supported"


PDF = document({"type": "base64", "media_type": "application/pdf", "data": "JVBE"})


@pytest.mark.parametrize(
    ("role", "block", "field", "words"),
    [
        ("user", PDF, "source.type", "application/pdf"),
        ("user", document({"type": "file", "file_id": "f"}), "source.type", "file"),
        (
            "user",
            document({"type": "text", "data": "d"}, citations={"enabled": True}),
            "citations",
            "not supported",
        ),
        (
            "user",
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "source.type",
            "file is not supported",
        ),
        ("user", {"type": "image"}, "source", "an object"),
        ("user", {"type": "image", "source": "x"}, "source", "an object"),
        ("user", {"type": "text"}, "text", "missing"),
        ("user", {"type": "tool_result"}, "tool_use_id", "missing"),
        ("user", CALL, "type", "tool_use is not supported"),
        ("assistant", IMAGE, "type", "image is not supported"),
        ("assistant", {**CALL, "input": [1]}, "input", "xpected `object`"),
        ("assistant", {"type": "thinking"}, "thinking", "missing"),
    ],
)
def test_unreadable_block_is_named(
    role: str, block: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        messages_of(TEXT, block, role=role)

    assert caught.value.field == f"messages[0].content[1].{field}"


def test_only_a_user_sends_images() -> None:
    with pytest.raises(InvalidRequest, match="only a user"):
        messages_of(IMAGE, role="system")


def test_features_are_required_of_workers() -> None:
    message = {"role": "user", "content": [IMAGE]}

    chat = decoded(messages=[message], tools=[TOOL]).generation.work

    assert chat.needs == {Feature.IMAGES, Feature.TOOLS}


def test_count_covers_texts_tools_calls_and_images() -> None:
    text = counted().tokens
    assert text == 1

    long = counted(system="x" * 400)
    tools = counted(tools=[{**TOOL, "description": "x" * 400}])
    calls = counted(
        messages=[
            *HI,
            {"role": "assistant", "content": [{**CALL, "input": {"a": "x" * 400}}]},
        ]
    )
    image = counted(messages=[{"role": "user", "content": [TEXT, IMAGE]}])

    assert long.model == "m1"
    assert long.tokens == text + 100
    assert 100 < tools.tokens < 150
    assert 100 < calls.tokens < 150
    assert image.tokens == 1 + IMAGE_TOKENS


@given(st.binary() | st.text().map(str.encode))
def test_garbage_is_rejected(data: bytes) -> None:
    for decode in (decode_message_request, decode_count_request):
        with pytest.raises(InvalidRequest):
            decode(data)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "source", "content", "data", "media_type", "id"]
            ),
            each | st.sampled_from(["text", "image", "document", "tool_result"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSONS, max_size=3), st.sampled_from(["user", "assistant", "system"]))
def test_any_blocks_are_read_or_refused_by_name(blocks: Any, role: str) -> None:
    refused = None
    try:
        messages = [*HI, {"role": role, "content": blocks}]
        chat = decoded(messages=messages).generation.work
    except InvalidRequest as error:
        refused = error.field or "the body"

    if refused is None:
        assert all(each["role"] in (role, "user", "tool") for each in chat.messages)
    else:
        assert refused.startswith("messages[1]")
