"""Older completions, whole and in pieces."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.work import Completion, Delta, Outcome, Piece, Usage
from shoal.gateway.chat_answer import DONE
from shoal.gateway.completion_answer import CompletionChunks, text_completion
from shoal.gateway.text import well_formed

WORK = Completion("m", "Once")


def chunks(*, include_usage: bool = False) -> CompletionChunks:
    return CompletionChunks(JobId("j1"), WORK, 17, include_usage=include_usage)


def choices(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.removesuffix(DONE).decode().splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(event["object"] == "text_completion" for event in events)
    return [choice for event in events for choice in event["choices"]]


@given(st.lists(st.text(st.characters(codec=None), min_size=1), min_size=1))
def test_pieces_come_out_as_they_went_in(texts: list[str]) -> None:
    written = choices(chunks().pieces([*texts]))

    assert [choice["text"] for choice in written] == [well_formed(t) for t in texts]


def test_each_choice_ends_once() -> None:
    writing = chunks(include_usage=True)
    pieces: list[Piece] = [
        Delta(0, {"content": "a"}, {"tokens": ["a"]}),
        Delta(1, {"content": "b"}, None, "length"),
    ]

    written = choices(writing.pieces(pieces)) + choices(
        writing.end(assemble(pieces, "stop", Usage(1, 2)))
    )

    assert [(c["index"], c["text"], c["finish_reason"]) for c in written] == [
        (0, "a", None),
        (1, "b", "length"),
        (0, "", "stop"),
    ]
    assert written[0]["logprobs"] == {"tokens": ["a"]}


def test_an_answer_without_text_ends_too() -> None:
    (only,) = choices(chunks().end(Outcome("", "length")))

    assert (only["text"], only["finish_reason"]) == ("", "length")


def test_a_whole_answer_has_its_usage() -> None:
    whole = json.loads(
        text_completion(JobId("j1"), WORK, Outcome(" upon", "stop", Usage(1, 2)), 17)
    )

    assert whole["id"] == "cmpl-j1"
    assert whole["choices"] == [
        {"index": 0, "text": " upon", "finish_reason": "stop", "logprobs": None}
    ]
    assert whole["usage"]["total_tokens"] == 3
