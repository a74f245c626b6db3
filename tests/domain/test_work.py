"""What a user wants done."""

from collections.abc import Mapping

import pytest

from shoal.domain.ids import JobId
from shoal.domain.work import JSON, Chat, Feature, Job, Kind, text_of


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "hi"}, "hi"),
        ({"role": "user", "content": ""}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"text": "b"}]}, "ab"),
        ({"content": [{"type": "image_url", "image_url": {}}, {"text": "b"}]}, "b"),
        ({"content": [{"text": 5}, "stray", None, {"text": "c"}]}, "c"),
        ({"content": []}, ""),
        ({"content": {"text": "no list"}}, ""),
        ({"content": 5}, ""),
    ],
)
def test_text_of_a_message_is_its_text_parts_joined(
    message: Mapping[str, JSON], text: str
) -> None:
    assert text_of(message) == text


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"top_p": 0.5, "seed": 1}, set()),
        ({"stop": "."}, {Feature.STOP}),
        ({"stop": ["a", "b"]}, {Feature.STOP}),
    ],
)
def test_only_what_makes_an_answer_wrong_is_needed(
    options: Mapping[str, JSON], needs: set[Feature]
) -> None:
    assert Chat("m", (), options=options).needs == needs


def test_job_is_of_the_kind_and_model_of_its_work() -> None:
    job = Job(JobId("j"), Chat("m", ()))

    assert (job.kind, job.model) == (Kind.CHAT, "m")
