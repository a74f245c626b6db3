"""The fields of a chat request, and what is said about those that are no good."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Feature
from shoal.gateway.chat_request import (
    MESSAGES_MAX,
    UNSUPPORTED,
    ChatRequest,
    decode_chat_request,
)
from shoal.store.codec import encode_work

HI = {"role": "user", "content": "hi"}


def decode(**fields: Any) -> ChatRequest:
    body = {"model": "m1", "messages": [HI]} | fields
    return decode_chat_request(json.dumps(body).encode())


def test_a_small_request_is_a_chat() -> None:
    asked = decode()

    assert asked.chat.model == "m1"
    assert asked.chat.messages == (HI,)
    assert asked.chat.max_tokens is None
    assert asked.chat.temperature is None
    assert asked.chat.options == {}
    assert not asked.stream
    assert not asked.include_usage


def test_sampling_fields_become_options() -> None:
    asked = decode(
        max_tokens=5,
        max_completion_tokens=6,
        temperature=1.5,
        top_p=0.9,
        seed=-1,
        presence_penalty=-2,
        frequency_penalty=2,
        stop=["\n", ""],
        stream=True,
        stream_options={"include_usage": True},
    )

    assert asked.chat.max_tokens == 6
    assert asked.chat.temperature == 1.5
    assert asked.chat.options == {
        "top_p": 0.9,
        "seed": -1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "stop": ["\n"],
    }
    assert asked.stream
    assert asked.include_usage


@pytest.mark.parametrize(
    ("stop", "needs"), [("x", {Feature.STOP}), ("", set()), ([], set()), (None, set())]
)
def test_stop_is_a_list_if_there_is_anything_to_stop_at(
    stop: Any, needs: set[Feature]
) -> None:
    chat = decode(stop=stop).chat

    assert chat.needs == needs
    assert chat.options.get("stop", ["x"]) == ["x"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "user", "content": "aa"},
        ),
        (
            {"role": "user", "content": "x", "name": "bob", "refusal": None},
            {"role": "user", "content": "x", "name": "bob"},
        ),
        ({"role": "assistant", "content": "x", "tool_calls": []}, None),
    ],
)
def test_messages_are_made_alike(given: Any, kept: Any) -> None:
    (message,) = decode(messages=[given]).chat.messages

    assert message == (kept or {"role": "assistant", "content": "x"})


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"model": ""}, "model", "length >= 1"),
        ({"model": "m" * 257}, "model", "length <= 256"),
        ({"model": 7}, "model", "expected `str`, got `int`"),
        ({"messages": "hi"}, "messages", "expected `array`, got `str`"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [HI] * (MESSAGES_MAX + 1)}, "messages", "length <="),
        ({"messages": [HI, 7]}, "messages[1]", "expected `object`, got `int`"),
        ({"messages": [{}]}, "messages[0].role", "required, but missing"),
        ({"messages": [{"role": 7}]}, "messages[0].role", "expected `str`"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "expected one of system"),
        ({"messages": [{"role": "tool"}]}, "messages[0].role", "not supported yet"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages[0].content",
            "expected `str | array | null`, got `int`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url is not supported yet",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "input_audio is not supported yet",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "required, but missing",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "not supported yet",
        ),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", ">= 1"),
        ({"max_tokens": 2**31}, "max_tokens", "<= 2147483647"),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": True}, "temperature", "got `bool`"),
        ({"top_p": 1.1}, "top_p", "<= 1"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"seed": 0.5}, "seed", "expected `int"),
        ({"stop": ["a"] * 5}, "stop", "length <= 4"),
        ({"stop": [7]}, "stop[0]", "expected `str`"),
        ({"stop": 7}, "stop", "expected `str | array | null`"),
        ({"stream": "yes"}, "stream", "expected `bool | null`, got `str`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", ""),
        ({"n": 2}, "n", "expected 1"),
        ({"n": 0}, "n", "expected 1"),
    ],
)
def test_a_field_that_is_no_good_is_named(
    fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field
    assert str(raised.value).startswith(field)
    assert words in str(raised.value)


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_what_nothing_can_carry_out_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match="is not supported yet") as raised:
        decode(**{field: {"type": "json_object"}})

    assert raised.value.field == field


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_fields_that_ask_for_nothing_are_no_trouble(field: str) -> None:
    for harmless in (None, *UNSUPPORTED[field]):
        assert decode(**{field: harmless}).chat.model == "m1"


def test_other_fields_are_ignored() -> None:
    more = {"user": "x", "metadata": {}, "store": True, "n": 1, "unheard_of": [[]]}

    assert decode(**more).chat == decode().chat


def test_half_characters_are_replaced() -> None:
    body = rb'{"model":"m\udc00","messages":[{"role":"user","content":"a\ud800b"}]}'

    chat = decode_chat_request(body).chat

    assert chat.model == "m\ufffd"
    assert chat.messages[0]["content"] == "a\ufffdb"


def test_an_escaped_backslash_is_no_half_character() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'

    assert decode_chat_request(body).chat.messages[0]["content"] == r"\ud800"


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_a_chat_or_an_invalid_request(data: bytes) -> None:
    _decode(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=8,
)
names = ["temperature", "max_tokens", "stop", "seed", "top_p", "stream", "n", "tools"]


@given(
    st.fixed_dictionaries(
        {"model": st.text(), "messages": st.just([HI]) | values},
        optional=dict.fromkeys(names, values),
    )
)
def test_any_fields_are_a_chat_or_an_invalid_request(body: dict[str, Any]) -> None:
    _decode(json.dumps(body).encode())


def _decode(data: bytes) -> None:
    try:
        asked = decode_chat_request(data)
    except InvalidRequest:
        return
    assert encode_work(asked.chat)
