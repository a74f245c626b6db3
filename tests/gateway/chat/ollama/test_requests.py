"""Ollama's chats and completions as jobs: tables from its API reference."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Chat, Completion
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.ollama.requests import (
    ModelLoad,
    OllamaRequest,
    decode_ollama_chat,
    decode_ollama_prompt,
)
from shoal.store.codec import encode_work

HI = [{"role": "user", "content": "hi"}]
PNG = "iVBORw0KGgoAAAANSUhEUg=="
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repeat_penalty": 1.2}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


def chat(**fields: Any) -> GenerationRequest[Chat | Completion]:
    return asked(decode_ollama_chat, {"messages": HI} | fields)


def prompt(**fields: Any) -> GenerationRequest[Chat | Completion]:
    return asked(decode_ollama_prompt, {"prompt": "hi"} | fields)


def asked(decode: Any, fields: Any) -> GenerationRequest[Chat | Completion]:
    decoded: OllamaRequest = decode(json.dumps({"model": "m1"} | fields).encode())
    assert isinstance(decoded, GenerationRequest)
    return decoded


def test_an_answer_streams_unless_the_client_says_no() -> None:
    assert [chat(stream=each).stream for each in (True, False, None)] == [
        *(True, False, True),
    ]
    assert chat().stream
    assert prompt().stream


@pytest.mark.parametrize(
    ("options", "max_tokens", "temperature", "found"),
    [
        ({}, None, None, {}),
        ({"num_predict": 7, "temperature": 0}, 7, 0.0, {}),
        ({"num_predict": -1}, None, None, {}),
        ({"num_predict": -2}, None, None, {}),
        ({"num_predict": 0}, None, None, {}),
        (
            {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 42},
            *(None, None),
            {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 42},
        ),
        (PENALTIES, None, None, PENALTIES),
        ({"stop": ["\n", ""]}, None, None, {"stop": ["\n"]}),
        ({"stop": "user:"}, None, None, {"stop": ["user:"]}),
        ({"num_ctx": 4096, "num_gpu": 1}, None, None, {}),
    ],
)
def test_options_of_models_are_those_of_a_job(
    options: Any,
    max_tokens: int | None,
    temperature: float | None,
    found: dict[str, Any],
) -> None:
    for work in (chat(options=options).work, prompt(options=options).work):
        assert work.max_tokens == max_tokens
        assert work.temperature == temperature
        assert work.options == found


@pytest.mark.parametrize(
    ("format", "found"),
    [
        ("", None),
        (None, None),
        ("json", {"type": "json_object"}),
        (
            SCHEMA,
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA},
            },
        ),
    ],
)
def test_format_is_the_form_of_the_answer(format: Any, found: Any) -> None:
    for work in (chat(format=format).work, prompt(format=format).work):
        assert work.options.get("response_format") == found


@pytest.mark.parametrize(
    ("think", "found"),
    [
        (None, {}),
        (True, {"chat_template_kwargs": {"enable_thinking": True}}),
        (False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("high", {"reasoning_effort": "high"}),
    ],
)
def test_thinking_is_switched_or_has_an_effort(think: Any, found: Any) -> None:
    assert chat(think=think).work.options == found
    assert prompt(think=think).work.options == found


def test_messages_are_those_of_a_chat() -> None:
    work = chat(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what is it?", "images": [PNG, "/9j/4AAQ"]},
            {"role": "assistant", "content": "a cat", "thinking": "whiskers"},
        ]
    ).work

    assert isinstance(work, Chat)
    assert work.messages == (
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{PNG}"},
                },
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/jpeg;base64,/9j/4AAQ"},
                },
                {"type": "text", "text": "what is it?"},
            ],
        },
        {"role": "assistant", "content": "a cat", "reasoning_content": "whiskers"},
    )


def calls(*names: str) -> dict[str, Any]:
    """Return a message that calls functions, as Ollama's client repeats it."""
    functions = [{"function": {"name": each, "arguments": {"n": 1}}} for each in names]
    return {"role": "assistant", "content": "", "tool_calls": functions}


@pytest.mark.parametrize(
    ("called", "results", "answered"),
    [
        (["a"], [{}], ["call_0"]),
        (["a", "b"], [{}, {}], ["call_0", "call_1"]),
        (["a", "b"], [{"tool_name": "b"}, {"tool_name": "a"}], ["call_1", "call_0"]),
        (["a", "a"], [{"tool_name": "a"}] * 2, ["call_0", "call_1"]),
        (["a", "b"], [{"tool_call_id": "call_1"}, {}], ["call_1", "call_0"]),
        (
            ["a", "b", "a"],
            [{"tool_call_id": "call_0", "tool_name": "a"}, {"tool_name": "a"}, {}],
            ["call_0", "call_2", "call_1"],
        ),
    ],
)
def test_results_of_tools_belong_to_their_calls(
    called: list[str], results: list[dict[str, Any]], answered: list[str]
) -> None:
    told = [{"role": "tool", "content": "5", **each} for each in results]

    work = chat(messages=[*HI, calls(*called), *told], tools=[WEATHER]).work

    assert isinstance(work, Chat)
    made = work.messages[1]["tool_calls"]
    assert made == [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": '{"n":1}'},
        }
        for number, name in enumerate(called)
    ]
    assert [each["tool_call_id"] for each in work.messages[2:]] == answered
    assert work.options["tools"] == [WEATHER]


def test_result_belongs_to_the_last_call_with_its_id() -> None:
    """A client may count its ids anew in each turn, and leave a call unanswered."""
    again = calls("a", "b")
    again["tool_calls"][1]["id"] = "call_0"
    result = {"role": "tool", "tool_call_id": "call_0", "tool_name": "b"}
    first = {"role": "tool", "content": "5"}

    work = chat(messages=[*HI, again, result, calls("c"), first]).work

    assert isinstance(work, Chat)
    answered = [each.get("tool_call_id") for each in work.messages]
    assert [each for each in answered if each] == ["call_0", "call_2"]


@pytest.mark.parametrize(
    ("before", "result", "call_id"),
    [
        (HI, {}, "call_0"),
        (HI, {"tool_name": "b"}, "call_0"),
        (HI, {"tool_call_id": "c7"}, "c7"),
        ([calls("a")], {"tool_name": "b"}, "call_1"),
        ([calls("a"), {"role": "tool"}], {}, "call_1"),
        ([calls("a"), {"role": "tool"}], {"tool_call_id": "call_0"}, "call_0"),
        ([calls("a")], {"tool_call_id": "call_0", "tool_name": "b"}, "call_0"),
    ],
    ids=[
        "no call",
        "named",
        "with an id",
        "of another",
        "one more",
        "again",
        "renamed",
    ],
)
def test_result_without_a_call_is_read(
    before: list[dict[str, Any]], result: dict[str, Any], call_id: str
) -> None:
    told = {"role": "tool", "content": "5", **result}

    work = chat(messages=[*before, told]).work

    assert isinstance(work, Chat)
    last = {"role": "tool", "content": "5", "tool_call_id": call_id}
    assert work.messages[-1] == last


def test_a_prompt_is_a_question_after_its_instructions() -> None:
    work = prompt(system="be brief", images=[PNG]).work

    assert isinstance(work, Chat)
    assert [each["role"] for each in work.messages] == ["system", "user"]
    assert work.text == "be brief\nhi"


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"raw": True}, {}), ({"suffix": "end"}, {"suffix": "end"})],
)
def test_a_raw_prompt_is_continued(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    asked = prompt(prompt="[INST] hi", options={"num_predict": 3}, **fields)

    assert asked.work == Completion("m1", "[INST] hi", 3, None, options)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "load"),
        ({"keep_alive": "5m"}, "load"),
        ({"keep_alive": 0}, "unload"),
        ({"keep_alive": "0"}, "unload"),
    ],
)
def test_nothing_to_answer_is_a_model_to_load(
    fields: dict[str, Any], reason: str
) -> None:
    loaded = ModelLoad("m1", stream=True, reason=reason)
    body = json.dumps({"model": "m1", **fields}).encode()

    assert decode_ollama_chat(body) == loaded
    assert decode_ollama_chat(body.replace(b"}", b',"messages":[]}')) == loaded
    assert decode_ollama_prompt(body) == loaded
    assert decode_ollama_prompt(body.replace(b"}", b',"prompt":""}')) == loaded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model: expected"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\].role: required"),
        ({"messages": [{"role": "boss"}]}, r"messages\[0\].role: expected one of sys"),
        (
            {"messages": [{**calls("a"), "role": "user"}]},
            r"messages\[0\].tool_calls: only an assistant",
        ),
        (
            {"messages": [{"role": "system", "images": [PNG]}]},
            r"messages\[0\].images: only a user",
        ),
        (
            {"messages": [{"role": "user", "images": ["http://h/i.png"]}]},
            r"messages\[0\].images: expected PNG",
        ),
        ({"format": "xml"}, 'format: expected "json" or'),
        ({"format": [1]}, 'format: expected "json" or'),
        ({"think": "hard"}, "think: expected true, false"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"tools": [{**WEATHER, "type": "search"}]}, r"tools\[0\].type: search"),
        ({"tools": [WEATHER, WEATHER]}, "two functions have the same name"),
    ],
)
def test_an_invalid_chat_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chat(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"raw": True, "system": "x"}, "system: not supported with raw"),
        ({"suffix": "x", "images": [PNG]}, "images: not supported with suffix"),
        ({"raw": True, "format": "json"}, "format: not supported with raw"),
        ({"images": ["x"]}, "images: expected PNG"),
    ],
)
def test_an_invalid_prompt_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        prompt(**fields)


@pytest.mark.parametrize("fields", [{"format": 5}, {"think": "hard"}])
def test_what_is_invalid_is_refused_where_nothing_is_asked(fields: Any) -> None:
    body = json.dumps({"model": "m1", **fields}).encode()
    for decode in (decode_ollama_chat, decode_ollama_prompt):
        with pytest.raises(InvalidRequest, match=f"^{next(iter(fields))}: "):
            decode(body)


def test_harmless_values_ask_for_nothing() -> None:
    work = prompt(
        **{"template": "", "system": "", "context": [], "raw": False, "suffix": ""},
        **{"images": [], "options": {}, "keep_alive": "5m", "logprobs": False},
    ).work

    assert work == Chat("m1", ({"role": "user", "content": "hi"},))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("user"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "images", "tool_calls", "function", "name"]
            ),
            inner,
        )
    ),
    max_leaves=6,
)
FIELDS = (
    *("messages", "prompt", "tools", "images", "format", "options", "think", "raw"),
    *("suffix", "system", "context", "keep_alive", "stream"),
)


@given(st.dictionaries(st.sampled_from(FIELDS), values))
def test_any_fields_decode_or_are_refused(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m1", **fields}).encode()
    for decode in (decode_ollama_chat, decode_ollama_prompt):
        try:
            decoded = decode(body)
        except InvalidRequest:
            continue
        if isinstance(decoded, GenerationRequest):
            assert encode_work(decoded.work)
