"""The fields of a chat request, and errors of invalid ones."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.domain.json_limits import NESTING_MAX
from shoal.domain.options import CHAT_OPTIONS, OptionType
from shoal.domain.work import Chat, Feature
from shoal.engines.requests import RESERVED
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.messages import MESSAGES_MAX
from shoal.gateway.chat.openai.chat_request import (
    UNSUPPORTED,
    CreateChatCompletion,
    decode_chat_request,
)
from shoal.gateway.chat.options import BEGUN, DECIDED, EXTRA_MAX, STOPS_MAX
from shoal.gateway.http.decoding import OBJECT_MAX, SURROGATES_MAX
from shoal.store.codec import encode_work

HI = {"role": "user", "content": "hi"}
PICTURE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Bonn"}'},
}


def decode(**fields: Any) -> GenerationRequest[Chat]:
    body = {"model": "m1", "messages": [HI]} | fields
    return decode_chat_request(json.dumps(body).encode())


def test_minimal_request_is_decoded() -> None:
    asked = decode()

    assert asked.work.model == "m1"
    assert asked.work.messages == (HI,)
    assert asked.work.max_tokens is None
    assert asked.work.temperature is None
    assert asked.work.options == {}
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

    assert asked.work.max_tokens == 6
    assert asked.work.temperature == 1.5
    assert asked.work.options == {
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
def test_stop_becomes_a_list(stop: Any, needs: set[Feature]) -> None:
    chat = decode(stop=stop).work

    assert chat.needs == needs
    assert chat.options.get("stop", ["x"]) == ["x"]


def test_engine_options_are_forwarded_unchanged() -> None:
    more = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"50256": -100},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "top_k": 40,
        "chat_template_kwargs": {"enable_thinking": False},
    }

    work = decode(**more).work

    assert work.options == more
    assert work.needs == {
        Feature.TOOLS,
        Feature.SCHEMA,
        Feature.LOGPROBS,
        Feature.CHOICES,
        Feature.OPTIONS,
    }


SAMPLES: dict[OptionType, Any] = {
    OptionType.FLAG: True,
    OptionType.TEXT: "low",
    OptionType.OBJECT: {"a": 1},
    OptionType.NUMBERS: {"1": 1.0},
}


def test_options_are_forwarded_within_their_bounds() -> None:
    for option in CHAT_OPTIONS:
        if option.type is OptionType.STRUCTURED:
            continue
        value = SAMPLES.get(option.type, option.maximum)
        more: dict[str, Any] = (
            {"logprobs": True} if option.name == "top_logprobs" else {}
        )
        if option.name == "parallel_tool_calls":
            more = {"tools": [TOOL]}

        assert decode(**{option.name: value} | more).work.options[option.name] == value

        if option.type in (OptionType.NUMBER, OptionType.INTEGER):
            assert option.maximum is not None
            with pytest.raises(InvalidRequest, match=option.name):
                decode(**{option.name: option.maximum + 1})


@pytest.mark.parametrize(
    "nothing",
    [
        {"n": 1},
        {"logprobs": False},
        {"logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}},
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
    ],
    ids=str,
)
def test_neutral_fields_need_no_features(nothing: dict[str, Any]) -> None:
    work = decode(**nothing).work

    assert work.options == {}
    assert work.needs == set()


def test_tool_messages_are_preserved() -> None:
    messages = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]

    work = decode(messages=messages).work

    assert work.messages == tuple(messages)
    assert work.needs == {Feature.TOOLS}


def test_images_and_audio_stay_parts() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    parts = [{"type": "text", "text": "what is this?"}, PICTURE, sound]

    work = decode(messages=[{"role": "user", "content": parts}]).work

    assert work.messages[0]["content"] == parts
    assert work.needs == {Feature.IMAGES, Feature.AUDIO}


def test_session_and_tier_are_decoded() -> None:
    asked = decode(prompt_cache_key="mine", service_tier="flex")

    assert (asked.session, asked.tier) == ("mine", "flex")


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
def test_messages_are_normalized(given: Any, kept: Any) -> None:
    (message,) = decode(messages=[given]).work.messages

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
        ({"messages": [{"role": "function"}]}, "messages[0].role", "not supported"),
        ({"messages": [{"role": "tool"}]}, "messages[0].tool_call_id", "missing"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages[0].content",
            "expected `str | array | null`, got `int`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            "required, but missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages[0].content[0].type",
            "file is not supported",
        ),
        (
            {"messages": [{"role": "system", "content": [PICTURE]}]},
            "messages[0].content",
            "only a user's message may have more than text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "required, but missing",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
            "required, but missing",
        ),
        (
            {"messages": [HI | {"tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "only an assistant's message may call tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [TOOL | {"type": "x"}]}, "tools[0].type", "'x'"),
        ({"tools": [TOOL] * 129}, "tools", "length <= 128"),
        ({"tools": [TOOL] * 2}, "tools", "the same name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}},
            "tool_choice",
            "there is no tool 'other'",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"logit_bias": {"50256": 101}}, "logit_bias[...]", "<= 100"),
        ({"top_k": 1.5}, "top_k", "expected `int"),
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
        ({"stop": ["a"] * (STOPS_MAX + 1)}, "stop", f"length <= {STOPS_MAX}"),
        ({"stop": [7]}, "stop[0]", "expected `str`"),
        ({"stop": 7}, "stop", "expected `str | array | null`"),
        ({"stream": "yes"}, "stream", "expected `bool | null`, got `str`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", ""),
        ({"n": 129}, "n", "<= 128"),
        ({"n": 0}, "n", ">= 1"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field
    assert str(raised.value).startswith(field)
    assert words in str(raised.value)


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_unsupported_field_is_rejected_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match="is not supported") as raised:
        decode(**{field: {"type": "json_object"}})

    assert raised.value.field == field


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_neutral_unsupported_fields_are_accepted(field: str) -> None:
    for harmless in (None, *UNSUPPORTED[field]):
        assert decode(**{field: harmless}).work.model == "m1"


def test_fields_that_change_no_answer_are_ignored() -> None:
    more = {"user": "x", "metadata": {}, "store": True, "n": 1, "unheard_of": None}

    assert decode(**more).work == decode().work


def test_unknown_fields_go_to_engines_that_take_any() -> None:
    work = decode(unheard_of=[[]], min_tokens=3, top_p=0.5).work

    assert work.options == {"top_p": 0.5, "unheard_of": [[]], "min_tokens": 3}
    assert work.needs == {Feature.FIELDS}


@pytest.mark.parametrize("field", sorted(DECIDED))
def test_fields_that_engines_get_from_workers_alone_are_refused(field: str) -> None:
    if field in CreateChatCompletion.__struct_fields__:
        return

    for harmless in (None, *DECIDED[field]):
        assert decode(**{field: harmless}).work == decode().work
    with pytest.raises(InvalidRequest, match="is not supported") as raised:
        decode(**{field: 7})
    assert raised.value.field == field


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_flags_of_a_begun_answer_say_what_happens_anyway(last: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": last, "content": "b"}]
    for field, value in BEGUN.items():
        fits = value if last == "assistant" else not value

        work = decode(messages=messages, **{field: fits}).work
        with pytest.raises(InvalidRequest, match=field) as raised:
            decode(messages=messages, **{field: not fits})

        assert work == decode(messages=messages).work
        assert raised.value.field == field


def test_every_field_that_engines_set_is_known_or_refused() -> None:
    names = {*CreateChatCompletion.__struct_fields__, *DECIDED, *BEGUN}

    assert names >= RESERVED


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({f"x{number}": 1 for number in range(EXTRA_MAX + 1)}, "x"),
        ({"huge": "y" * OBJECT_MAX, "small": 1}, "huge"),
    ],
)
def test_unknown_fields_have_limits(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown fields") as raised:
        decode(**fields)

    assert (raised.value.field or "").startswith(named)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


FREE: dict[str, Any] = {
    "chat_template_kwargs": lambda value: {"chat_template_kwargs": value},
    "response_format.json_schema.schema": lambda value: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": value},
        }
    },
    "tools[0].function.parameters": lambda value: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]
    },
}
"""Fields that accept any object, and bodies with a nested one."""


@pytest.mark.parametrize("path", FREE)
def test_free_form_fields_are_limited(path: str) -> None:
    body = FREE[path]
    field = path.partition("[")[0].partition(".")[0]

    assert field in decode(**body(nested(NESTING_MAX))).work.options
    assert field not in decode(**body(None)).work.options or field != path
    for bad, words in (
        (nested(NESTING_MAX + 1), "nested more than 100 deep"),
        ({"a": "x" * OBJECT_MAX}, "more than 1048576 bytes"),
        ([], "expected `object`"),
    ):
        with pytest.raises(InvalidRequest, match=words) as raised:
            decode(**body(bad))
        assert raised.value.field in (path, field)


def test_total_size_of_tools_is_limited() -> None:
    tools = [
        {"function": {"name": f"f{n}", "parameters": {"a": "x" * (OBJECT_MAX // 4)}}}
        for n in range(4)
    ]

    with pytest.raises(InvalidRequest, match="tools: more than 1048576 bytes"):
        decode(tools=tools)


@pytest.mark.parametrize("path", FREE)
def test_surrogates_are_replaced_in_every_field(path: str) -> None:
    options = decode(**FREE[path]({"a": "\ud800"})).work.options

    assert "\ufffd" in str(options)


def test_surrogate_in_a_long_body_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="half a character"):
        decode(messages=[{"role": "user", "content": "\ud800" + "x" * SURROGATES_MAX}])


def test_surrogates_are_replaced() -> None:
    body = rb'{"model":"m\udc00","messages":[{"role":"user","content":"a\ud800b"}]}'

    chat = decode_chat_request(body).work

    assert chat.model == "m\ufffd"
    assert chat.messages[0]["content"] == "a\ufffdb"


def test_escaped_backslash_is_not_a_surrogate() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'

    assert decode_chat_request(body).work.messages[0]["content"] == r"\ud800"


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_decode_or_are_rejected(data: bytes) -> None:
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
def test_any_fields_decode_or_are_rejected(body: dict[str, Any]) -> None:
    _decode(json.dumps(body).encode())


def _decode(data: bytes) -> None:
    try:
        asked = decode_chat_request(data)
    except InvalidRequest:
        return
    assert encode_work(asked.work)
