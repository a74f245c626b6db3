from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.recordings import Case, recorded
from protocols.test_conformance import chats, texts, values
from shoal.domain.options import CHAT_OPTIONS, Option, OptionType
from shoal.domain.work import ANY_MODEL, Chat, Feature
from shoal.protocols.tealenet.codec.chats import read_chat, write_chat
from shoal.protocols.tealenet.codec.envelope import BadMessage, decode, encode
from shoal.protocols.tealenet.codec.messages import InferenceRequest

ID = "550E8400-E29B-41D4-A716-446655440000"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALLS: list[dict[str, Any]] = [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {}}}
]


class AcceptedMessage(msgspec.Struct):
    """A message that both Macs and Rust peers accept."""

    role: str
    content: str | list[dict[str, Any]]
    name: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    tool_call_id: str | msgspec.UnsetType = msgspec.UNSET


class AcceptedRequest(msgspec.Struct):
    """A request that both Macs and Rust peers accept: its fields have these types."""

    messages: list[AcceptedMessage]
    stream: bool
    stream_options: dict[str, bool]
    model: str | msgspec.UnsetType = msgspec.UNSET
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    stop: list[str] | msgspec.UnsetType = msgspec.UNSET
    presence_penalty: float | msgspec.UnsetType = msgspec.UNSET
    frequency_penalty: float | msgspec.UnsetType = msgspec.UNSET
    tools: list[Any] | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    user: str | msgspec.UnsetType = msgspec.UNSET
    group_id: str | msgspec.UnsetType = msgspec.UNSET


names = (
    st.sampled_from([*AcceptedRequest.__struct_fields__, "top_k", "tool_choice"])
    | texts
)


@settings(max_examples=examples(0.4))
@given(chat=chats, options=st.dictionaries(names, values, max_size=6))
def test_every_written_request_is_valid_for_real_peers(
    chat: Chat, options: dict[str, Any]
) -> None:
    chat = Chat(chat.model, chat.messages, chat.max_tokens, chat.temperature, options)

    request = write_chat(chat)

    accepted = msgspec.convert(request, AcceptedRequest)
    assert accepted.stream
    assert accepted.stream_options["include_usage"]
    assert None not in request.values()


OPTIONS: dict[str, Any] = {
    "top_p": 0.9,
    "seed": 42,
    "stop": ["</s>"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "user": "u",
    "top_k": 5,
    "logit_bias": {"5": -100},
}

VALUES: dict[OptionType, Any] = {
    OptionType.NUMBER: 0.5,
    OptionType.INTEGER: 7,
    OptionType.FLAG: True,
    OptionType.TEXT: "low",
    OptionType.OBJECT: {"a": True},
    OptionType.NUMBERS: {"5": -100},
}


def test_a_chat_round_trips() -> None:
    messages: tuple[dict[str, Any], ...] = (
        {"role": "system", "content": "be brief"},
        HI,
        {"role": "assistant", "content": "", "tool_calls": [{"index": 0} | CALLS[0]]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
    )
    chat = Chat("m", messages, 256, 0.5, OPTIONS)

    assert read_chat(received(write_chat(chat))) == chat


def test_messages_are_written_in_the_form_of_macs() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    chat = Chat(
        "m",
        (
            {"role": "developer", "content": parts, "name": None},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
        ),
    )

    assert write_chat(chat)["messages"] == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"index": 0} | CALLS[0]]},
    ]


def test_a_single_stop_string_becomes_a_list() -> None:
    assert write_chat(Chat("m", (HI,), options={"stop": "x"}))["stop"] == ["x"]
    assert read_chat({"messages": [], "stop": "x"}).options == {"stop": ["x"]}


def test_stream_options_keep_only_booleans() -> None:
    options = {"stream_options": {"a": True, "b": 1, "include_usage": False}}

    request = write_chat(Chat("m", (HI,), options=options))

    assert request["stream_options"] == {"a": True, "include_usage": True}


@pytest.mark.parametrize(
    ("limit", "read"),
    [(None, None), (-1, None), (0, 1), (5, 5), (5.0, 5), (2**60, 2**31 - 1)],
)
def test_the_token_limit_is_an_integer_or_none(
    limit: float | None, read: int | None
) -> None:
    chat = read_chat(received({"messages": [HI], "max_tokens": limit}))

    assert chat.max_tokens == read
    assert isinstance(chat.max_tokens, int | None)


def test_neutral_options_require_no_features() -> None:
    neutral = {
        "stop": [],
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "n": 1.0,
        "logprobs": False,
        "logit_bias": {},
        "seed": None,
    }

    chat = read_chat(received({"messages": [HI], **neutral}))

    assert chat == Chat(ANY_MODEL, (HI,))
    assert chat.needs == frozenset()


def test_unknown_options_are_ignored() -> None:
    chat = read_chat({"messages": [HI], "lora": "x", "n_predict": -1, "group_id": "g"})

    assert chat.options == {}


def test_a_plain_chat_requires_the_features_that_it_uses() -> None:
    chat = read_chat(received({"messages": [HI], **OPTIONS, "n": 2.0, "seed": 7.0}))

    assert chat.options["n"] == 2
    assert isinstance(chat.options["seed"], int)
    assert chat.needs >= {Feature.TOOLS, Feature.SCHEMA, Feature.STOP, Feature.CHOICES}


def test_absent_content_becomes_an_empty_text() -> None:
    messages = [{"role": "user"}, {"role": "assistant", "tool_calls": CALLS}]

    chat = read_chat({"messages": messages})

    assert chat.messages == ({"role": "user", "content": ""}, messages[1])


@recorded("cluster_decode", "cluster_swift_emits", "cluster_rust_emits")
def test_requests_of_real_peers_are_read_as_chats(case: Case) -> None:
    try:
        message = decode(case["json_text"])
    except BadMessage:
        return
    if not isinstance(message, InferenceRequest):
        return

    chat = read_chat(message.request)

    request = message.request
    assert chat.model == request.get("model", ANY_MODEL)
    assert chat.temperature == request.get("temperature")
    assert len(chat.messages) == len(request["messages"])
    kept = {"top_p", "seed", "user", "tools", "response_format", "top_k"}
    for name in kept & request.keys():
        assert chat.options[name] == request[name]


@pytest.mark.parametrize("option", CHAT_OPTIONS, ids=lambda option: option.name)
def test_every_option_of_the_table_round_trips(option: Option) -> None:
    structured = option.type is OptionType.STRUCTURED
    value = OPTIONS[option.name] if structured else VALUES[option.type]
    options = {"tools": TOOLS, option.name: value}

    chat = read_chat(received(write_chat(Chat("m", (HI,), options=options))))

    assert chat.options[option.name] == value


def received(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request as the peer decodes it."""
    read = decode(encode(InferenceRequest(ID, request, True)))
    assert isinstance(read, InferenceRequest)
    return read.request
