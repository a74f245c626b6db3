"""The fields of a legacy completion request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Completion, Feature
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.openai.completion_request import (
    PROMPTS_MAX,
    decode_completion_request,
)


def decode(**fields: Any) -> GenerationRequest[Completion]:
    body = {"model": "m1", "prompt": "Once"} | fields
    return decode_completion_request(json.dumps(body).encode())


def test_minimal_request_is_decoded() -> None:
    assert decode() == GenerationRequest(Completion("m1", "Once"))


@pytest.mark.parametrize(
    ("prompt", "kept", "needs"),
    [
        ("a", "a", set()),
        (["a"], "a", set()),
        (["a", "b"], ["a", "b"], {Feature.CHOICES}),
        ([1, 2], [1, 2], {Feature.CHOICES}),
        ([[1], [2]], [[1], [2]], {Feature.CHOICES}),
    ],
)
def test_prompts_of_every_form_are_accepted(
    prompt: Any, kept: Any, needs: set[Feature]
) -> None:
    work = decode(prompt=prompt).work

    assert work.prompt == kept
    assert work.needs == needs


def test_options_are_forwarded() -> None:
    work = decode(
        n=2,
        best_of=3,
        echo=True,
        suffix="end",
        logprobs=0,
        stop="x",
        ignore_eos=True,  # no option: it is its engine's
        user="al",
    ).work

    assert work.options == {
        "ignore_eos": True,
        "n": 2,
        "best_of": 3,
        "echo": True,
        "suffix": "end",
        "logprobs": 0,
        "stop": ["x"],
    }
    needs = {Feature.CHOICES, Feature.LOGPROBS, Feature.STOP, Feature.FIELDS}
    assert work.needs == needs | {Feature.ECHO}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": 1}, "suffix"),
    ],
    ids=str,
)
def test_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field


@pytest.mark.parametrize(
    "prompt",
    ["[" + "[]," * 200 + "[]]", "[" * 2000, "[[[1]]]", '[ "a", [1]]', "[1e400]", "{}"],
    ids=lambda prompt: prompt[:10],
)
def test_hostile_prompt_is_rejected_by_name(prompt: str) -> None:
    body = f'{{"model":"m1","prompt":{prompt}}}'.encode()

    with pytest.raises(InvalidRequest):
        decode_completion_request(body)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=6))
def test_any_prompt_is_accepted_or_rejected_by_name(prompt: Any) -> None:
    assert _field_of(prompt) in (None, "prompt")


def _field_of(prompt: Any) -> str | None:
    try:
        decode(prompt=prompt)
    except InvalidRequest as error:
        return error.field
    return None


@pytest.mark.parametrize("stream", [False, True])
def test_several_completions_need_no_best_of(stream: bool) -> None:
    assert decode(n=2, stream=stream).work.options == {"n": 2}


def test_best_of_as_many_as_are_wanted_is_left_out() -> None:
    assert decode(n=2, best_of=2, stream=True).work.options == {"n": 2}
