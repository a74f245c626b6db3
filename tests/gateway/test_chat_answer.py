import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.ids import JobId
from shoal.domain.work import Chat, Outcome, Usage
from shoal.gateway.chat_answer import DONE, Chunks, completion, estimated_usage
from shoal.gateway.text import well_formed

CHAT = Chat('m"1', ({"role": "user", "content": "fünf"},))


def chunks(*, include_usage: bool = False) -> Chunks:
    return Chunks(JobId("j1"), CHAT, 17, include_usage=include_usage)


def events(data: bytes) -> list[dict[str, Any]]:
    """Read events as a client does that splits lines with ``str.splitlines``."""
    lines = [line for line in data.decode().splitlines() if line]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@given(st.lists(st.text(st.characters(codec=None), min_size=1), min_size=1))
def test_pieces_come_out_as_they_went_in(texts: list[str]) -> None:
    first, *rest = events(chunks().pieces(texts))

    assert first["choices"][0]["delta"]["role"] == "assistant"
    contents = [event["choices"][0]["delta"]["content"] for event in rest]
    assert contents == [well_formed(text) for text in texts]


def test_only_the_first_piece_brings_the_role() -> None:
    writing = chunks()

    first, second = writing.pieces(["a"]), writing.pieces(["b"])

    assert b'"role":"assistant"' in first
    assert b"role" not in second
    assert b"role" not in writing.end(Outcome("ab"))


def test_an_answer_without_text_has_a_role_too() -> None:
    end = chunks().end(Outcome("", "length"))

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


def test_usage_is_the_workers_or_estimated() -> None:
    counted = chunks(include_usage=True).end(Outcome("abcde", "stop", Usage(3, 4)))
    guessed = chunks(include_usage=True).end(Outcome("abcde"))

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


def test_an_estimate_is_a_quarter_of_the_bytes_rounded_up() -> None:
    asked = Chat(
        "m", ({"role": "user", "content": [{"type": "text", "text": "日本"}]},)
    )

    assert estimated_usage(asked, "") == Usage(2, 0)
    assert estimated_usage(Chat("m", ()), "12345") == Usage(0, 2)


@pytest.mark.parametrize(
    ("given", "told"), [("length", "length"), ("eos", "stop"), ("", "stop")]
)
def test_clients_get_only_reasons_that_they_know(given: str, told: str) -> None:
    answer = json.loads(completion(JobId("j1"), CHAT, Outcome("x", given), 17))

    assert answer["choices"][0]["finish_reason"] == told
    assert answer["choices"][0]["message"]["content"] == "x"
    assert answer["object"] == "chat.completion"
