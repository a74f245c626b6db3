"""Ollama's answers: objects, whole or one a line."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import WorkerLost
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome, Usage
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.ollama.answers import (
    AnswerShape,
    OllamaAnswer,
    OllamaStream,
    Stopwatch,
)

CREATED = 1_700_000_000
CREATED_AT = "2023-11-14T22:13:20.000Z"
WORK = Chat("m1", ({"role": "user", "content": "hi"},))
USAGE = Usage(7, 3)


class Clock:
    """A clock that each reading advances by a second."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time - 1.0


def answer(shape: AnswerShape = AnswerShape.CHAT) -> OllamaAnswer:
    return OllamaAnswer(shape, "m1:latest", WORK, Stopwatch(Clock().now))


def streamed(
    pieces: Sequence[AnswerPiece],
    outcome: Outcome,
    shape: AnswerShape = AnswerShape.CHAT,
) -> list[Any]:
    """Return the lines of an answer whose pieces come one by one."""
    stream = OllamaStream(answer(shape), CREATED)
    data = b"".join([stream.encode([piece]) for piece in pieces])
    return [
        json.loads(line)
        for line in (data + stream.encode_end(outcome)).split(b"\n")[:-1]
    ]


def call(name: str, arguments: str, index: int = 0) -> Delta:
    function: JSON = {"name": name, "arguments": arguments}
    given: JSON = {"index": index, "id": f"c{index}", "function": function}
    return Delta(fields={"tool_calls": [given]})


MESSAGE = {"role": "assistant"}


def test_text_comes_in_lines_and_the_last_has_the_measures() -> None:
    lines = streamed(["Hel", "lo"], Outcome("Hello", "length", USAGE))

    named = {"model": "m1:latest", "created_at": CREATED_AT}
    assert lines == [
        {**named, "message": {**MESSAGE, "content": "Hel"}, "done": False},
        {**named, "message": {**MESSAGE, "content": "lo"}, "done": False},
        {
            **named,
            "message": {**MESSAGE, "content": ""},
            "done": True,
            "done_reason": "length",
            "total_duration": 2_000_000_000,
            "load_duration": 1,
            "prompt_eval_duration": 1_000_000_000,
            "eval_duration": 1_000_000_000,
            "prompt_eval_count": 7,
            "eval_count": 3,
        },
    ]


def test_a_completion_has_its_text_by_itself() -> None:
    lines = streamed(["hi"], Outcome("hi"), AnswerShape.GENERATE)

    assert [line["response"] for line in lines] == ["hi", ""]
    assert "message" not in lines[0]


def test_a_whole_answer_is_one_object() -> None:
    fields: dict[str, JSON] = {
        "content": "It is",
        "reasoning_content": "hmm",
        "tool_calls": [
            {"id": "c0", "function": {"name": "weather", "arguments": '{"at":"here"}'}}
        ],
    }
    outcome = Outcome("It is", "tool_calls", USAGE, (Choice(fields, "tool_calls"),))

    shown = json.loads(answer().encode(JobId("j"), outcome, CREATED))

    function = {"index": 0, "name": "weather", "arguments": {"at": "here"}}
    assert shown["message"] == {
        **MESSAGE,
        "content": "It is",
        "thinking": "hmm",
        "tool_calls": [{"id": "c0", "function": function}],
    }
    assert shown["done"] is True
    assert shown["done_reason"] == "stop"
    assert shown["eval_count"] == 3
    assert shown["eval_duration"] == shown["total_duration"] == 1_000_000_000
    assert shown["prompt_eval_duration"] == 1  # clients divide by it


def test_thinking_and_whole_tool_calls_are_streamed() -> None:
    pieces: list[AnswerPiece] = [
        Delta(fields={"reasoning_content": "hm"}),
        "Let me see",
        call("weather", '{"at":'),
        Delta(fields={"tool_calls": [{"index": 0, "function": {"arguments": '"x"}'}}]}),
        call("time", "", 1),
    ]

    lines = streamed(pieces, Outcome("Let me see", "tool_calls"))

    messages = [line["message"] for line in lines]
    assert messages == [
        {**MESSAGE, "content": "", "thinking": "hm"},
        {**MESSAGE, "content": "Let me see"},
        {
            **MESSAGE,
            "content": "",
            "tool_calls": [
                {
                    "id": "c0",
                    "function": {
                        "index": 0,
                        "name": "weather",
                        "arguments": {"at": "x"},
                    },
                }
            ],
        },
        {
            **MESSAGE,
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "function": {"index": 1, "name": "time", "arguments": {}},
                }
            ],
        },
        {**MESSAGE, "content": ""},
    ]
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("arguments", ['{"at"', "[1]", "5"])
def test_a_call_without_an_object_is_shown_as_text(arguments: str) -> None:
    lines = streamed([call("weather", arguments)], Outcome("", "tool_calls"))

    assert [line["message"]["content"] for line in lines] == [arguments, ""]


def test_half_a_character_in_a_call_is_replaced() -> None:
    first, _ = streamed([call("weather", '{"at":"\ud800"}')], Outcome(""))

    (shown,) = first["message"]["tool_calls"]
    assert shown["function"]["arguments"] == {"at": "\ufffd"}


def test_an_answer_without_pieces_is_streamed_from_its_outcome() -> None:
    lines = streamed([], Outcome("Hello"))

    assert [line["message"]["content"] for line in lines] == ["Hello", ""]


def test_names_and_texts_may_have_quotes() -> None:
    name, text = 'a""', '""'
    odd = OllamaAnswer(AnswerShape.GENERATE, name, WORK, Stopwatch(Clock().now))

    line = json.loads(OllamaStream(odd, CREATED).encode([text]))

    assert (line["model"], line["response"]) == (name, text)


def test_an_error_ends_the_stream_in_a_line() -> None:
    stream = OllamaStream(answer(), CREATED)

    assert stream.encode_error(WorkerLost("the worker was lost")) == (
        b'{"error":"the worker was lost"}\n'
    )


def test_a_silent_stream_has_a_line_that_adds_nothing() -> None:
    form = answer().form(CREATED)

    assert form.media == "application/x-ndjson"
    assert json.loads(form.keepalive)["message"] == {**MESSAGE, "content": ""}
    assert form.keepalive.endswith(b"\n")


texts = st.text(st.characters(codec=None), max_size=4)
thoughts = st.builds(lambda text: Delta(fields={"reasoning_content": text}), texts)
arguments = st.tuples(st.just("{}") | texts)


def numbered(drawn: list[str | Delta | tuple[str]]) -> list[AnswerPiece]:
    """Make calls of arguments; one with the index of another would continue it."""
    return [
        call("f", *each, index) if isinstance(each, tuple) else each
        for index, each in enumerate(drawn)
    ]


@given(st.lists(texts | thoughts | arguments).map(numbered), st.integers(1, 4))
def test_stream_adds_up_to_the_whole_answer_however_its_pieces_come(
    pieces: list[AnswerPiece], at_once: int
) -> None:
    outcome = assemble(pieces)
    stream = OllamaStream(answer(), CREATED)

    data = b"".join(
        stream.encode(pieces[start : start + at_once])
        for start in range(0, len(pieces), at_once)
    ) + stream.encode_end(outcome)

    sent = data.decode()
    assert sent.splitlines() == sent.split("\n")[:-1]  # no other ends of lines
    lines = [json.loads(line) for line in sent.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    whole = json.loads(answer().encode(JobId("j"), outcome, CREATED))["message"]
    for field in ("content", "thinking"):
        text = "".join(each.get(field, "") for each in messages)
        assert text == whole.get(field, "")
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    assert calls == whole.get("tool_calls", [])
