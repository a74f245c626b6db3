"""Function calls: the workers that support them, and their time limits."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from shoal.domain import errors
from shoal.domain.ids import peer_of
from shoal.domain.job import Job, TimeLimits
from shoal.domain.work import JSON, Feature, describe_target, values_of
from shoal.domain.worker import Offer
from shoal.pool.eligibility import join_versions, offers_task, runs_python
from shoal.pool.open_job import python_of, required_name
from shoal.pool.roster import remember, suggest_names
from shoal.pool.state import PoolState

WORKERS_EXAMINED_MAX = 256  # workers examined

NO_FUNCTIONS = "no connected worker offers functions"
ALL = "`shoal tasks ls`, pool.tasks() or GET /v1/tasks lists all"
NO_CODE = (
    "no worker here runs functions sent by clients: start one with `shoal join "
    "--trust-code` and a join token, or give the function a name with @shoal.task "
    "where a worker finds it"
)
OTHER_PYTHON = (
    "code of Python {}; the workers have {}: start one with the same version, or give "
    "the function a name with @shoal.task where a worker finds it"
)
PLAIN_ONLY = (
    "{sought} is only on workers that accept plain values, such as numbers, "
    "texts, lists and dictionaries: convert the arguments, or start `shoal join` with "
    "the function"
)


def call_rejection(pool: PoolState, job: Job, now: float) -> errors.ShoalError | None:
    """Return the error if no worker of the pool can ever run a call, or None.

    A call may wait while no worker calls functions, and for a function that a worker
    offered a short while ago, or any if its terms say so.
    """
    offers = _offers(pool, job)
    if any(_can_call(offer, job) for offer in offers):
        return None  # the common case, so the rest may be slow
    if not offers or _are_many(pool, job):
        return None
    name, needs = required_name(job.work), job.work.needs
    if Feature.CODE in needs:
        offers = [offer for offer in offers if Feature.CODE in offer.features]
        if not offers:
            return errors.CannotDo(NO_CODE, "code")
        python = python_of(job.work)
        if not any(runs_python(offer, python) for offer in offers):
            others = frozenset[str]().union(*(offer.pythons for offer in offers))
            return errors.CannotDo(
                OTHER_PYTHON.format(python, join_versions(others)), "code"
            )
    if name is not None:
        named = [offer for offer in offers if offers_task(offer, name)]
        if not named:
            waits = job.terms.waits or pool.roster.knows_function(name, now)
            return None if waits else errors.UnknownTask(_unknown_function(offers, job))
        offers = named
    if all(offer.only_for and job.owner not in offer.only_for for offer in offers):
        return errors.Forbidden(
            f"the workers with {describe_target(job.work)} work for other keys only"
        )
    if not any(needs <= offer.features for offer in offers):
        return errors.CannotDo(
            PLAIN_ONLY.format(sought=describe_target(job.work)), "values"
        )
    return None


def task_rejection(pool: PoolState, job: Job, now: float) -> errors.ShoalError | None:
    """Return the error if no worker of the pool can ever run a task, or None.

    A task may wait while no worker runs tasks, as a call may.
    """
    name = required_name(job.work)
    if name is None or _are_many(pool, job):
        return None
    known = pool.roster.findings.named
    alike = (name, job.terms.peer, job.terms.near)
    if (named := known.get(alike)) is None:
        offers = _offers(pool, job)
        named = [offer for offer in offers if offers_task(offer, name)]
        remember(known, alike, named)
    if not named:
        offers = _offers(pool, job)
        if not offers or pool.roster.knows_function(name, now):
            return None
        return errors.UnknownTask(_unknown_function(offers, job))
    if _LONG_NUMBER.search(job.terms.form) and all(
        Feature.VALUES in offer.features for offer in named
    ):
        found = [*islice(_long_integers(values_of(job.work)[0], "payload"), 1)]
        if found:
            text = "functions get integers of up to 64 bits from JSON"
            return errors.InvalidRequest(f"{found[0]}: {text}", found[0])
    return None


_LONG_NUMBER = re.compile("[0-9]{19}")


def _long_integers(value: JSON, name: str) -> Iterator[str]:
    """Yield the places of integers beyond 64 bits."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _long_integers(item, f"{name}.{key:.40}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _long_integers(item, f"{name}[{number}]")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        yield name


def _offers(pool: PoolState, job: Job) -> list[Offer]:
    """Return the offers for the job's queue, without those of the peer that sent it."""
    workers = pool.roster.with_model.get(job.model, {})
    peer, near = job.terms.peer, job.terms.near
    return [
        worker.offer
        for worker in islice(workers.values(), WORKERS_EXAMINED_MAX)
        if not (peer and peer_of(worker.id) == peer)
        and not (near and worker.offer.neighbour)
    ]


def _are_many(pool: PoolState, job: Job) -> bool:
    return len(pool.roster.with_model.get(job.model, {})) > WORKERS_EXAMINED_MAX


def _can_call(offer: Offer, job: Job) -> bool:
    name = required_name(job.work)
    return (
        (name is None or offers_task(offer, name))
        and job.work.needs <= offer.features
        and runs_python(offer, python_of(job.work))
        and (not offer.only_for or job.owner in offer.only_for)
    )


def _unknown_function(offers: Sequence[Offer], job: Job) -> str:
    """Return an error text for an unknown function, with suggestions."""
    known = frozenset[str]().union(*(offer.tasks for offer in offers))
    suggestion = suggest_names(required_name(job.work) or "", known, ALL)
    return f"no worker has {describe_target(job.work)}: {suggestion or NO_FUNCTIONS}"


CALL_QUEUE_SECONDS = 3600.0  # seconds that a call waits for a worker by default
CALL_TOTAL_SECONDS = (
    86_400.0  # seconds from its acceptance, with all attempts and waits
)
GANG_TOTAL_SECONDS = 30 * CALL_TOTAL_SECONDS  # the same, for members of gangs
CALL_GRACE_SECONDS = (
    30.0  # seconds beyond its timeout until the worker counts as broken
)


def no_call_result(seconds: float) -> str:
    """Return the error of a call whose worker is silent beyond the call's limit."""
    return f"the worker returned no result of the call within {seconds:g} s"


@lru_cache(256)
def call_limits(
    timeout: float | None = None,
    queue: float = CALL_QUEUE_SECONDS,
    total: float = CALL_TOTAL_SECONDS,
) -> TimeLimits:
    """Return the limits of a call; all are in seconds.

    A function is silent until it returns, so silence has no meaning; but a worker that
    exceeds the call's timeout is broken.
    """
    patience = total if timeout is None else min(timeout + CALL_GRACE_SECONDS, total)
    return TimeLimits(min(queue, total), patience, patience, total)
