"""Writes facts to the log: one line each, without prompts, answers and keys."""

import logging
from dataclasses import fields

from shoal.domain.facts import Fact, JobSubmitted
from shoal.domain.work import Limit

UNLOGGED = ("outcome", "passed_over", "offer")  # long, or somebody's text

log = logging.getLogger("shoal.hub")


def log_fact(fact: Fact) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", describe(fact))


def describe(fact: Fact) -> str:
    """Write a fact as ``key=value`` pairs."""
    pairs = [f"fact={type(fact).__name__}"]
    if isinstance(fact, JobSubmitted):
        # Names of models come from clients and workers, hence quoted.
        return f"{pairs[0]} job={fact.job.id} model={fact.job.model!r}"
    for field in fields(fact):
        value = getattr(fact, field.name)
        match field.name, value:
            case name, _ if name in UNLOGGED:
                continue
            case "job_id", _:
                pairs.append(f"job={value}")
            case name, str():
                pairs.append(f"{name.removesuffix('_id')}={value!r}")
            case name, Limit():
                pairs.append(f"{name}={value.name.lower()}")
            case name, _:
                pairs.append(f"{name}={value}")
    return " ".join(pairs)
