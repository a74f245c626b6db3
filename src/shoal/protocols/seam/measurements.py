"""Embeddings and rerankings in the fields that Shoal's extensions of wires share."""

from collections.abc import Mapping, Sequence
from typing import Literal

from shoal.domain.work import JSON, Embedding, JobKind, Measurement, Rerank


def query_of(work: Measurement) -> str:
    """Return the field ``prompt``: what all inputs are measured by."""
    return work.query if isinstance(work, Rerank) else ""


def inputs_of(work: Measurement) -> list[str]:
    """Return the field ``inputs``: the texts that are measured."""
    return list(work.documents if isinstance(work, Rerank) else work.inputs)


def measurement(
    kind: Literal[JobKind.EMBEDDING, JobKind.RERANK],
    model: str,
    prompt: JSON,
    inputs: Sequence[str],
    options: Mapping[str, JSON],
) -> Measurement:
    """Return the work that the fields stand for."""
    if kind is JobKind.EMBEDDING:
        return Embedding(model, tuple(inputs), options)
    query = prompt if isinstance(prompt, str) else ""
    return Rerank(model, query, tuple(inputs), options)
