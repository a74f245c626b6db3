"""Scores in servers' formats."""

import json

import pytest

from shoal.domain.errors import JobError
from shoal.domain.outcome import Delta, Usage
from shoal.domain.work import Rerank
from shoal.engines.input_answers import decode_input_answer

WORK = Rerank("m", "q", ("a", "b"))


def test_scores_are_read_in_other_forms() -> None:
    for results, score, usage, read in (
        ("results", "relevance_score", {"total_tokens": 7.0}, Usage(7, 0)),
        ("results", "score", {"prompt_tokens": None, "total_tokens": 7}, Usage(7, 0)),
        ("data", "relevance_score", {"prompt_tokens": "?"}, None),
        ("data", "score", [], None),
    ):
        scored = [{"index": 1.0, score: 0.75}, {"index": "0", score: "-2.5"}]
        body = json.dumps({results: scored, "usage": usage}).encode()

        assert decode_input_answer(WORK, body) == (
            [
                Delta(0, {"relevance_score": -2.5}),
                Delta(1, {"relevance_score": 0.75}),
            ],
            read,
        )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"results": [{"relevance_score": 1}, None]}, "lacks its index or score"),
        ({"results": [{"index": 0, "score": float("nan")}]}, "lacks its index"),
        ({"results": None}, "no scores"),
        ([], "no scores"),
        ("text", "no scores"),
        ({"errors": ["too long"]}, "too long"),
    ],
)
def test_scores_that_cannot_be_understood_are_an_error(
    answer: object, reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        decode_input_answer(WORK, json.dumps(answer).encode())
