"""Work on inputs in the fields that Shoal's extensions of wires share."""

from collections.abc import Mapping, Sequence
from typing import Literal

from shoal.domain.work import (
    JSON,
    Embedding,
    InputWork,
    JobKind,
    Rerank,
    Transcription,
)


def input_prompt(work: InputWork) -> str:
    """Return the field ``prompt``: a reranking's query, or the format of audio."""
    match work:
        case Embedding():
            return ""
        case Rerank():
            return work.query
        case Transcription():
            return work.format


def inputs_of(work: InputWork) -> list[str]:
    """Return the field ``inputs``: texts, or audio in base64."""
    match work:
        case Embedding():
            return list(work.inputs)
        case Rerank():
            return list(work.documents)
        case Transcription():
            return [work.audio]


def input_work(
    kind: Literal[JobKind.EMBEDDING, JobKind.RERANK, JobKind.TRANSCRIPTION],
    model: str,
    prompt: JSON,
    inputs: Sequence[str],
    options: Mapping[str, JSON],
) -> InputWork:
    """Return the work that the fields stand for."""
    prompt = prompt if isinstance(prompt, str) else ""
    match kind:
        case JobKind.EMBEDDING:
            return Embedding(model, tuple(inputs), options)
        case JobKind.RERANK:
            return Rerank(model, prompt, tuple(inputs), options)
        case JobKind.TRANSCRIPTION:
            return Transcription(model, "".join(inputs), prompt, options)
