"""What engines tell beside the text: cached tokens, thoughts, the stop sequence."""

import json
from typing import Any

import pytest

from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.anthropic.message_answer import (
    MessageStreamEncoder,
    encode_message,
)

JOB = JobId("j1")
CHAT = Chat("m", ({"role": "user", "content": "hi"},), options={"stop": ["END"]})


def whole(outcome: Outcome) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(
        encode_message(JOB, CHAT, outcome, shows_thinking=False)
    )
    return message


def last_delta(outcome: Outcome) -> dict[str, Any]:
    encoder = MessageStreamEncoder(JOB, CHAT, shows_thinking=False)
    *_, line = (
        line
        for line in encoder.encode_end(outcome).decode().splitlines()
        if line.startswith('data: {"type":"message_delta"')
    )
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return event


def test_cached_tokens_are_not_counted_as_input_again() -> None:
    outcome = Outcome("hi", usage=Usage(10, 5, cached_tokens=8, reasoning_tokens=3))
    usage = {
        "input_tokens": 2,
        "output_tokens": 5,
        "cache_read_input_tokens": 8,
        "output_tokens_details": {"thinking_tokens": 3},
    }

    assert whole(outcome)["usage"] == usage
    assert last_delta(outcome)["usage"] == usage


def test_unknown_counts_are_absent() -> None:
    outcome = Outcome("hi", usage=Usage(10, 5))

    assert whole(outcome)["usage"] == {"input_tokens": 10, "output_tokens": 5}
    assert last_delta(outcome)["usage"] == {"input_tokens": 10, "output_tokens": 5}


def ended(fields: dict[str, Any], *before: AnswerPiece) -> Outcome:
    return assemble(["Hello", *before, Delta(0, fields)])


@pytest.mark.parametrize(
    ("outcome", "reason", "sequence"),
    [
        (ended({"stop_reason": "END"}), "stop_sequence", "END"),
        (ended({"stop_reason": "<|im_end|>"}), "end_turn", None),
        (ended({"stop_reason": 7}), "end_turn", None),
        (ended({}), "end_turn", None),
        (assemble(["Hello"]), "end_turn", None),
        (
            assemble(["Hello", Delta(0, {"stop_reason": "END"})], "length"),
            *("max_tokens", None),
        ),
        (
            ended(
                {"stop_reason": "END"},
                Delta(
                    0,
                    {
                        "tool_calls": [
                            {
                                "index": 0,
                                "id": "c",
                                "function": {"name": "f", "arguments": "{}"},
                            }
                        ]
                    },
                ),
            ),
            "tool_use",
            None,
        ),
    ],
)
def test_stop_sequence_is_named_where_the_engine_tells_it(
    outcome: Outcome, reason: str, sequence: str | None
) -> None:
    message, delta = whole(outcome), last_delta(outcome)["delta"]

    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize("pieces", [['"gaben"'], [" ", '"ga', 'ben"'], ["[1]"], ["no"]])
def test_arguments_that_are_no_object_are_streamed_as_they_are_shown_whole(
    pieces: list[str],
) -> None:
    """As vLLM sends them, of models that write no JSON."""
    first, *rest = pieces
    head: JSON = {"name": "f", "arguments": first}
    calls: list[AnswerPiece] = [
        Delta(0, {"tool_calls": [{"index": 0, "id": "c", "function": head}]}),
        *(
            Delta(0, {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
            for piece in rest
        ),
    ]
    encoder = MessageStreamEncoder(JOB, CHAT, shows_thinking=False)

    stream = b"".join(encoder.encode([piece]) for piece in calls)
    stream += encoder.encode_end(assemble(calls, "tool_calls"))

    (block,) = whole(assemble(calls, "tool_calls"))["content"]
    events = [
        json.loads(line[6:])
        for line in stream.decode().splitlines()
        if line[:6] == "data: "
    ]
    parts = [
        event["delta"].get("partial_json", "")
        for event in events
        if event["type"] == "content_block_delta"
    ]
    assert json.loads("".join(parts)) == block["input"]
    assert block["input"] == {"INVALID_JSON": "".join(pieces)}
