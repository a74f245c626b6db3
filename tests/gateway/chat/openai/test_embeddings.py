"""Embeddings: requests, and vectors in both of their forms."""

import base64
import json
import math
import struct
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import Embedding
from shoal.gateway.chat.inputs import INPUTS_MAX
from shoal.gateway.chat.openai.embeddings import (
    EmbeddingRequest,
    decode_embedding_request,
    encode_embeddings,
)

VECTOR = (0.5, -1.0, 2.0)


def encoded(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


ENCODED = encoded(*VECTOR)
USAGE = Usage(7, 0)


def decode(**fields: Any) -> EmbeddingRequest:
    body = {"model": "m1", "input": "a"} | fields
    return decode_embedding_request(json.dumps(body).encode())


def outcome(*vectors: Any) -> Outcome:
    return Outcome("", choices=tuple(Choice({"embedding": each}) for each in vectors))


def test_one_text_is_a_list_of_one() -> None:
    assert decode().work([]).inputs == ("a",)
    assert decode(input=["a", "b"], dimensions=2).work([]) == Embedding(
        "m1", ("a", "b"), {"dimensions": 2}
    )


@pytest.mark.parametrize(
    ("given", "tokens"), [([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_tokens_stand_for_texts(given: Any, tokens: list[list[int]]) -> None:
    asked = decode(input=given)

    assert asked.tokens == tokens
    assert asked.work(["a", "b"]).inputs == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"input": None}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field


def test_vectors_are_numbers_or_base64() -> None:
    as_numbers = json.loads(encode_embeddings(decode(), outcome(ENCODED), USAGE))
    asked = decode(encoding_format="base64")
    as_text = json.loads(encode_embeddings(asked, outcome(ENCODED), USAGE))

    assert as_numbers["data"][0]["embedding"] == list(VECTOR)
    assert as_text["data"][0]["embedding"] == ENCODED
    assert as_numbers["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


@pytest.mark.parametrize(
    "vectors",
    [
        (),
        (ENCODED, ENCODED),
        (None,),
        ("no base64",),
        ("\N{FULLWIDTH DIGIT ONE}AAA",),
        ("AAA=",),
        ("",),
        *((encoded(1.0, odd),) for odd in (math.nan, math.inf, -math.inf)),
        (encoded(math.inf, -math.inf),),
    ],
    ids=str,
)
def test_invalid_vectors_of_a_worker_fail_the_request(vectors: tuple[Any, ...]) -> None:
    for form in ("float", "base64"):
        with pytest.raises(JobError, match="the worker returned"):
            encode_embeddings(decode(encoding_format=form), outcome(*vectors), USAGE)
