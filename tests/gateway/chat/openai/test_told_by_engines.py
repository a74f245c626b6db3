"""What engines tell beside the text: details of usage, stop strings, probabilities."""

import json
import math
from typing import Any

import pytest

from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.chat.openai.answers import (
    DONE,
    ChunkEncoder,
    encode_answer,
)

JOB = JobId("j1")
STOP: dict[str, JSON] = {"stop": ["END", "\n\n"]}
CHAT = Chat("m", ({"role": "user", "content": "hi"},), options=STOP)
COMPLETION = Completion("m", "hi", options=STOP)


def events(data: bytes) -> list[dict[str, Any]]:
    lines = data.removesuffix(DONE).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def chat_choices(pieces: list[AnswerPiece]) -> list[dict[str, Any]]:
    encoder = ChunkEncoder(CHAT, JOB, 17, include_usage=False)
    data = encoder.encode(pieces) + encoder.encode_end(assemble(pieces))
    return [choice for event in events(data) for choice in event["choices"]]


def completion_choices(pieces: list[AnswerPiece]) -> list[dict[str, Any]]:
    encoder = ChunkEncoder(COMPLETION, JOB, 17, include_usage=False)
    data = encoder.encode(pieces) + encoder.encode_end(assemble(pieces))
    return [choice for event in events(data) for choice in event["choices"]]


def whole_chat(outcome: Outcome) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(encode_answer(CHAT, JOB, outcome, 17))
    return answer


# Usage.


def test_known_details_of_the_usage_are_passed_on() -> None:
    usage = whole_chat(Outcome("hi", usage=Usage(10, 5, 8, 3)))["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_nothing_cached_is_a_count_and_unknown_is_none() -> None:
    nothing = whole_chat(Outcome("hi", usage=Usage(10, 5, cached_tokens=0)))["usage"]
    unknown = whole_chat(Outcome("hi", usage=Usage(10, 5)))["usage"]

    assert nothing["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "completion_tokens_details" not in nothing
    assert unknown.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_streamed_usage_has_the_details() -> None:
    encoder = ChunkEncoder(CHAT, JOB, 17, include_usage=True)

    *_, last = events(encoder.encode_end(Outcome("", usage=Usage(10, 5, 8))))

    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


# The stop string that ended an answer.

ENDED: list[AnswerPiece] = ["Hello", Delta(0, {"stop_reason": "END"})]


@pytest.mark.parametrize("choices_of", [chat_choices, completion_choices])
def test_matched_stop_string_is_beside_the_finish_reason(choices_of: Any) -> None:
    *others, last = choices_of(ENDED)

    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    assert all("stop_reason" not in json.dumps(choice) for choice in others)


@pytest.mark.parametrize(
    "answer",
    [
        encode_answer(CHAT, JOB, assemble(ENDED), 17),
        encode_answer(COMPLETION, JOB, assemble(ENDED), 17),
    ],
    ids=["chat", "completion"],
)
def test_matched_stop_string_is_in_a_whole_answer(answer: bytes) -> None:
    (choice,) = json.loads(answer)["choices"]

    assert choice["stop_reason"] == "END"


def test_each_choice_has_the_stop_string_that_ended_it() -> None:
    pieces: list[AnswerPiece] = [
        Delta(0, {"content": "a", "stop_reason": "\n\n"}, None, "stop"),
        Delta(1, {"content": "b"}, None, "length"),
    ]

    streamed = {
        choice["index"]: choice.get("stop_reason")
        for choice in chat_choices(pieces)
        if choice["finish_reason"]
    }
    whole = [
        each.get("stop_reason") for each in whole_chat(assemble(pieces))["choices"]
    ]

    assert streamed == {0: "\n\n", 1: None}
    assert whole == ["\n\n", None]


@pytest.mark.parametrize("told", ["<|im_end|>", 7, None, ""])
def test_what_no_client_asked_to_stop_at_is_not_shown(told: JSON) -> None:
    pieces: list[AnswerPiece] = ["Hello", Delta(0, {"stop_reason": told})]

    assert all("stop_reason" not in choice for choice in chat_choices(pieces))
    assert all("stop_reason" not in choice for choice in completion_choices(pieces))


def test_fields_in_an_engines_own_form_are_not_passed_on() -> None:
    pieces: list[AnswerPiece] = [
        Delta(0, {"content": "a", "audio": None, "matched_token": 7}),
        Delta(0, {"provider_specific_fields": {"x": None}}),
    ]

    deltas = [choice["delta"] for choice in chat_choices(pieces)]

    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {},
    ]


# Log probabilities.


def entry(token: str, logprob: JSON, **others: JSON) -> dict[str, JSON]:
    return {"token": token, "logprob": logprob, **others}


@pytest.mark.parametrize(
    ("theirs", "shown"),
    [
        (entry("a", -1), entry("a", -1.0, bytes=[97], top_logprobs=[])),
        (
            entry("a", -1.0, bytes=None, top_logprobs=None),
            entry("a", -1.0, bytes=[97], top_logprobs=[]),
        ),
        (
            entry("ü", -1.0, bytes=[195], top_logprobs=[entry("b", -2.0), "c"]),
            entry(
                *("ü", -1.0),
                bytes=[195],
                top_logprobs=[entry("b", -2.0, bytes=[98])],
            ),
        ),
        (entry("a", -math.inf), entry("a", -9999.0, bytes=[97], top_logprobs=[])),
    ],
)
def test_logprobs_have_all_that_clients_need(theirs: JSON, shown: JSON) -> None:
    pieces: list[AnswerPiece] = [Delta(0, {"content": "a"}, {"content": [theirs]})]

    streamed = [choice["logprobs"] for choice in chat_choices(pieces)]
    (whole,) = whole_chat(assemble(pieces))["choices"]

    assert streamed == [None, {"content": [shown], "refusal": None}, None]
    assert whole["logprobs"] == {"content": [shown], "refusal": None}


@pytest.mark.parametrize(
    "theirs",
    [
        entry("a", None),
        entry("a", math.nan),
        entry("a", math.inf),
        entry("a", "-1"),
        {"logprob": -1.0},
        {"token": 7, "logprob": -1.0},
        "a",
        None,
    ],
)
def test_a_token_without_a_number_costs_only_itself(theirs: JSON) -> None:
    good = entry("b", -1.0)
    pieces: list[AnswerPiece] = [
        Delta(0, {"content": "ab"}, {"content": [theirs, good]})
    ]

    (whole,) = whole_chat(assemble(pieces))["choices"]

    assert [each["token"] for each in whole["logprobs"]["content"]] == ["b"]


def test_logprobs_of_completions_have_numbers_only() -> None:
    theirs: JSON = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -math.inf],
        "top_logprobs": [None, {"b": -math.inf, "c": None}],
        "text_offset": [0, 1],
    }
    pieces: list[AnswerPiece] = [Delta(0, {"content": "ab"}, theirs)]

    (choice, _) = completion_choices(pieces)

    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -9999.0],  # the first of a prompt has none
        "top_logprobs": [{}, {"b": -9999.0}],
        "text_offset": [0, 1],
    }
