"""Answers of different engines to a job are compared by what all of them tell."""

import pytest

from shoal.coordinator.spot_checks import comparable_part
from shoal.domain.answer_assembly import assemble
from shoal.domain.ids import JobId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import STOP_REASON, AnswerPiece, Delta
from shoal.domain.work import Chat

JOB = Job(JobId("j"), Chat("m", (), temperature=0), TimeLimits())
ENDED: AnswerPiece = Delta(0, {STOP_REASON: "END"})
THOUGHT: AnswerPiece = Delta(0, {"reasoning_content": "Hm."})


def compared(*pieces: AnswerPiece) -> object:
    return comparable_part(JOB, assemble(pieces))


@pytest.mark.parametrize("text", ["Hello", ""])
def test_the_stop_string_that_an_engine_tells_makes_no_difference(text: str) -> None:
    assert compared(text, ENDED) == compared(text)


@pytest.mark.parametrize(
    "other",
    [
        ["Hallo"],
        [THOUGHT, "Hello"],
        [Delta(0, {"content": "Hello"}, {"content": []})],
        [Delta(0, {"content": "Hello"}), Delta(1, {"content": "Hello"})],
    ],
    ids=["text", "reasoning", "logprobs", "choices"],
)
def test_other_answers_are_different(other: list[AnswerPiece]) -> None:
    assert compared(*other) != compared("Hello")
