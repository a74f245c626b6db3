"""Work: its text, features and size."""

from collections.abc import Mapping

import pytest

from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.job_kinds import WORK_TYPES
from shoal.domain.outcome import Delta
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    Rerank,
    Transcription,
    Work,
    message_text,
)


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
def test_text_of_a_message_joins_its_text_parts(
    message: Mapping[str, JSON], text: str
) -> None:
    assert message_text(message) == text


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"top_p": 0.5, "seed": 1}, set()),
        ({"stop": "."}, {Feature.STOP}),
        ({"stop": ["a", "b"]}, {Feature.STOP}),
        ({"stop": None, "tools": None, "logprobs": False, "n": 1}, set()),
        ({"tools": [{"type": "function"}]}, {Feature.TOOLS}),
        ({"stop": [], "tools": [], "logit_bias": {}}, set()),
        ({"response_format": {"type": "json_object"}}, {Feature.SCHEMA}),
        ({"logprobs": True, "n": 2}, {Feature.LOGPROBS, Feature.CHOICES}),
    ],
)
def test_only_essential_features_are_needed(
    options: Mapping[str, JSON], needs: set[Feature]
) -> None:
    assert Chat("m", (), options=options).needs == needs


@pytest.mark.parametrize(
    ("message", "needs"),
    [
        ({"role": "user", "content": "hi"}, set()),
        ({"role": "assistant", "tool_calls": []}, {Feature.TOOLS}),
        ({"role": "tool", "content": "42", "tool_call_id": "c"}, {Feature.TOOLS}),
        ({"role": "tool", "content": "42"}, set()),  # answers no call
        ({"content": [{"type": "text", "text": "a"}]}, set()),
        ({"content": [{"type": "image_url"}, {"type": "x"}]}, {Feature.IMAGES}),
        ({"content": [{"type": "input_audio"}]}, {Feature.AUDIO}),
        ({"content": [{"type": 5}, "stray", {}]}, set()),
    ],
)
def test_content_of_a_conversation_needs_features(
    message: Mapping[str, JSON], needs: set[Feature]
) -> None:
    assert Chat("m", (message,)).needs == needs


@pytest.mark.parametrize(
    ("completion", "needs"),
    [
        (Completion("m", "a"), set()),
        (Completion("m", ["a", "b"]), {Feature.CHOICES}),
        (Completion("m", [1, 2]), {Feature.CHOICES}),
        (Completion("m", "a", options={"logprobs": 0}), {Feature.LOGPROBS}),
        (Completion("m", "a", options={"stop": "."}), {Feature.STOP}),
    ],
)
def test_completion_needs_the_features_of_its_fields(
    completion: Completion, needs: set[Feature]
) -> None:
    assert completion.needs == needs


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (Chat("m", ({"content": "a"}, {"content": None})), JobKind.CHAT, "a\n"),
        (Completion("m", "go on"), JobKind.COMPLETION, "go on"),
        (Completion("m", [1, 2]), JobKind.COMPLETION, ""),
        (Embedding("m", ("a", "long", "b")), JobKind.EMBEDDING, "long"),
        (Embedding("m", ()), JobKind.EMBEDDING, ""),
        (Rerank("m", "q", ("a", "long")), JobKind.RERANK, "q\nlong"),
        (Rerank("m", "q", ()), JobKind.RERANK, "q\n"),
        (Transcription("m", "AAAA", "wav"), JobKind.TRANSCRIPTION, ""),
        (
            Transcription("m", "AAAA", "wav", {"prompt": "names"}),
            JobKind.TRANSCRIPTION,
            "names",
        ),
    ],
)
def test_work_has_a_kind_and_a_text(work: Work, kind: JobKind, text: str) -> None:
    assert (work.kind, work.text) == (kind, text)
    assert WORK_TYPES[kind] is type(work)


@pytest.mark.parametrize(
    ("delta", "size"),
    [
        (Delta(), 0),
        (Delta(0, {"content": "abc", "reasoning_content": "de"}), 5),
        (Delta(0, {"content": "abc"}, finish_reason="stop"), 3),
    ],
)
def test_size_of_a_delta_counts_its_texts(delta: Delta, size: int) -> None:
    assert delta.size == size


@pytest.mark.parametrize(
    "delta",
    [
        Delta(0, {"content": "abc", "tool_calls": ["x" * 1000]}),
        Delta(0, {"content": "abc"}, logprobs={"content": ["x" * 1000]}),
    ],
)
def test_size_of_a_delta_counts_its_structure(delta: Delta) -> None:
    assert delta.size >= 1003


def test_job_has_the_kind_and_model_of_its_work() -> None:
    job = Job(JobId("j"), Chat("m", ()))

    assert (job.kind, job.model) == (JobKind.CHAT, "m")
