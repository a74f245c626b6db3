"""Logs each fact on one line, without prompts, answers or keys."""

import logging
from collections.abc import Mapping, Sequence
from enum import Enum

from shoal.domain import facts
from shoal.domain.ids import JobId
from shoal.domain.work import CALL_QUEUE

UNLOGGED = (
    "outcome",
    "exception",
    "passed_over",
    "kept",
    "resumes",
    "carrier",
    "keeps_jobs",
    "awaited",
    "offer",
    "output_hash",
    "worker_receipt",
    "first_output",
    "loading",
)  # long, or free text
UNQUOTED = frozenset(
    {"fact", "job", "limit", "fault", "verdict", "how"}
)  # values from fixed sets

log = logging.getLogger("shoal.coordinator")


class FrequentFacts:
    """Recognizes the facts that are too frequent to be listed one by one.

    There may be thousands of function calls a second, and a worker's load changes with
    every job that another pool runs there.
    """

    def __init__(self) -> None:
        self._calls: set[JobId] = set()  # open calls

    def among(self, batch: Sequence[facts.Fact]) -> list[bool]:
        """Say of each fact whether it is frequent.  Call it with every fact, once."""
        found = []
        calls = self._calls
        for fact in batch:
            frequent = False
            match fact:
                case facts.JobSubmitted(job):
                    if frequent := job.model == CALL_QUEUE:
                        calls.add(job.id)
                case (
                    facts.JobCompleted()
                    | facts.JobFailed()
                    | facts.JobCancelled()
                    | facts.JobExpired()
                ):
                    if frequent := fact.job_id in calls:
                        calls.remove(fact.job_id)
                case facts.JobLeased() | facts.JobRequeued():
                    frequent = fact.job_id in calls
                case facts.WorkerLoadChanged(fitness_changed=turned):
                    frequent = not turned
                case _:
                    pass
            found.append(frequent)
        return found


USUAL = (facts.JobSubmitted, facts.JobLeased, facts.JobStarted, facts.JobCompleted)
"""What happens to each job: the line of its request says it at INFO."""


class FactLog:
    """Logs facts at INFO, and frequent and usual ones at DEBUG."""

    def __init__(self) -> None:
        self._frequent = FrequentFacts()

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Log facts."""
        enabled = log.getEffectiveLevel()
        for fact, frequent in zip(batch, self._frequent.among(batch), strict=True):
            usual = frequent or isinstance(fact, USUAL)
            level = logging.DEBUG if usual else logging.INFO
            if level >= enabled:
                named = fields_of(fact)
                log.log(level, "%s", describe(named), extra={"fields": named})


def fields_of(fact: facts.Fact) -> dict[str, object]:
    """Return the logged fields of a fact, by name."""
    named: dict[str, object] = {"fact": facts.FACT_NAMES[type(fact)]}
    if isinstance(fact, facts.JobSubmitted):
        job = fact.job
        return named | {"job": job.id, "model": job.model, "key": job.owner}
    if isinstance(fact, facts.WorkerLoadChanged):
        load = fact.load
        worker = {"worker": fact.worker_id, "unfit": load.unfit}
        return named | worker | {"queued": load.queued, "speed": load.speed}
    for name in fact.__struct_fields__:
        value = getattr(fact, name)
        if name in UNLOGGED:
            continue
        if isinstance(value, Enum):
            value = value.name.lower()
        named[name.removesuffix("_id")] = value
    return named


def describe(named: Mapping[str, object]) -> str:
    """Return fields as ``key=value`` pairs on one line."""
    return " ".join(
        f"{name}={value!r}" if _quoted(name, value) else f"{name}={value}"
        for name, value in named.items()
    )


def _quoted(name: str, value: object) -> bool:
    # Model names and reasons come from clients and workers.
    return isinstance(value, str) and name not in UNQUOTED
