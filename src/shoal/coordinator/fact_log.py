"""Logs each fact on one line, without prompts, answers or keys."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum

from shoal.domain.facts import (
    FACT_NAMES,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobSubmitted,
    WorkerLoadChanged,
)
from shoal.domain.ids import JobId
from shoal.domain.work import CALL_QUEUE

UNLOGGED = (
    "outcome",
    "passed_over",
    "offer",
    "output_hash",
    "worker_receipt",
)  # long, or somebody's text
UNQUOTED = frozenset(
    {"fact", "job", "limit", "fault", "verdict"}
)  # words that are our own

log = logging.getLogger("shoal.hub")


class FactLog:
    """Writes each fact at INFO, but what happens all the time at DEBUG.

    Calls of functions may be thousands a second, and how busy a worker is changes with
    every job that others have there.
    """

    def __init__(self) -> None:
        self._calls: set[JobId] = set()  # that are open

    def on_fact(self, fact: Fact) -> None:
        """Write a fact to the log."""
        level = logging.DEBUG if self._is_frequent(fact) else logging.INFO
        if log.isEnabledFor(level):
            named = fields_of(fact)
            log.log(level, "%s", describe(named), extra={"fields": named})

    def _is_frequent(self, fact: Fact) -> bool:
        match fact:
            case JobSubmitted(job) if job.model == CALL_QUEUE:
                self._calls.add(job.id)
                return True
            case JobCompleted(job_id) | JobFailed(job_id):
                known = job_id in self._calls
                self._calls.discard(job_id)
                return known
            case JobCancelled(job_id) | JobExpired(job_id):
                known = job_id in self._calls
                self._calls.discard(job_id)
                return known
            case JobLeased(job_id) | JobRequeued(job_id):
                return job_id in self._calls
            case WorkerLoadChanged(fitness_changed=turned):
                return not turned
            case _:
                return False


def fields_of(fact: Fact) -> dict[str, object]:
    """Return what is logged of a fact, by name."""
    named: dict[str, object] = {"fact": FACT_NAMES[type(fact)]}
    if isinstance(fact, JobSubmitted):
        job = fact.job
        return named | {"job": job.id, "model": job.model, "key": job.owner}
    if isinstance(fact, WorkerLoadChanged):
        told = fact.load
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
    return isinstance(value, str) and name not in UNQUOTED
