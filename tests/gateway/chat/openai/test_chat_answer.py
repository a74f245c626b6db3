import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import Chat
from shoal.gateway.chat.openai.answers import (
    DONE,
    ChunkEncoder,
    encode_answer,
)
from shoal.gateway.http.responses import well_formed

CHAT = Chat('m"1', ({"role": "user", "content": "fünf"},))


def chunks(*, include_usage: bool = False) -> ChunkEncoder:
    return ChunkEncoder(CHAT, JobId("j1"), 17, include_usage=include_usage)


def events(data: bytes) -> list[dict[str, Any]]:
    """Read events as a client does that splits lines with ``str.splitlines``."""
    lines = [line for line in data.decode().splitlines() if line]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@given(st.lists(st.text(st.characters(codec=None), min_size=1), min_size=1))
def test_pieces_are_streamed_unchanged(texts: list[str]) -> None:
    first, *rest = events(chunks().encode([*texts]))

    assert first["choices"][0]["delta"]["role"] == "assistant"
    contents = [event["choices"][0]["delta"]["content"] for event in rest]
    assert contents == [well_formed(text) for text in texts]


def test_only_the_first_chunk_has_the_role() -> None:
    writing = chunks()

    first, second = writing.encode(["a"]), writing.encode(["b"])

    assert b'"role":"assistant"' in first
    assert b"role" not in second
    assert b"role" not in writing.encode_end(Outcome("ab"))


def test_empty_answer_has_a_role() -> None:
    end = chunks().encode_end(Outcome("", "length"))

    assert end.endswith(DONE)
    first, last = events(end.removesuffix(DONE))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert (last["id"], last["created"], last["model"]) == ("chatcmpl-j1", 17, 'm"1')


def test_usage_is_reported_or_estimated() -> None:
    counted = chunks(include_usage=True).encode_end(
        Outcome("abcde", "stop", Usage(3, 4))
    )
    guessed = chunks(include_usage=True).encode_end(Outcome("abcde"))

    assert events(counted.removesuffix(DONE))[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }
    assert events(guessed.removesuffix(DONE))[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
    }


CALLS: list[AnswerPiece] = [
    "Let me look. ",
    Delta(
        0,
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"ci'},
                }
            ]
        },
    ),
    Delta(0, {"tool_calls": [{"index": 0, "function": {"arguments": 'ty":1}'}}]}),
]


def test_tool_calls_are_streamed_as_the_engine_gave_them() -> None:
    writing = chunks()

    role, text, *calls = events(writing.encode(CALLS))
    end = writing.encode_end(assemble(CALLS, "tool_calls"))

    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert text["choices"][0]["delta"] == {"content": "Let me look. "}
    deltas = [event["choices"][0]["delta"] for event in calls]
    assert deltas == [piece.fields for piece in CALLS[1:] if isinstance(piece, Delta)]
    (last,) = events(end.removesuffix(DONE))
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_calls_are_assembled_in_a_complete_answer() -> None:
    whole = encode_answer(CHAT, JobId("j1"), assemble(CALLS, "tool_calls"), 17)

    (choice,) = json.loads(whole)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look. ",
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":1}'},
            }
        ],
    }


def test_each_choice_has_its_own_role_and_end() -> None:
    writing = chunks()
    pieces: list[AnswerPiece] = [
        Delta(1, {"content": "b"}),
        Delta(0, {"content": "a"}, {"content": [{"token": "a", "logprob": -1.0}]}),
        Delta(1, {}, None, "length"),
    ]

    written = events(writing.encode(pieces))
    ending = events(writing.encode_end(assemble(pieces)).removesuffix(DONE))

    seen = [(c["index"], c["delta"], c["finish_reason"]) for c in choices(written)]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert seen == [
        (1, role, None),
        (1, {"content": "b"}, None),
        (0, role, None),
        (0, {"content": "a"}, None),
        (1, {}, "length"),
    ]
    assert choices(written)[3]["logprobs"]["content"][0]["logprob"] == -1.0
    assert [(c["index"], c["finish_reason"]) for c in choices(ending)] == [(0, "stop")]


def choices(written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for event in written for choice in event["choices"]]


def test_reasoning_is_separate_from_the_answer() -> None:
    pieces: list[AnswerPiece] = [Delta(0, {"reasoning_content": "hm"}), "yes"]

    answer = json.loads(encode_answer(CHAT, JobId("j1"), assemble(pieces), 17))

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


@pytest.mark.parametrize(
    ("given", "told"), [("length", "length"), ("eos", "stop"), ("", "stop")]
)
def test_finish_reasons_are_limited_to_known_ones(given: str, told: str) -> None:
    answer = json.loads(encode_answer(CHAT, JobId("j1"), Outcome("x", given), 17))

    assert answer["choices"][0]["finish_reason"] == told
    assert answer["choices"][0]["message"]["content"] == "x"
    assert answer["object"] == "chat.completion"
