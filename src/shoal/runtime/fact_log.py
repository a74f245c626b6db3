"""Writes facts to the log: one line each, without prompts, answers and keys."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum

from shoal.domain.facts import Fact, JobSubmitted, WorkerConditioned

UNLOGGED = ("outcome", "passed_over", "offer")  # long, or somebody's text
OURS = frozenset({"fact", "job", "limit", "fault", "verdict"})  # words that are our own

log = logging.getLogger("shoal.hub")


def log_fact(fact: Fact) -> None:
    # How busy a worker is changes with every job that others have there.
    often = isinstance(fact, WorkerConditioned) and not fact.turned
    level = logging.DEBUG if often else logging.INFO
    if log.isEnabledFor(level):
        named = fields_of(fact)
        log.log(level, "%s", describe(named), extra={"fields": named})


def fields_of(fact: Fact) -> dict[str, object]:
    """Return what is logged of a fact, by name."""
    named: dict[str, object] = {"fact": type(fact).__name__}
    if isinstance(fact, JobSubmitted):
        job = fact.job
        return named | {"job": job.id, "model": job.model, "key": job.owner}
    if isinstance(fact, WorkerConditioned):
        told = fact.condition
        worker = {"worker": fact.worker_id, "unfit": told.unfit}
        return named | worker | {"queued": told.queued, "speed": told.speed}
    for field in fields(fact):
        value = getattr(fact, field.name)
        if field.name in UNLOGGED:
            continue
        if isinstance(value, Enum):
            value = value.name.lower()
        named[field.name.removesuffix("_id")] = value
    return named


def describe(named: Mapping[str, object]) -> str:
    """Write fields as ``key=value`` pairs, with no line end that is not ours."""
    return " ".join(
        f"{name}={value!r}" if _quoted(name, value) else f"{name}={value}"
        for name, value in named.items()
    )


def _quoted(name: str, value: object) -> bool:
    # Names of models and reasons come from clients and workers.
    return isinstance(value, str) and name not in OURS
