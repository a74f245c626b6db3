"""Legacy completions, complete and streamed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import Completion
from shoal.gateway.chat.openai.answers import (
    DONE,
    ChunkEncoder,
    encode_answer,
)
from shoal.gateway.http.responses import well_formed

WORK = Completion("m", "Once")


def chunks(*, include_usage: bool = False) -> ChunkEncoder:
    return ChunkEncoder(WORK, JobId("j1"), 17, include_usage=include_usage)


def choices(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.removesuffix(DONE).decode().splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(event["object"] == "text_completion" for event in events)
    return [choice for event in events for choice in event["choices"]]


@given(st.lists(st.text(st.characters(codec=None), min_size=1), min_size=1))
def test_pieces_are_streamed_unchanged(texts: list[str]) -> None:
    written = choices(chunks().encode([*texts]))

    assert [choice["text"] for choice in written] == [well_formed(t) for t in texts]


def test_each_choice_ends_once() -> None:
    writing = chunks(include_usage=True)
    pieces: list[AnswerPiece] = [
        Delta(0, {"content": "a"}, {"tokens": ["a"], "token_logprobs": [-1.0]}),
        Delta(1, {"content": "b"}, None, "length"),
    ]

    written = choices(writing.encode(pieces)) + choices(
        writing.encode_end(assemble(pieces, "stop", Usage(1, 2)))
    )

    assert [(c["index"], c["text"], c["finish_reason"]) for c in written] == [
        (0, "a", None),
        (1, "b", "length"),
        (0, "", "stop"),
    ]
    assert written[0]["logprobs"] == {"tokens": ["a"], "token_logprobs": [-1.0]}


def test_empty_answer_ends() -> None:
    (only,) = choices(chunks().encode_end(Outcome("", "length")))

    assert (only["text"], only["finish_reason"]) == ("", "length")


def test_complete_answer_has_usage() -> None:
    whole = json.loads(
        encode_answer(WORK, JobId("j1"), Outcome(" upon", "stop", Usage(1, 2)), 17)
    )

    assert whole["id"] == "cmpl-j1"
    assert whole["choices"] == [
        {"index": 0, "text": " upon", "finish_reason": "stop", "logprobs": None}
    ]
    assert whole["usage"]["total_tokens"] == 3


def entry(token: str, logprob: float, *tops: tuple[str, float]) -> dict[str, Any]:
    likeliest = [{"token": top, "logprob": value} for top, value in tops]
    return {"token": token, "logprob": logprob, "top_logprobs": likeliest}


def test_chat_logprobs_become_completion_logprobs() -> None:
    pieces: list[AnswerPiece] = [
        Delta(0, {"content": " up"}, {"content": [entry(" up", -1.0, (" a", -0.5))]}),
        Delta(0, {"content": "on"}, {"content": [entry("on", -2.0)]}),
    ]

    first, second = choices(chunks().encode(pieces))
    outcome = assemble(pieces, "stop", Usage(1, 2))
    (whole,) = json.loads(encode_answer(WORK, JobId("j1"), outcome, 17))["choices"]

    assert first["logprobs"]["text_offset"] == [0]
    assert second["logprobs"]["text_offset"] == [3]
    assert whole["logprobs"] == {
        "tokens": [" up", "on"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{" a": -0.5}, {}],
        "text_offset": [0, 3],
    }


@pytest.mark.parametrize(
    "theirs", [None, 1, {"tokens": ["a"]}, {"content": None}, {"content": [{"id": 1}]}]
)
def test_logprobs_without_numbers_are_left_out(theirs: Any) -> None:
    piece = Delta(0, {"content": "a"}, theirs)

    (choice,) = choices(chunks().encode([piece]))

    assert choice["logprobs"] is None
