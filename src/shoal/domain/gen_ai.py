"""OpenTelemetry's names for generative AI, as metrics and traces use them.

Source: Semantic conventions for generative AI, "Inference" and "Embeddings", of the
release 1.41.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shoal.domain.outcome import Usage
from shoal.domain.work import Chat, Completion, JobKind, Work

PROVIDER = "shoal"  # ``gen_ai.provider.name``: what is behind a worker may be anything

SpanAttributes: TypeAlias = dict[str, "str | int | float | bool | Sequence[str]"]


def _operation_name(kind: JobKind) -> str:
    match kind:
        case JobKind.CHAT:
            return "chat"
        case JobKind.COMPLETION:
            return "text_completion"
        case JobKind.EMBEDDING:
            return "embeddings"
        case (
            JobKind.RERANK
            | JobKind.TRANSCRIPTION
            | JobKind.TASK
            | JobKind.CALL
            | JobKind.CALL_STREAM
            | JobKind.MODEL
        ):
            return kind.name.lower()  # OpenTelemetry has no name for it


OPERATION_NAMES: Mapping[JobKind, str] = {
    kind: _operation_name(kind) for kind in JobKind
}
"""The values of ``gen_ai.operation.name``."""


def request_attributes(work: Work) -> SpanAttributes:
    """Return the attributes of a request: nothing of what it says."""
    found: SpanAttributes = {
        "gen_ai.operation.name": OPERATION_NAMES[work.kind],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": work.model,
    }
    if isinstance(work, Chat | Completion):
        if work.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = work.max_tokens
        if work.temperature is not None:
            found["gen_ai.request.temperature"] = work.temperature
    return found


def response_attributes(
    finish_reasons: Sequence[str], usage: Usage | None
) -> SpanAttributes:
    """Return the attributes of an answer."""
    found: SpanAttributes = {"gen_ai.response.finish_reasons": list(finish_reasons)}
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
    return found
